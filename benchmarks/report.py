"""Results as JSON (for machines), a short markdown table and a plot (for people); all say which machine it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def write(results: Path, name: str, result: Result) -> None:
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def summarize(results: Path) -> str:
    """Markdown of every result found in the folder; also written to README.md there."""
    parts = [
        "# Results\n\nWritten by `make bench`; each table is one run, its contenders in turns. Medians (quartiles).\n"
    ]
    for name, table in TABLES.items():
        path = results / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            parts.append(f"## {name}\n\n{_machine(result)}\n\n{table(result)}\n")
    text = "\n".join(parts)
    (results / "README.md").write_text(text)
    return text


def plot(results: Path) -> None:
    """Bars: microseconds of a lookup, ours and the baselines, log scale; one panel per number of tokens."""
    path = results / "gather.json"
    if not path.exists():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(path.read_text())
    rows = [row for row in result["results"] if row["rhythm"] == "call after call" and row["ids"] == "random"]
    figure, panels = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 3.6))
    for panel, row in zip(panels, rows, strict=True):
        names = list(row["us"])[::-1]
        middle = [row["us"][name]["p50"] for name in names]
        errors = [
            [row["us"][name]["p50"] - row["us"][name]["p25"] for name in names],
            [row["us"][name]["p75"] - row["us"][name]["p50"] for name in names],
        ]
        colours = ["tab:green" if name.startswith("ours") else "tab:grey" for name in names]
        panel.barh(names if panel is panels[0] else range(len(names)), middle, xerr=errors, color=colours)
        if panel is not panels[0]:
            panel.set_yticks([])
        panel.set_title(f"{row['tokens']:,} tokens x 16 rows")
        panel.set_xlabel("microseconds")
    figure.suptitle(
        f"Ids to bf16 values, random ids, {result['machine']['cpu']}, {result['machine']['cores']} cores", y=1.0
    )
    figure.tight_layout()
    figure.savefig(results / "gather.png", dpi=110)
    plt.close(figure)


def _machine(result: Result) -> str:
    machine = result["machine"]
    table = result.get("table")
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}",
        f"Python {machine['python']}, numba {machine['numba']}, torch {machine['torch']}",
        f"load average at start {machine['load_average_at_start']}",
    ]
    if table:
        parts.append(f"{table['num_rows']:,} rows x {table['row_bytes']} B in {table['files']} files")
    blocks = result["blocks"]
    if blocks["kept"]:
        parts.append(
            f"blocks: {blocks['kept']} kept, {blocks['thrown_away']} thrown away because of other work on the machine, "
            f"{blocks['kept_though_disturbed']} kept in spite of it"
        )
    return "; ".join(parts) + "." + (f" **{result['warning']}.**" if result.get("warning") else "")


def _us(values: dict[str, float]) -> str:
    return f"{_number(values['p50'])} ({_number(values['p25'])}-{_number(values['p75'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _gather(result: Result) -> str:
    found = result["results"]
    notes = "Ids: " + "; ".join(f"{kind}: {what}" for kind, what in result["ids"].items()) + "."
    parts = [notes, "How many times longer than ours of the same tier:"]
    names = list(found[0]["times_longer"])
    head = ["ids", "tokens", "rhythm", *names]
    rows = [[r["ids"], f"{r['tokens']:,}", r["rhythm"], *(_us(r["times_longer"][n]) for n in names)] for r in found]
    parts += [_table(head, rows), "Microseconds:"]
    names = list(found[0]["us"])
    rows = [[r["ids"], f"{r['tokens']:,}", r["rhythm"], *(_us(r["us"][n]) for n in names)] for r in found]
    parts += [_table(["ids", "tokens", "rhythm", *names], rows), "![plot](gather.png)"]
    return "\n\n".join(parts)


def _hashing(result: Result) -> str:
    names = list(result["results"][0]["us"])
    rows = [[r["ids"], f"{r['tokens']:,}", *(_us(r["us"][name]) for name in names)] for r in result["results"]]
    return _table(["ids", "tokens", *(f"{name}, us" for name in names)], rows)


def _load(result: Result) -> str:
    rows = []
    for r in result["results"]:
        for way in ("plain read", "store", "open_table"):
            share = r["rate_of_plain_read"].get(way)
            rows.append([r["files"], way, _us(r["seconds"][way]), str(r["gb_per_s"][way]), _us(share) if share else ""])
    note = f"{result['threads']} threads, {result['rounds']} alternating rounds."
    return note + "\n\n" + _table(["files", "way", "s", "GB/s", "rate / plain read"], rows)


def _memory(result: Result) -> str:
    rows = [
        [key.removesuffix("_bytes").replace("_", " "), f"{value / (1 << 20):,.1f}"]
        for key, value in result.items()
        if key.endswith("_bytes")
    ]
    return _table(["what", "MiB"], rows)


def _startup(result: Result) -> str:
    rows = [[state, *(_us(values) for values in found.values())] for state, found in result["start"].items()]
    parts = [_table(["kernels", "import s", "open s", "first lookup s"], rows), "Cost of a parallel region, us:"]
    regions = result["parallel_region"]
    pauses = list(next((r["after_pause_us"] for r in regions if "after_pause_us" in r), {}))
    rows = [
        [r["asked"], *([_us(r["after_pause_us"][p]) for p in pauses] if "layer" in r else ["not here"] * len(pauses))]
        for r in regions
    ]
    parts.append(_table(["layer", *(f"after {pause} us" for pause in pauses)], rows))
    return "\n\n".join(parts)


def _serving(result: Result) -> str:
    rows = [
        [
            r["ids"],
            f"{r['tokens']:,}",
            *(_us(r["us"][n]) for n in ("in process", "worker")),
            _us(r["worker / in process"]),
        ]
        for r in result["results"]
    ]
    busy, sessions = result["busy_caller"], result["sessions"]
    buffers, growth = (sessions[key] / (1 << 20) for key in ("buffers_bytes", "worker_pss_growth_bytes"))
    notes = (
        f"Rows of 64 tokens after the caller computed for {busy['busy_ms']:.0f} ms: {_us(busy['us'])} us, p99 "
        f"{_number(busy['p99_us'])} us, over {busy['steps']} steps. "
        f"A worker with a session and no step: {result['idle_worker_cpu_percent']} % of a core. "
        f"{sessions['sessions']} more sessions, whose buffers have {buffers:.1f} MiB, made the worker's PSS grow by "
        f"{growth:.1f} MiB (half of a shared buffer counts as the client's)."
    )
    head = ["ids", "tokens", "in process, us", "through a worker, us", "worker / in process"]
    return "\n\n".join([_table(head, rows), notes])


TABLES = {
    "gather": _gather,
    "hashing": _hashing,
    "load": _load,
    "memory": _memory,
    "startup": _startup,
    "serving": _serving,
}
