"""Tier `file`: rows are read in place from the checkpoint's own files, through the page cache.

Nothing is copied and nothing is written; every process on the host that maps the same files shares the one copy the kernel
keeps, and the kernel may drop it under memory pressure, at the price of disk reads. Only the pages of the table's tensors
are mapped, never whole files.

Unless the table is in memory, reads are advised as random: read-ahead would fetch thousands of times the bytes used. But
Linux (since 6.3) does not count reads through such a map as use, so one large file that somebody copies would push the
whole table out of memory. Once it is there, as pages taken at random show, the advice is withdrawn.

A mapped file can change underneath: cut, it raises SIGBUS; rewritten in place, it gives other rows. `check` compares each
file's size and modification time with those at opening. A file replaced by rename stays mapped as it was.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ple_offload.checkpoint.reader import Stamp
from ple_offload.errors import StoreError
from ple_offload.memory import sigbus
from ple_offload.memory.mapping import MADV_NORMAL, MADV_RANDOM, PAGE_BYTES, Mapping, NotCopied
from ple_offload.stores.base import Part, RowMap, Segment

READ_BYTES = 16 << 20  # at a time, when the files are brought into memory
CHECKS_A_LOOK = 100  # while reads are advised as random
PAGES_TO_TRUST = 512  # all there: with 92 % certainty no more than 0.5 % of the table are not; 1 ms
PAGES_TO_DOUBT = 128  # one is gone: seen with 92 % certainty once 2 % of the table are
_random = random.Random()  # not the one that the program has seeded


class FileStore(NotCopied):
    """See the module; holds one descriptor per file, read-only.

    files: open descriptors in the place of the segments' paths; the store closes them, also when this raises.
    """

    tier = "file"
    _advice = MADV_RANDOM

    def __init__(
        self,
        segments: Sequence[Segment],
        row_bytes: int,
        *,
        name: str,
        files: dict[Path, int] | None = None,
    ) -> None:
        self._name = name
        self._segments, self._row_bytes = tuple(segments), row_bytes
        self._files = {path: (fd, Stamp.of(fd)) for path, fd in (files or {}).items()}
        self._mappings: list[Mapping] = []
        self._checks, self._disk_reads = 0, _disk_reads()
        try:
            addresses: dict[Segment, int] = {}
            for path in dict.fromkeys(segment.path for segment in segments):
                own = [segment for segment in segments if segment.path == path]
                addresses.update(self._map_file(path, own, row_bytes))
        except BaseException:
            self.close()
            raise
        self.rows = RowMap.of([addresses[s] for s in segments], [s.num_rows for s in segments])
        self._num_bytes = sum(s.num_rows for s in segments) * row_bytes

    def _map_file(self, path: Path, segments: Sequence[Segment], row_bytes: int) -> dict[Segment, int]:
        """Map the page-rounded ranges of one file's segments, one map for ranges that touch."""
        if path not in self._files:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StoreError(
                    f"{path}: cannot be opened: {error.strerror}. Is the checkpoint still there?"
                ) from error
            self._files[path] = (fd, Stamp.of(fd))
        fd, stamp = self._files[path]
        addresses: dict[Segment, int] = {}
        waiting: list[Segment] = []
        for segment in sorted(segments, key=lambda s: s.offset):
            if segment.stamp is not None:
                segment.stamp.require(stamp, path)
            end = segment.offset + segment.num_rows * row_bytes
            if end > stamp.num_bytes:
                raise StoreError(
                    f"{path}: rows of table {self._name} end at byte {end}, the file at {stamp.num_bytes}. "
                    "It was cut since it was inspected: get the checkpoint again."
                )
            if (
                waiting
                and segment.offset // PAGE_BYTES * PAGE_BYTES > waiting[-1].offset + waiting[-1].num_rows * row_bytes
            ):
                addresses.update(self._map_range(fd, path, waiting, row_bytes))
                waiting = []
            waiting.append(segment)
        addresses.update(self._map_range(fd, path, waiting, row_bytes))
        return addresses

    def _map_range(self, fd: int, path: Path, segments: Sequence[Segment], row_bytes: int) -> dict[Segment, int]:
        first = segments[0].offset // PAGE_BYTES * PAGE_BYTES
        end = segments[-1].offset + segments[-1].num_rows * row_bytes
        mapping = Mapping(fd, end - first, offset=first, what=f"{path}: table {self._name}")
        mapping.advise(self._advice)
        sigbus.guard(mapping.address, mapping.num_bytes)
        self._mappings.append(mapping)
        return {segment: mapping.address + segment.offset - first for segment in segments}

    def ranges(self) -> list[tuple[int, int]]:
        return [(mapping.address, mapping.num_bytes) for mapping in self._mappings]

    def parts(self) -> list[Part]:
        return [
            Part(fd, tuple(segment for segment in self._segments if segment.path == path))
            for path, (fd, _) in self._files.items()
        ]

    def bring_in(self, threads: int) -> None:
        """Read the rows once: page by page, as a map is read, a cold file takes many times longer."""

        def read(piece: tuple[int, int, int]) -> None:
            fd, first, end = piece
            memory = bytearray(min(READ_BYTES, end - first))
            while first < end and (got := os.preadv(fd, [memoryview(memory)[: end - first]], first)):
                first += got

        pieces = [
            (self._files[segment.path][0], first, min(first + READ_BYTES, end))
            for segment in self._segments
            for end in [segment.offset + segment.num_rows * self._row_bytes]
            for first in range(segment.offset, end, READ_BYTES)
        ]
        with ThreadPoolExecutor(threads, "ple-offload-read") as readers:
            list(readers.map(read, pieces))

    def absent_bytes(self) -> int:
        return sum(mapping.absent_bytes() for mapping in self._mappings) if self._shown() else self._num_bytes

    def _shown(self) -> bool:
        """The kernel shows what is in memory to a file's owner and who may write it; to others all seems there."""
        return all(
            os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK)
            for fd, _ in self._files.values()
        )

    def check(self) -> None:
        for path, (fd, opened) in self._files.items():
            try:
                now = Stamp.of(fd)
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}. Is its file system still there?") from error
            if now != opened:
                raise StoreError(
                    f"{path}: changed while its table {self._name} was open: expected {opened}, found {now}. Its rows "
                    "cannot be trusted; restore the file and open the table again. Replace files by rename, never in place."
                )
        self._advise_anew()

    def _advise_anew(self) -> None:
        """Random until the table is in memory, and from the first read of the disk on that finds it gone."""
        before, self._disk_reads = self._disk_reads, _disk_reads()
        self._checks += 1
        if self._advice == MADV_RANDOM:
            looks = self._checks % CHECKS_A_LOOK == 0
        else:
            looks = self._advice == MADV_NORMAL and self._disk_reads != before
        pages = PAGES_TO_TRUST if self._advice == MADV_RANDOM else PAGES_TO_DOUBT
        if looks and (advice := MADV_NORMAL if self._is_in_memory(pages) else MADV_RANDOM) != self._advice:
            self._advice = advice
            for mapping in self._mappings:
                mapping.advise(advice)

    def _is_in_memory(self, pages: int) -> bool:
        """By so many pages taken at random."""
        if not self._shown():
            return False
        taken = _random.choices(self._mappings, [mapping.num_bytes for mapping in self._mappings], k=pages)
        return all(mapping.is_in_memory(_random.randrange(0, mapping.num_bytes, PAGE_BYTES)) for mapping in taken)

    def describe(self) -> dict[str, object]:
        return {
            "tier": self.tier,
            "bytes": self._num_bytes,
            "shared_with": "every process that maps the same files (page cache)",
            "files": len(self._files),
        }

    def close(self) -> None:
        mappings, self._mappings = self._mappings, []  # first: a signal handler may close as well
        files, self._files = self._files, {}
        for mapping in mappings:
            sigbus.release(mapping.address)
            mapping.close()
        for fd, _ in files.values():
            os.close(fd)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _disk_reads() -> int:
    """How often this process has waited for a page of a map from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
