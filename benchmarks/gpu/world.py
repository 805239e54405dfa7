"""The world of the GPU benchmarks: a table of random bytes as large as the released model's, and a worker over it.

    with World.make("fp8") as world:                  320,001,536 rows of 160 bytes in a sealed memfd, filled in seconds
        world.table                                   a real `Table` of tier "ram" (layer LAYER), for route `direct`
        world.spec, world.store                       its TableSpec; its store, with `fd`, `ranges()`, `rows`, `describe()`
        rows = world.random_rows(rng, 64)             int64 [64, 16]: one row of each hash head, uniformly random
        rows = world.random_rows(rng, 64, 0.2)        the same, of the first fifth of each head
        rows = world.rows_of(ids)                     int64 [tokens, 16]: the rows of token ids, one request
        world.reference(rows)                         uint16 [tokens, 2560]: the bits of their bf16 values, NumPy only
        with world.worker() as worker:                another process that serves the very same memory
            worker.address                            "unix:@...", for a connector; route `staged`
            worker.pid

    World.make("bf16", rows=160_000_000)              rows of 320 bytes
    World.make("fp8", rows=1_000_000)                 about so many rows, for trials
    World.make("fp8", huge=False)                     on 4 KiB pages

The rule is the released model's (vocabulary, EOS, multipliers, 16 heads of primes); with fewer rows the primes are smaller.
No byte is an FP8 NaN: engines write different bits for those, and no real table has one. What a row holds depends on its
place only, so every run and every process has the same table. A worker ends when its parent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ple_offload
from ple_offload import config, native
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.formats.base import RowFormat
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping, collapse
from ple_offload.spec import TableSpec
from ple_offload.stores.base import Part, RowMap, Segment
from ple_offload.table import Table

VOCAB_SIZE, EOS = 248_320, 248_044
LAYER = 1
ROW_DIM, ROWS_PER_TOKEN = 160, 16
EMBED_DIM = ROW_DIM * ROWS_PER_TOKEN
FULL_ROWS = 320_000_000  # about: the primes make it 320,001,536
FORMATS = {"fp8": RowFormat("fp8_e4m3", ROW_DIM, 0.0123), "bf16": RowFormat("bf16", ROW_DIM)}
SLICE_BYTES = 64 << 20
START_LIMIT_S = 120.0


def family(rows: int) -> QwenPle:
    """The released model's rule, over about `rows` rows."""
    return QwenPle.from_text_config(
        {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "ngram_vocab_size_base": rows // ROWS_PER_TOKEN}, 0
    )


def decoded(row_format: RowFormat, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """The bits of the bf16 values of stored rows [n, row_bytes], by the plain reference; FP8 by a list of all codes."""
    if row_format.stored_dtype.itemsize > 1:
        return row_format.decode_reference(raw, "bf16").view(np.uint16)
    return row_format.decode_reference(np.arange(256, dtype=np.uint8), "bf16").view(np.uint16)[raw]


class MemoryStore:
    """A store of tier `ram` over a sealed memfd; takes `fd` over. `huge`: mapped by 2 MiB pages where it has them."""

    tier = "ram"

    def __init__(self, fd: int, num_rows: int, row_bytes: int, *, huge: bool) -> None:
        self.fd = fd
        self._num_bytes = num_rows * row_bytes
        map_it = memfd.map_read_only if huge else _map_small
        self._mapping = map_it(fd, self._num_bytes, "random table")
        self.rows = RowMap.of([self._mapping.address], [num_rows])
        self.raw = self._mapping.view().reshape(num_rows, row_bytes)

    def ranges(self) -> list[tuple[int, int]]:
        return [(self._mapping.address, self._num_bytes)]

    def parts(self) -> list[Part]:
        return [Part(self.fd, (Segment(Path(f"/proc/self/fd/{self.fd}"), 0, 0, len(self.raw)),))]

    def bring_in(self, threads: int) -> None:
        """It is there."""

    def absent_bytes(self) -> int:
        return 0

    def check(self) -> None:
        """Sealed memory cannot change."""

    def describe(self) -> dict[str, object]:
        return {"tier": self.tier, "bytes": self._num_bytes, "huge_page_bytes": self._mapping.huge_bytes()}

    def close(self) -> None:
        if self.fd >= 0:
            self._mapping.close()
            os.close(self.fd)
            self.fd = -1


def _map_small(fd: int, num_bytes: int, what: str) -> Mapping:
    return Mapping(fd, num_bytes, what=what)


@dataclass
class World:
    """See the module. Closed as a context manager; the workers first."""

    kind: str  # a key of FORMATS
    spec: TableSpec
    store: MemoryStore
    table: Table
    huge: bool
    wanted_rows: int

    @classmethod
    def make(cls, kind: str = "fp8", rows: int = FULL_ROWS, *, huge: bool = True, threads: int | None = None) -> World:
        """Allocate, fill and seal a table of about `rows` rows, then open it."""
        threads = threads or config.num_threads()
        num_bytes = family(rows).num_rows * FORMATS[kind].row_bytes
        fd = memfd.create("random table", num_bytes)
        writable = Mapping(fd, num_bytes, writable=True, what="random table")
        try:
            _fill_all(writable, huge, threads)
        finally:
            writable.close()
        return cls.over(memfd.seal(fd, "random table"), kind, rows, huge=huge, threads=threads)

    @classmethod
    def over(cls, fd: int, kind: str, rows: int, *, huge: bool, threads: int) -> World:
        """The world over a sealed memfd that holds its rows already; takes `fd` over."""
        rule, row_format = family(rows), FORMATS[kind]
        store = MemoryStore(fd, rule.num_rows, row_format.row_bytes, huge=huge)
        segment = Segment(Path(f"/proc/self/fd/{fd}"), 0, 0, rule.num_rows)
        spec = TableSpec(rule, row_format, LAYER, rule.num_rows, (segment,), constants_stored=False)
        return cls(kind, spec, store, Table(spec, store, threads=threads), huge, rows)

    def random_rows(self, rng: np.random.Generator, num_tokens: int, share: float = 1.0) -> npt.NDArray[np.int64]:
        """Row numbers [num_tokens, 16], each column uniform over the first `share` of its hash head."""
        rule = self.spec.family
        assert isinstance(rule, QwenPle)
        sizes = np.maximum(1, np.array(rule.head_sizes) * share).astype(np.int64)
        return rng.integers(0, sizes, (num_tokens, ROWS_PER_TOKEN)) + rule.head_offsets

    def rows_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row numbers [len(ids), 16] of one request of token ids."""
        return self.table.row_numbers(ids)

    def reference(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """The bits of the bf16 values of row numbers [tokens, 16]: [tokens, EMBED_DIM]; compiled code has no part in it."""
        return decoded(self.spec.format, self.store.raw[rows.reshape(-1)]).reshape(len(rows), -1)

    def worker(self, threads: int | None = None) -> Worker:
        """Start a process that serves this table; returns once it listens."""
        return Worker(self, threads)

    def describe(self) -> dict[str, Any]:
        return {
            "format": self.spec.format.name,
            "num_rows": self.spec.num_rows,
            "row_bytes": self.spec.row_bytes,
            **self.store.describe(),
        }

    def close(self) -> None:
        self.table.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Worker:
    """A worker process over a world's memory; see the module. Its log is kept only if it fails to start."""

    def __init__(self, world: World, threads: int | None) -> None:
        self.address = f"unix:@ple-bench-{os.getpid()}-{secrets.token_hex(8)}"
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {
            "fd": world.store.fd,
            "kind": world.kind,
            "rows": world.wanted_rows,
            "huge": world.huge,
            "threads": threads or config.worker_threads(),
            "address": self.address,
            "lifeline": theirs.fileno(),
        }
        source = str(Path(ple_offload.__file__).parents[1])
        paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        with theirs, tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[world.store.fd, theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
            )
            theirs.close()  # or the child's death would not end this side
            self._lifeline.settimeout(START_LIMIT_S)
            try:
                listens = self._lifeline.recv(16)
            except TimeoutError:
                listens = b""
            if not listens:
                self.close(limit_s=0)
                log.seek(0)
                raise RuntimeError(
                    f"the worker did not start within {START_LIMIT_S:g} s: {log.read()[-4000:].decode()}"
                )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, limit_s: float = 10.0) -> None:
        self._lifeline.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(options: dict[str, Any]) -> None:
    """What the worker process does."""
    from ple_offload.worker.server import PleOffloadWorker, Served

    native.wait_without_spinning()
    lifeline = socket.socket(fileno=options["lifeline"])
    world = World.over(
        options["fd"], options["kind"], options["rows"], huge=options["huge"], threads=options["threads"]
    )
    worker = PleOffloadWorker([Served(Path("/random-table"), {LAYER: world.table})])
    worker.listen(options["address"])
    worker.watch_parent(lifeline.fileno())
    with contextlib.suppress(OSError):  # the parent may have gone
        lifeline.send(b"listens")
    worker.run()


def _fill_all(mapping: Mapping, huge: bool, threads: int) -> None:
    words = mapping.view().view(np.uint64)

    def fill(first: int) -> None:
        part = words[first // 8 : (first + SLICE_BYTES) // 8]
        if huge:
            collapse(mapping.address + first, part.nbytes)
        fill_words(part, np.uint64(first // 8))

    fill_words(words[:0], np.uint64(0))  # compile it once, not in every thread
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, range(0, mapping.num_bytes, SLICE_BYTES)))


@native.kernel()
def fill_words(words, first):  # type: ignore[no-untyped-def]
    """Word i gets the splitmix64 hash of first + i; a byte that would be an FP8 NaN gets its neighbour."""
    for i in range(words.size):
        x = (first + np.uint64(i)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        # 0x7F and 0xFF: adding 1 to the seven low bits carries into bit 7 in these bytes alone
        nan = ((x & np.uint64(0x7F7F7F7F7F7F7F7F)) + np.uint64(0x0101010101010101)) & np.uint64(0x8080808080808080)
        words[i] = x ^ (nan >> np.uint64(7))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
