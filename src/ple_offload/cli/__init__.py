"""The command line. Importing this package loads nothing heavy; each command imports what it needs."""

from ple_offload.cli.main import main

__all__ = ["main"]
