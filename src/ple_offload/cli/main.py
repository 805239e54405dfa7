"""The parser, and the border where every error becomes one sentence and an exit status.

Exit status: 0 done; 1 a failure while running; 2 wrong usage or input; 130 interrupted; 141 the reader of our
output went away.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
from pathlib import Path

from ple_offload import __version__
from ple_offload.cli import demo, doctor, generate, inspect, lookup, rows, serve, verify
from ple_offload.config import settings
from ple_offload.errors import CheckpointError, PleOffloadError, UsageError

COMMANDS = (demo, inspect, rows, lookup, generate, serve, verify, doctor)
DESCRIPTION = """\
Keeps the n-gram (PLE) embedding table of a language model out of the model, and looks up the rows it needs.
PATH is a checkpoint folder, or a model id that the local model cache holds.
"""


def build_parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="ple-offload", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ple-offload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, parents=[shared], allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    args = build_parser().parse_args(argv)
    try:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("ple_offload").setLevel(settings().log.upper())
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The flush at interpreter exit must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("ple-offload: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        else:
            print(f"ple-offload: {_sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, (UsageError, CheckpointError)) else 1
    return 0


def _prepare_streams() -> None:
    """Make every print succeed: a closed stream (`>&-`) is None in Python, and not every encoding has every name."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _sentence(error: Exception) -> str:
    if isinstance(error, PleOffloadError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}; the installation is not complete: run pip install --upgrade ple-offload"
    if isinstance(error, OSError):
        return f"{error}; check that the path exists and that there is room and permission"
    return f"{type(error).__name__}: {error}; an error that was not foreseen, --debug shows where it came from"
