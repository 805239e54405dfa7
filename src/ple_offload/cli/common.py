"""Arguments that several commands take, and how numbers are printed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ple_offload.config import worker_kind
from ple_offload.errors import PleOffloadError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ple_offload.families import Family

TIERS = ("auto", "ram", "file")


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint folder, or a model id in the local model cache")


def add_layer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer", type=int, metavar="N", help="decoder layer, from 0; needed when there are several tables"
    )


def add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context",
        metavar="IDS",
        default="",
        help="ids of the tokens before --tokens, oldest first; left out: --tokens begin a request",
    )


def add_tier(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tier",
        choices=TIERS,
        default="auto",
        help="where the rows live: ram (a copy in memory), file (read in place from the checkpoint's files), "
        "auto (ram when it fits, default)",
    )
    parser.add_argument(
        "--skip-memory-check", action="store_true", help="open the table even when memory looks too small"
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="for loading and large lookups (default: PLE_OFFLOAD_THREADS, or all CPUs)",
    )


def add_worker(parser: argparse.ArgumentParser, default: str = "inline") -> None:
    parser.add_argument(
        "--worker",
        metavar="W",
        default=default,
        help="who looks rows up: inline (this process), spawn (a worker process of its own), or unix:/path "
        f"(`ple-offload serve` on this host); default: {default}",
    )


def refuse_loading_options(args: argparse.Namespace) -> None:
    """A daemon has opened its tables already: raise UsageError for options that say how."""
    given = {"--tier": args.tier != "auto", "--skip-memory-check": args.skip_memory_check}
    for option in [name for name, found in given.items() if found and worker_kind(args.worker) == "unix"]:
        raise UsageError(f"{option} does not go with --worker {args.worker}: the daemon was told when it was started")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value for programs")


def parse_ids(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas or spaces. Raises UsageError naming the one that is not."""
    parts = [part for piece in text.split(",") for part in piece.split() or [""]] if text.strip() else []
    for position, part in enumerate(parts):
        digits = part.removeprefix("-")
        # the length first: Python refuses to read a number of thousands of digits
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19 and int(digits) < 2**63):
            found = part if len(part) <= 40 else f"{part[:40]}... ({len(part)} characters)"
            raise UsageError(f"{option}: expected ids as in 1,2,3; found {found!r} at position {position}")
    return [int(part) for part in parts]


def parse_tokens(args: argparse.Namespace) -> list[int]:
    """The ids of --tokens, at least one."""
    tokens = parse_ids(args.tokens, "--tokens")
    if not tokens:
        raise UsageError("--tokens: expected at least one id, as in 1,2,3; found none")
    return tokens


def one_request(args: argparse.Namespace, family: Family) -> dict[str, npt.NDArray[np.int64]]:
    """What a lookup takes for --tokens and --context: one request, its context filled up at the front."""
    import numpy as np

    tokens = parse_tokens(args)
    past = [family.filler] * family.context_len + parse_ids(args.context, "--context")
    return {
        "input_ids": np.array(tokens, np.int64),
        "ngram_context": np.array(past[len(past) - family.context_len :], np.int64)[None],
    }


def show_progress() -> bool:
    """Progress is for people: only when standard error is a terminal."""
    return sys.stderr.isatty()


def print_json(value: Any) -> None:
    print(json.dumps(value, default=str))


def print_facts(title: str, facts: Mapping[str, object]) -> None:
    """A title and its facts below, one a line, values in one column."""
    print(f"\n{title}")
    width = max([16, *map(len, facts)])
    for label, value in facts.items():
        print(f"  {label:<{width}}  {value}")


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def gib(num_bytes: int) -> str:
    """12.3 GiB, with a unit that suits the size."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def require_transformers(command: str) -> None:
    """Say what to install before the import fails with a traceback."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise PleOffloadError(
            f"{command} needs {' and '.join(missing)}, not installed here; run pip install 'ple-offload[transformers]'"
        )
