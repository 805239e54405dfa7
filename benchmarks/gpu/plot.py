"""Tables and pictures of what the GPU benchmarks found: `python benchmarks/gpu/plot.py [DIR]`, on any machine.

Reads gpu-*.json in DIR (benchmarks/results); writes gpu.md and, for each table of `lookup`, gpu-lookup-TABLE.png there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import tables

RESULTS = Path(__file__).parents[1] / "results"
# What is drawn, and how: ours in colour and thick, the others thinner.
LINES: dict[str, dict[str, Any]] = {
    "transformers": {"color": "tab:brown", "marker": "v"},
    "cross-process": {"color": "tab:purple", "marker": "D"},
    "uva": {"color": "dimgrey", "marker": "s"},
    "direct": {"color": "tab:blue", "marker": "o", "linewidth": 2.2},
    "staged": {"color": "tab:orange", "marker": "o", "linewidth": 2.2},
    "ipc": {"color": "tab:cyan", "marker": "o", "linewidth": 2.2},
    "auto": {"color": "tab:green", "marker": "*", "markersize": 10, "linestyle": ":", "linewidth": 2.2},
    "hbm": {"color": "black", "marker": "^"},
}
LABELS = {
    "transformers": "transformers: embedding on the CPU",
    "cross-process": "cross-process: another process gathers",
    "uva": "uva: plain GPU gather from host memory",
    "direct": "ple-offload, direct",
    "staged": "ple-offload, staged",
    "ipc": "ple-offload, ipc",
    "auto": "ple-offload, auto",
    "hbm": "hbm: the table in GPU memory",
}
ABOUT = """# GPU benchmarks

Written by `benchmarks/gpu/plot.py`. Medians (95 % intervals). Where a contender comes in two kinds, decoding in the gather
or after it, the faster one stands in the table."""
PANELS = ("wall_us", "queued_us", "alone_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    parts = [ABOUT]
    for name, describe in tables.PARTS.items():
        path = folder / f"gpu-{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        parts.append(f"## {name}\n\n{describe(found)}")
        if name == "lookup":
            for label, kinds in found.get("lookup", {}).items():
                if kinds.get("random"):
                    draw(found, label, folder / f"gpu-lookup-{label}.png")
                    parts.append(f"![{label}](gpu-lookup-{label}.png)")
    (folder / "gpu.md").write_text("\n\n".join(parts) + "\n")


def draw(found: tables.Found, label: str, path: Path) -> None:
    """Time of one lookup of random rows against its number of tokens, a panel for each figure that was measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = {int(tokens): one for tokens, one in found["lookup"][label]["random"].items()}
    sizes = dict(sorted(sizes.items()))
    panels = [figure for figure in PANELS if any(one.get(figure) for one in sizes.values())]
    picture, axes = plt.subplots(1, len(panels), figsize=(1 + 5.2 * len(panels), 6.4), sharey=True, squeeze=False)
    for axis, figure in zip(axes[0], panels, strict=True):
        _panel(axis, sizes, figure)
    axes[0][0].set_ylabel("microseconds, median and 95 % interval")
    handles = {name: line for axis in axes[0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    about = found["tables"][label]
    picture.suptitle(
        f"One lookup: {about['num_rows']:,} rows of {about['row_bytes']} B, tier {about['tier']}; of random ids\n"
        "from row numbers on the GPU to bf16 values there; "
        f"{found['machine']['gpu']}, {found['machine']['cores']} cores",
        fontsize=12,
    )
    picture.tight_layout(rect=(0, 0.13, 1, 1))
    picture.savefig(path, dpi=110)
    plt.close(picture)


def _panel(axis: Any, sizes: dict[int, tables.Found], figure: str) -> None:
    for column, style in LINES.items():
        points = [
            (tokens, one) for tokens, times in sizes.items() if (one := tables.best(times.get(figure, {}), column))
        ]
        if points:
            middle = [one["p50"] for _, one in points]
            spread = [
                [one["p50"] - one["low"] for _, one in points],
                [one["high"] - one["p50"] for _, one in points],
            ]
            axis.errorbar(
                [t for t, _ in points], middle, spread, label=LABELS[column], capsize=2, elinewidth=1, **style
            )
    drawn = [tokens for tokens, one in sizes.items() if one.get(figure)]
    limits = [sizes[tokens]["pcie_limit_us"] for tokens in drawn]
    axis.plot(drawn, limits, "--", color="tab:red", label="PCIe limit: the rows' bytes at the rate of a large copy")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(bottom=1)
    axis.set_xticks(drawn, [f"{tokens:,}" for tokens in drawn], rotation=45)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_xlabel("tokens x 16 rows")
    axis.set_title(tables.FIGURES[figure], fontsize=10)


if __name__ == "__main__":
    main()
