"""Counters: plain numbers that the one thread which works also counts, and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields


@dataclass
class LayerCounters:
    """What was served for one layer of one session. Times in seconds; all only grow."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0  # of stored rows
    sampled_rows: int = 0  # rows of the steps that were searched for duplicates
    duplicate_rows: int = 0  # of those, rows that the same step asked for before
    gather_s: float = 0.0  # finding and copying rows
    errors: int = 0  # steps that failed


@dataclass
class SessionCounters:
    """What happened to one session."""

    queue_s: float = 0.0  # from the doorbell to the start of the lookup
    wait_s: float = 0.0  # what its readers waited, as they report it
    faults: int = 0  # pages of a mapped file that were gone
    connections: int = 0
    lost_ranks: int = 0


HELP = {
    "steps": "Steps served.",
    "rows": "Rows delivered.",
    "bytes": "Stored bytes of the rows delivered.",
    "sampled_rows": "Rows of the steps that were searched for duplicates.",
    "duplicate_rows": "Of the sampled rows, those the same step had asked for before.",
    "gather_s": "Time spent on finding and copying rows.",
    "errors": "Steps that failed.",
    "queue_s": "Time requests waited before their lookup began.",
    "wait_s": "Time readers waited for rows, as they report it.",
    "faults": "Pages of a mapped file that were gone when read.",
    "connections": "Ranks that connected.",
    "lost_ranks": "Ranks that went without a goodbye.",
}

Sample = tuple[str, dict[str, str], float]  # name, labels, value


def samples(counters: LayerCounters | SessionCounters, **labels: str) -> Iterator[Sample]:
    for field in fields(counters):
        name = field.name.removesuffix("_s") + ("_seconds" if field.name.endswith("_s") else "")
        yield f"ple_offload_{name}_total", labels, float(getattr(counters, field.name))


def prometheus_text(lines: Iterable[Sample]) -> str:
    """Samples in the Prometheus text format, those of one name together."""
    help_of = {
        f"ple_offload_{k.removesuffix('_s')}{'_seconds' if k.endswith('_s') else ''}_total": v for k, v in HELP.items()
    }
    by_name: dict[str, list[str]] = {}
    for name, labels, value in lines:
        text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        by_name.setdefault(name, []).append(f"{name}{{{text}}} {value:.17g}")
    blocks = []
    for name, values in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        blocks.append("\n".join([f"# HELP {name} {help_of.get(name, name)}", f"# TYPE {name} {kind}", *values]))
    return "\n".join(blocks) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
