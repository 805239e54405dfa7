"""A checkpoint on disk as large as the released model's, written by every processor at once.

It is that of benchmarks/random_table.py with the bytes of world.py, so anybody can tell what a row must hold. The disk
sets the pace: its rate is measured first, and the table is made smaller where it does not fit or would take too long.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import random_table
from random_table import ROW_DIM, Made
from world import fill_words

from ple_offload import config, native

SHARDS = 16
SMALL_ROWS = 100_000_000  # 16 GB
SLICE_ROWS = 102_400  # 16 MB, whole pages
SPARE_BYTES = 3 << 30  # of the disk
PROBE_BYTES = 1 << 30


def write(folder: Path, rows: int, budget_s: float) -> tuple[Made, dict[str, Any]]:
    """The checkpoint, of about `rows` rows if it can be, and how it was written; one that is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "written.json"
    if written.exists():
        facts = json.loads(written.read_text())
        if facts["wanted_rows"] == rows:
            return random_table.make(folder, facts["rows"], SHARDS), facts
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    rate = _write_rate(folder, min(PROBE_BYTES, rows * ROW_DIM))
    facts: dict[str, Any] = {
        "folder": str(folder),
        "file_system": _file_system(folder),
        "free_bytes": free,
        "write_gb_per_s": round(rate / 1e9, 2),
        "wanted_rows": rows,
    }
    if rows * ROW_DIM + SPARE_BYTES > free:
        rows = min(rows, SMALL_ROWS)
        facts["smaller_because"] = "the disk has no room for it"
    if rows * ROW_DIM / rate > budget_s:
        rows = min(rows, max(1_000_000, int(rate * budget_s) // ROW_DIM))
        facts["smaller_because"] = f"writing it would take more than {budget_s:g} s"
    began_s = time.monotonic()
    made = random_table.make(folder, rows, SHARDS, write_rows=_write_rows)
    facts |= {"num_rows": made.num_rows, "table_bytes": made.table_bytes, "files": made.shards}
    facts |= {"rows": rows, "written_s": round(time.monotonic() - began_s, 2)}
    written.write_text(json.dumps(facts))
    return made, facts


def expected_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The bytes [n, ROW_DIM] of row numbers [n]."""
    words = np.empty((rows.size, ROW_DIM // 8), np.uint64)
    _fill_rows(words, rows.reshape(-1))
    return words.view(np.uint8)


@native.kernel()
def _fill_rows(words, rows):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        fill_words(words[i], np.uint64(rows[i] * words.shape[1]))


def _write_rows(file: BinaryIO, first: int, count: int) -> None:
    """Rows first to first + count where the file stands; leaves it behind them."""
    file.flush()
    start = file.tell()

    def write(begin: int) -> None:
        rows = min(SLICE_ROWS, count - begin)
        words = np.empty(rows * ROW_DIM // 8, np.uint64)
        fill_words(words, np.uint64((first + begin) * ROW_DIM // 8))
        data = memoryview(words).cast("B")
        at = start + begin * ROW_DIM
        while data:
            done = os.pwrite(file.fileno(), data, at)
            data, at = data[done:], at + done

    with ThreadPoolExecutor(config.num_threads()) as pool:
        list(pool.map(write, range(0, count, SLICE_ROWS)))
    file.seek(start + count * ROW_DIM)


def _write_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of so many to the disk itself, one writer."""
    path = folder / "probe"
    data = memoryview(np.random.default_rng(0).bytes(min(16 << 20, num_bytes)))
    try:
        began_s = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for _ in range(num_bytes // len(data)):
                file.write(data)
            os.fsync(file.fileno())
        return num_bytes / (time.monotonic() - began_s)
    finally:
        path.unlink(missing_ok=True)


def _file_system(folder: Path) -> str:
    """The kind of the file system a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else "unknown"
