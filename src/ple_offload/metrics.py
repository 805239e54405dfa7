"""Counters: plain numbers that the one thread which works also counts. worker/exporter.py shows them to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
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
    wait_s: float = 0.0  # what its readers waited, as they report it about once a second
    faults: int = 0  # pages of a mapped file that were gone
    connections: int = 0
    lost_ranks: int = 0


@dataclass
class ConnectorCounters:
    """What happened to one connector, as `connector.metrics`; kept through reconnections."""

    steps: int = 0  # prepare_forward calls, dummies counted
    waits: int = 0  # layers' rows that were asked of a worker
    wait_s: float = 0.0  # time until those rows were there; what came before the question costs nothing
    failures: int = 0  # steps that delivered NaN
    reconnects: int = 0


HELP = {
    "ple_offload_sessions": "Sessions that have a rank connected.",
    "ple_offload_ranks": "Ranks that are connected.",
    "ple_offload_steps_total": "Steps served.",
    "ple_offload_rows_total": "Rows delivered.",
    "ple_offload_bytes_total": "Stored bytes of the rows delivered.",
    "ple_offload_sampled_rows_total": "Rows of the steps that were searched for duplicates.",
    "ple_offload_duplicate_rows_total": "Of the sampled rows, those the same step had asked for before.",
    "ple_offload_gather_seconds_total": "Time spent on finding and copying rows.",
    "ple_offload_errors_total": "Steps that failed.",
    "ple_offload_queue_seconds_total": "Time requests waited before their lookup began.",
    "ple_offload_wait_seconds_total": "Time readers waited for rows, as they report it.",
    "ple_offload_faults_total": "Pages of a mapped file that were gone when read.",
    "ple_offload_connections_total": "Ranks that connected.",
    "ple_offload_lost_ranks_total": "Ranks that went without a goodbye.",
}

Sample = tuple[str, dict[str, str], float]  # name (one of HELP), labels, value


def samples(counters: LayerCounters | SessionCounters, **labels: str) -> Iterator[Sample]:
    for field in fields(counters):
        name = field.name.removesuffix("_s") + ("_seconds" if field.name.endswith("_s") else "")
        yield f"ple_offload_{name}_total", labels, float(getattr(counters, field.name))
