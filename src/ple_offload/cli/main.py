"""Parsing of arguments and the border where errors become one sentence and an exit status."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    raise SystemExit("ple-offload: no command yet")
