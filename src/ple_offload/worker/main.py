"""What every kind of worker process does before it listens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ple_offload import native
from ple_offload.config import worker_threads
from ple_offload.errors import UsageError
from ple_offload.memory import sigbus
from ple_offload.spec import inspect
from ple_offload.table import open_table
from ple_offload.worker.server import Served


def open_tables(
    paths: Sequence[str | Path],
    *,
    tier: str = "auto",
    threads: int | None = None,
    skip_memory_check: bool | None = None,
    progress: bool | Callable[[int], None] = False,
) -> list[Served]:
    """Open every table of every checkpoint, with all kernels compiled; raises what `open_table` raises.

    threads: for loading and for large gathers; default PLE_OFFLOAD_THREADS, else `config.worker_threads`.
    """
    native.wait_without_spinning()
    sigbus.install()
    threads = worker_threads() if threads is None else threads
    specs = [inspect(path) for path in paths]
    for i, spec in enumerate(specs):
        if spec.path.resolve() in [other.path.resolve() for other in specs[:i]]:
            raise UsageError(f"{paths[i]}: expected each checkpoint once, found it twice.")
    served = []
    with ExitStack() as opened:
        for path, spec in zip(paths, specs, strict=True):
            tables = {
                table.layer: opened.enter_context(
                    open_table(
                        path,
                        table.layer,
                        tier,
                        threads=threads,
                        progress=progress,
                        skip_memory_check=skip_memory_check,
                    )
                )
                for table in spec.tables
            }
            served.append(Served(spec.path, tables))
        opened.pop_all()
    # What lives now lives as long as the process: the garbage collector need not walk it in the middle of a step.
    gc.collect()
    gc.freeze()
    return served
