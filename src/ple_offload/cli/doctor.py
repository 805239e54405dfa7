"""Show what decides how fast and whether a table can be served here, and what to change."""

from __future__ import annotations

import argparse

from ple_offload.cli.common import add_json

HELP = "memory, limits, huge pages, disk; which tier would be chosen, why, and what to change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="?", help="a checkpoint to judge as well")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    raise SystemExit("later")
