"""The side-by-side benchmarks: `make bench`, or `python benchmarks/run.py [NAME...] [options]`.

Names: hashing, gather, load, memory, startup, serving; all when none is given. The table of random bytes (3.2 GB) is
written once and found again; gather needs 10 GB of memory. Let nothing else run: blocks of calls that others disturb are
repeated until the patience is used up, and the load average is recorded and warned about.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calm
import ids
import machine
import random_table
import report

from ple_offload import config

HERE = Path(__file__).parent
NAMES = ("hashing", "gather", "load", "memory", "startup", "serving")
FULL_ROWS, FULL_SHARDS, FULL_TOKENS = 20_000_000, 16, 2_000_000
TOY_ROWS, TOY_SHARDS, TOY_TOKENS = 40_000, 3, 20_000


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    warning = machine.warning()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    rows, shards = (TOY_ROWS, TOY_SHARDS) if options.toy else (FULL_ROWS, FULL_SHARDS)
    made = random_table.make(options.folder, options.rows or rows, options.shards or shards)
    for name in options.names or NAMES:
        about = {
            "machine": machine.describe(),
            "warning": machine.warning(),
            "toy": options.toy,
            "table": {"num_rows": made.num_rows, "row_bytes": random_table.ROW_DIM, "files": made.shards},
        }
        started = time.monotonic()
        watch = calm.Calm(0 if options.toy else options.patience)
        result = {**about, **_jobs(options, made, watch)[name](), "blocks": watch.describe()}
        report.write(options.results, name, result)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    report.plot(options.results)
    print(report.summarize(options.results), end="")
    return 0


def _jobs(
    options: argparse.Namespace, made: random_table.Made, watch: calm.Calm
) -> dict[str, Callable[[], dict[str, Any]]]:
    threads, toy = options.threads, options.toy

    def streams() -> dict[str, ids.Stream]:
        num_tokens = TOY_TOKENS if toy else FULL_TOKENS
        vocab_size, eos = random_table.VOCAB_SIZE, random_table.EOS
        return {
            "random": ids.random_stream(vocab_size, num_tokens),
            "text": ids.text_stream(vocab_size, num_tokens, eos, options.tokenizer, options.text),
        }

    def module(name: str) -> Any:  # torch is only imported by what needs it
        return importlib.import_module(name)

    return {
        "hashing": lambda: module("hashing").run(made, streams(), watch, toy=toy),
        "gather": lambda: module("gather").run(made, streams(), watch, threads=threads, toy=toy),
        "load": lambda: module("load").run(made, watch, threads=threads, rounds=2 if toy else 5),
        "memory": lambda: module("memory").run(made),
        "serving": lambda: module("serving").run(made, streams(), watch, toy=toy),
        "startup": lambda: module("startup").run(made, watch, rounds=1 if toy else 5),
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build/bench", help="where the table is written")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where results are written")
    parser.add_argument("--threads", type=int, default=config.num_threads(), help="of ours and of every baseline")
    parser.add_argument("--patience", type=float, default=300, help="seconds to lose on waiting for others, each (300)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (see ids.py for the default)")
    parser.add_argument("--text", type=Path, help="a folder of text files (default: the interpreter's own source)")
    parser.add_argument("--rows", type=int, help=f"about how many rows the table has (default {FULL_ROWS:,})")
    parser.add_argument("--shards", type=int, help=f"how many files hold it (default {FULL_SHARDS})")
    parser.add_argument("--toy", action="store_true", help="a tiny table and few rounds: does it run, not how fast")
    options = parser.parse_args(arguments)
    if options.toy and options.results == HERE / "results":
        parser.error("--toy figures mean nothing: give --results another folder")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
