"""From `open_table` to the first row on the GPU: shards on disk, tier `file`, route `direct`, nothing copied.

    warm        the shards are in the page cache; two starts in processes of their own
    second      while a first engine holds the table, a second one starts; and what both hold of the host's memory
    cold        nothing of the shards is in the page cache (asked of mincore), beside plain reads of cold shards by as many
                threads: `rate_of_disk` is the table's bytes / time to the first row / the plain rate

The context of the GPU, the kernels and the imports are warm in all of them (start_process.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import random_table
import shards
from children import end_child, read_answer, start_child
from load import cached_share
from memory_facts import change, host, process, total
from random_table import Made
from record import Record
from tell import tell

from ple_offload import config

CHILD = str(Path(__file__).parent / "start_process.py")
WARM_ROWS = 200_000
STARTS = 2
WRITE_BUDGET_S, QUICK_BUDGET_S = 45.0, 10.0
COLD_BUDGET_S = 60.0
START_S = 12.0  # about what a process takes to start, and to end; for the budget
SLICE_BYTES = 16 << 20


def run(options: argparse.Namespace, record: Record) -> None:
    """Write, then warm, second, cold."""
    budget = options.budget
    if not budget.allows(WRITE_BUDGET_S + 2 * START_S, record, "shards"):
        return
    folder = options.shards
    warm = random_table.make(folder, WARM_ROWS, shards.SHARDS)
    made, facts = shards.write(folder, options.rows, QUICK_BUDGET_S if options.quick else WRITE_BUDGET_S)
    if cached_share(made.files) < 1:
        plain_read_rate(made.files)
    facts["cached_share"] = round(cached_share(made.files), 4)
    tell(record, facts, "shards")
    with record.failing("compile"), started(warm, warm):
        """Compiles what a start needs into the caches on disk."""
    for i in range(STARTS):
        if facts["cached_share"] > 0.99 and budget.allows(START_S, record, "warm", str(i)):
            with record.failing("warm", str(i)), started(made, warm) as (_, found):
                tell(record, found, "warm", str(i))
    if facts["cached_share"] > 0.99 and budget.allows(2 * START_S, record, "second"):
        with record.failing("second"):
            tell(record, second(made, warm), "second")
    if budget.allows(COLD_BUDGET_S + 2 * START_S, record, "cold"):
        with record.failing("cold"):
            cold(record, made, warm)


@contextlib.contextmanager
def started(made: Made, warm: Made, limit_s: float = 150.0) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that has started with a table, and what it says; ended afterwards."""
    child = start_child(CHILD, str(made.folder), str(warm.folder))
    try:
        yield child, read_answer(child, "start", limit_s)
    finally:
        end_child(child, 30)


def second(made: Made, warm: Made) -> dict[str, Any]:
    """A second engine beside a first one that goes on holding the table."""
    empty = host()
    with started(made, warm) as (first_child, first):
        alone, shares_alone = host(), process(first_child.pid)
        with started(made, warm) as (second_child, found):
            both = host()
            shares = [process(first_child.pid), process(second_child.pid)]
    return {
        "first": first,
        "second": found,
        "table_bytes": made.table_bytes,
        "first alone": shares_alone,
        "both together": total(shares),
        "host, first": change(empty, alone),
        "host, second": change(alone, both),
    }


def cold(record: Record, made: Made, warm: Made) -> None:
    """The disk's rate on the first shards, dropped again; then a start with nothing cached."""
    drop(made.files)
    share = cached_share(made.files)
    tell(record, round(share, 4), "cold", "cached_share_before")
    if share > 0.01:
        raise RuntimeError(f"{share:.0%} of the shards stayed in the page cache: no cold figures here")
    quarter = made.files[: max(1, len(made.files) // 4)]
    rate = plain_read_rate(quarter)
    tell(record, round(rate / 1e9, 3), "cold", "plain_gb_per_s")
    expected_s = made.table_bytes / rate
    if expected_s > COLD_BUDGET_S:
        raise RuntimeError(f"reading the shards would take {expected_s:.0f} s")
    drop(quarter)
    tell(record, round(cached_share(made.files), 4), "cold", "cached_share_before_start")
    with started(made, warm, limit_s=3 * expected_s + 40) as (_, found):
        gb_per_s = made.table_bytes / found["first_row_s"] / 1e9
        found |= {"gb_per_s": round(gb_per_s, 3), "rate_of_disk": round(gb_per_s * 1e9 / rate, 3)}
        tell(record, found, "cold", "start")


def drop(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_read_rate(files: list[Path]) -> float:
    """Bytes a second of plain reads by all threads, 16 MiB at a time, in order."""
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, SLICE_BYTES)]
    opened = {path: os.open(path, os.O_RDONLY) for path in files}
    began_s = time.monotonic()
    try:
        with ThreadPoolExecutor(config.num_threads()) as pool:
            num_bytes = sum(pool.map(lambda piece: len(os.pread(opened[piece[0]], SLICE_BYTES, piece[1])), pieces))
    finally:
        for fd in opened.values():
            os.close(fd)
    return num_bytes / (time.monotonic() - began_s)
