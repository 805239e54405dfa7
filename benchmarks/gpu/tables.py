"""What the GPU benchmarks found, as Markdown tables; from their JSON files, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report import _number, _table

Found = dict[str, Any]
# A column, and who may stand in it: the fastest of them does.
COLUMNS = {
    "hbm": ("hbm", "hbm fused"),
    "uva": ("uva", "uva fused"),
    "cross-process": ("cross-process",),
    "transformers": ("transformers",),
    "direct": ("direct",),
    "staged": ("staged",),
    "ipc": ("ipc",),
    "auto": ("auto",),
    "direct, from ids": ("direct tokens",),
    "staged, from ids": ("staged tokens",),
    "ipc, from ids": ("ipc tokens",),
    "auto, from ids": ("auto tokens",),
}
OURS = ("direct", "staged", "ipc", "auto")
OURS_FROM_IDS = tuple(f"{route}, from ids" for route in OURS)
FIGURES = {
    "wall_us": "Launched from Python, until the GPU is done",
    "queued_us": "On the GPU, launching hidden behind other work",
    "alone_us": "On the GPU, as a captured graph",
    "chain_us": "On the GPU, one of eight lookups in a graph",
}


def best(times: Found, column: str) -> Found | None:
    """The summary of the fastest contender of a column, by its median; None where none was measured."""
    measured = [times[name] for name in COLUMNS[column] if name in times]
    return min(measured, key=lambda one: float(one["p50"]), default=None)


def machine(found: Found) -> str:
    """One sentence."""
    one = found["machine"]
    return (
        f"{one['gpu']}, driver {'.'.join(map(str, one['driver'] or ['unknown']))}, large copies to it at "
        f"{one['pcie_h2d_gb_per_s']} GB/s; {one['cores']} cores ({one['cpu']}), {one['memory_gib']} GiB, Linux "
        f"{one['kernel']}; torch {one['torch']}, Triton {one['triton']}"
    )


def lookup(found: Found) -> str:
    """Every table and race: a table of times for each figure, and what is compared with what."""
    parts = [machine(found) + "."]
    if "settings" in found:
        parts.append("Settings: " + ", ".join(f"{key} {value}" for key, value in found["settings"].items()) + ".")
    for label, kinds in found.get("lookup", {}).items():
        about = found["tables"][label]
        for name, started in found.get("starts", {}).get(label, {}).items():
            if name.startswith("auto"):
                report = started["report"]
                parts.append(f"{label}, {name}: direct up to {report['direct_tokens']:,} tokens: {report['why']}")
        for kind, sizes in kinds.items():
            rows, *race = kind.split(", ")
            parts.append(f"### {label}, {', '.join([f'{rows} rows', *race])}")
            parts.append(
                f"{about['num_rows']:,} rows of {about['row_bytes']} B, tier {about['tier']}; "
                f"{found['pools'][label][rows]}."
            )
            for figure, title in FIGURES.items():
                if any(figure in one for one in sizes.values()):
                    parts += [f"**{title}**, us:", _times(sizes, figure)]
    parts += _not_measured(found)
    return "\n\n".join(parts)


def _times(sizes: dict[str, Found], figure: str) -> str:
    measured = {tokens: sizes[tokens] for tokens in sorted(sizes, key=int) if sizes[tokens].get(figure)}
    columns = [c for c in COLUMNS if any(best(one[figure], c) for one in measured.values())]
    compared = [c for c in (*OURS, *OURS_FROM_IDS) if c in columns]
    regret = f"{figure.removesuffix('_us')}_regret"
    autos = sorted({name for one in measured.values() for name in one.get(regret, {})})
    head = ["tokens", "PCIe limit", *columns, *(f"{c} / uva" for c in compared), "ours / limit"]
    head += [f"{auto} / better" for auto in autos]
    rows = []
    for tokens, one in measured.items():
        times = one[figure]
        row = [f"{int(tokens):,}", _number(one["pcie_limit_us"]), *(_cell(best(times, c)) for c in columns)]
        ratios = one.get(f"{figure.removesuffix('_us')}_over_uva", {})
        row += [_cell(ratios.get(COLUMNS[c][0])) for c in compared]
        ours = [one_of["p50"] for c in compared if (one_of := best(times, c))]
        row.append(_number(min(ours) / one["pcie_limit_us"]) if ours else "")
        row += [_lost(one, regret, auto) for auto in autos]
        rows.append(row)
    return _table(head, rows)


def _lost(one: Found, regret: str, auto: str) -> str:
    """What `auto` lost to whom, and which way it went: in a captured graph it does not choose."""
    lost = one.get(regret, {}).get(auto)
    if lost is None:
        return ""
    chose = f"; chose {one['chosen'][auto]}" if regret in ("wall_regret", "queued_regret") else ""
    return f"{_cell(lost)}, {lost['better']}{chose}"


def _not_measured(found: Found) -> list[str]:
    """Whoever failed, was wrong, broke, or had no time left, and where."""
    lines = []
    for why in ("failed", "wrong", "broken", "skipped"):
        for place, message in _leaves(found.get(why, {})):
            lines.append(f"* {why}: {place}: {message.splitlines()[0][:160]}")
    return ["Not measured:", "\n".join(lines)] if lines else []


def _leaves(tree: Found, place: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        here = f"{place} {key}".strip()
        if isinstance(value, str):
            found.append((here, value))
        elif "trace" in value:
            found.append((here, value["error"]))
        else:
            found += _leaves(value, here)
    return found


def gather(found: Found) -> str:
    """A table of times for each kind of region and reader; then what order and size of the table are worth."""
    measured = list(found.get("gather", {}).get("ways", {}).values())
    threads = sorted({one["threads"] for one in measured})
    parts = [machine(found) + ".", "Rows of 8,192 tokens, the CPU alone."]
    for region, told in dict.fromkeys((one["region"], one["told"]) for one in measured):
        here = [one for one in measured if (one["region"], one["told"]) == (region, told)]
        rows = []
        for gb, order in dict.fromkeys((one["table_gb"], one["order"]) for one in here):
            by_threads = {one["threads"]: one for one in here if (one["table_gb"], one["order"]) == (gb, order)}
            most = by_threads[threads[-1]]
            row = [f"{gb:g}", order, *(_cell(by_threads[count]["us"]) for count in threads)]
            rows.append([*row, _cell(most["over_tokens"]), _cell(most["over_smallest"])])
        head = ["table, GB", "order", *(f"{count} threads, us" for count in threads), "/ order of tokens", "/ smallest"]
        parts += [f"### region on {region} pages, {told} told", _table(head, rows)]
    parts += ["Ratios are of the most threads."] if measured else []
    return "\n\n".join(parts + _not_measured(found))


def step(found: Found) -> str:
    """Throughput beside `hbm`, case by case."""
    parts = [machine(found) + ".", "Throughput as a share of that with the table in GPU memory (`hbm`):"]
    for title, decoder in found.items():
        if not title.startswith("step "):
            continue
        cases = {case: ways for case, ways in decoder.items() if case.endswith("in flight")}
        names = list(dict.fromkeys(name for ways in cases.values() for name in ways))
        rows = [
            [case, _cell(ways.get("hbm", {}).get("step_ms"))]
            + [_cell(ways.get(name, {}).get("throughput_of_hbm"), 4) for name in names if name != "hbm"]
            for case, ways in cases.items()
        ]
        parts += [f"### {title}", _table(["case", "hbm, ms", *(name for name in names if name != "hbm")], rows)]
    return "\n\n".join(parts + _not_measured(found))


def concurrency(found: Found) -> str:
    """Time beside another engine / alone."""
    rows = []
    for load, routes in found.items():
        if not load.startswith(("decoder ", "lookup ")):
            continue
        for route, one in routes.items():
            batches = [key for key in one if isinstance(one[key], dict)]
            slowed = "; ".join(f"{batch} {_cell(one[batch]['slowed'])}" for batch in batches)
            rows.append([load, route, slowed, str(one.get("host_gb_per_s", ""))])
    head = ["engines", "route", "time beside the other engine / alone", "GB/s from host memory"]
    return "\n\n".join([machine(found) + f"; GPUs: {found.get('gpus')}.", _table(head, rows), *_not_measured(found)])


def start(found: Found) -> str:
    """Seconds from `open_table` to the first row on the GPU."""
    starts = {f"warm, {number}": one for number, one in found.get("warm", {}).items()}
    starts |= {f"{which} of two": one for which, one in found.get("second", {}).items() if which in ("first", "second")}
    if "start" in found.get("cold", {}):
        starts["cold"] = found["cold"]["start"]
    keys = ("open_s", "connect_s", "lookup_s", "first_row_s")
    rows = [
        [name, *(_number(one[key]) for key in keys), "yes" if one["right"] else "NO", str(one.get("rate_of_disk", ""))]
        for name, one in starts.items()
    ]
    shards = found.get("shards", {})
    about = f"{shards.get('num_rows', 0):,} rows in {shards.get('files')} files on {shards.get('file_system')}"
    head = ["start", *(key.removesuffix("_s").replace("_", " ") + ", s" for key in keys), "right", "rate / plain read"]
    return "\n\n".join([f"{machine(found)}; {about}.", _table(head, rows), *_not_measured(found)])


def cost(found: Found) -> str:
    """MiB of GPU memory, and host memory with one engine more at a time."""
    gpu = found.get("gpu", {})
    kinds = list(dict.fromkeys(kind for one in gpu.values() for kind in one))
    parts = [machine(found) + ".", "GPU memory, MiB:"]
    head = ["route", *(kind.replace("_bytes", "").replace("_", " ") for kind in kinds)]
    parts.append(_table(head, [[route, *(_mib(one.get(kind)) for kind in kinds)] for route, one in gpu.items()]))
    started = found.get("worker", {}).get("started", {}).get("gpu_bytes")
    parts.append(f"The worker's GPU memory: {_mib(started)} MiB. Host memory:")
    rows = [
        [route, count, _mib(one["together"].get("Pss")), str(one["table_copies"])]
        for route, counts in found.get("engines", {}).items()
        for count, one in counts.items()
    ]
    parts.append(_table(["route", "engines", "shares of all processes, MiB", "copies of the table"], rows))
    return "\n\n".join(parts + _not_measured(found))


def _cell(one: Found | None, digits: int | None = None) -> str:
    """Median (interval)."""
    if one is None:
        return ""
    show: Callable[[float], str] = _number if digits is None else lambda value: f"{value:.{digits}f}"
    return f"{show(one['p50'])} ({show(one['low'])}-{show(one['high'])})"


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / (1 << 20):,.1f}"


PARTS: dict[str, Callable[[Found], str]] = {
    "lookup": lookup,
    "gather": gather,
    "step": step,
    "start": start,
    "cost": cost,
    "concurrency": concurrency,
}
