"""Loading into `ram` against plain reading: as many threads, the same files, into a fresh memfd.

The yardstick does the least there is to do: slices of 16 MiB, `preadv` into a new shared map, dealt out in order; no huge
pages, no seal, and the page cache is left alone. The ways alternate in an order drawn anew each round; before each, the
files' pages are either dropped, which `mincore` must confirm, or read in.

A virtual machine may give free memory back to its host (free page reporting), whole huge pages first, and pays for each
when it is used again: 3.7 s instead of 0.2 s for 1 GiB, seen where these benchmarks were written. So right before each
load as much memory as it needs is taken and freed, untimed: then both ways find memory that is really there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from calm import Calm
from random_table import LAYER, ROW_DIM, Made
from timing import ratio, spread

from ple_offload import inspect, open_table
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping, collapse
from ple_offload.stores import RamStore

SLICE_BYTES = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def run(made: Made, calm: Calm, *, threads: int, rounds: int) -> dict[str, Any]:
    spec = inspect(made.folder).table(LAYER)

    def store() -> None:
        RamStore(spec.segments, spec.row_bytes, name="bench", threads=threads).close()

    def whole() -> None:
        open_table(made.folder, LAYER, "ram", threads=threads).close()

    ways: dict[str, Callable[[], float]] = {
        "plain read": lambda: _plain_read(made, threads),
        "store": lambda: _timed(store),
        "open_table": lambda: _timed(whole),
    }
    open_table(made.folder, LAYER, "file", threads=threads).close()  # compiles everything
    results = []
    rng = np.random.default_rng(3)
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        cached: list[float] = []
        for _ in range(rounds):
            for name in rng.permutation(list(ways)):
                measure = partial(_once, ways[name], made, state, cached)
                seconds[name].append(calm.undisturbed(measure))
        results.append(
            {
                "files": state,
                "cached_share_before": {"least": round(min(cached), 4), "most": round(max(cached), 4)},
                "seconds": {name: spread(times) for name, times in seconds.items()},
                "gb_per_s": {n: round(made.table_bytes / 1e9 / float(np.median(t)), 2) for n, t in seconds.items()},
                "rate_of_plain_read": {n: ratio(seconds["plain read"], seconds[n]) for n in ("store", "open_table")},
            }
        )
    return {"table_bytes": made.table_bytes, "threads": threads, "rounds": rounds, "results": results}


def _once(way: Callable[[], float], made: Made, state: str, cached: list[float]) -> float:
    """Bring the page cache to `state`, note the share it holds, and take the time of one load."""
    cached.append(_drop(made.files) if state == "cold" else _read_in(made.files))
    _take_and_free(made.table_bytes)
    return way()


def _take_and_free(num_bytes: int) -> None:
    fd = memfd.create("taken", num_bytes)
    mapping = Mapping(fd, num_bytes, writable=True, what="taken")
    collapse(mapping.address, num_bytes)
    mapping.close()
    os.close(fd)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _plain_read(made: Made, threads: int) -> float:
    """Seconds to get every byte of the tables into a fresh memfd; unmapping is not counted."""
    start = time.perf_counter()
    fd = os.memfd_create("plain read")
    os.ftruncate(fd, made.table_bytes)
    memory = mmap.mmap(fd, made.table_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(memory)
    files = [os.open(path, os.O_RDONLY) for path in made.files]
    slices = _slices(made, files)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(slices, None)
            if piece is None:
                return
            file, offset, at, size = piece
            while size:
                got = os.preadv(file, [view[at : at + size]], offset)
                offset, at, size = offset + got, at + got, size - got

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    view.release()
    memory.close()
    for file in (fd, *files):
        os.close(file)
    return seconds


def _slices(made: Made, files: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(descriptor, offset in it, offset in memory, bytes) of every slice of the table."""
    at = 0
    for segment in inspect(made.folder).table(LAYER).segments:
        file = files[made.files.index(segment.path)]
        for done in range(0, segment.num_rows * ROW_DIM, SLICE_BYTES):
            size = min(SLICE_BYTES, segment.num_rows * ROW_DIM - done)
            yield file, segment.offset + done, at, size
            at += size


def _drop(files: list[Path]) -> float:
    """Drop the files' pages; returns the share that is still cached, which must be next to nothing."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    share = cached_share(files)
    if share > 0.01:
        raise SystemExit(f"{share:.0%} of the files stayed in the page cache: this system gives no cold figures")
    return share


def _read_in(files: list[Path]) -> float:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(SLICE_BYTES):
                pass
    return cached_share(files)


def cached_share(files: list[Path]) -> float:
    """Share of the files' pages that the page cache holds, asked of mincore."""
    cached = pages = 0
    for path in files:
        size = path.stat().st_size
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as memory,
        ):
            count = -(-size // mmap.PAGESIZE)
            held = (ctypes.c_ubyte * count)()
            # a private writable map, only so that ctypes hands out its address; nothing is written
            start = ctypes.c_char.from_buffer(memory)
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), held):
                raise OSError(ctypes.get_errno(), "mincore")
            del start
            cached += int((np.frombuffer(held, np.uint8) & 1).sum())
            pages += count
    return cached / pages
