"""The GPU benchmarks: `python benchmarks/gpu/run.py lookup ... --out DIR`, on a machine with an NVIDIA GPU.

Every figure is written to DIR/gpu-NAME.json as it is made; a run that was cut short goes on where it stopped, and
whatever fails, or is left out for want of time, is written down there too. Parts run in the order they are named in, say
`lookup step gather start cost concurrency`; within a part the most telling figures come first. `plot.py` makes tables
and pictures of the files, on any machine.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # what is shared with the CPU benchmarks

import world
import worlds
from budget import Budget
from record import Record

from ple_offload import native

PARTS = {  # and their modules, the most telling first
    "lookup": "lookup",
    "step": "step",
    "gather": "cpu_gather",
    "start": "start",
    "cost": "cost",
    "concurrency": "concurrency",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    options.budget = Budget(options.budget_s)
    native.wait_without_spinning()  # before torch is loaded: one contender's idle threads must not slow the next one down
    for name in options.names:
        record = Record(options.out / f"gpu-{name}.json", again=options.again)
        began = time.monotonic()
        with record.failing("run"):  # the next part may work all the same
            record.put(importlib.import_module("host").describe(options.out), "machine")
            print(f"{name}: {record.found['machine']}", flush=True)
            importlib.import_module(PARTS[name]).run(options, record)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--budget-s", type=float, help="leave out what would not end within so many seconds from now")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, and roughly how fast")
    parser.add_argument("--rows", type=int, default=world.FULL_ROWS, help="about how many rows the FP8 table has")
    parser.add_argument("--bf16-rows", type=int, default=160_000_000, help="and the BF16 table")
    parser.add_argument("--text", type=Path, help="a .npy of token ids of real text (text_ids.py makes one)")
    parser.add_argument(
        "--shards",
        type=Path,
        default=Path(__file__).parents[2] / "build/bench",
        help="start, lookup of `file`: where the checkpoint is written (build/bench)",
    )
    parser.add_argument(
        "--worlds", type=_names, default=["fp8"], help=f"lookup: which tables, of {', '.join(worlds.WORLDS)}"
    )
    parser.add_argument("--tokens", type=_numbers, default=list(worlds.TOKENS), help="lookup: sizes, like 8192,64,1")
    parser.add_argument("--pause-us", type=float, default=0, help="lookup: between two lookups")
    parser.add_argument("--only", type=_names, help="lookup: contenders, like uva,direct,staged")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
