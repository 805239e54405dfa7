"""One contract for every tier: the addresses it hands out hold the table's bytes, and a changed file is noticed."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ple_offload.errors import CheckpointError, StoreError
from ple_offload.memory.mapping import HUGE_PAGE_BYTES
from ple_offload.stores import FileStore, RamStore, Segment, Store, file

ROW_BYTES = 160
Open = Callable[[list[Segment]], Store]


def open_ram(segments: list[Segment]) -> RamStore:
    return RamStore(segments, ROW_BYTES, name="t", threads=2)


def open_file(segments: list[Segment]) -> FileStore:
    return FileStore(segments, ROW_BYTES, name="t")


@pytest.fixture(params=[open_ram, open_file], ids=["ram", "file"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Store] = []

    def opener(segments: list[Segment]) -> Store:
        opened.append(request.param(segments))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


def write(folder: Path, counts: list[int], files: int = 2) -> tuple[list[Segment], np.ndarray]:
    """Segments of `counts` rows dealt to `files` files, at odd offsets with gaps; and the table [rows, ROW_BYTES]."""
    table = np.frombuffer(os.urandom(sum(counts) * ROW_BYTES), np.uint8).reshape(-1, ROW_BYTES)
    contents = [b"header.." * (i + 1) + b"x" for i in range(files)]
    segments, first = [], 0
    for i, count in enumerate(counts):
        where = i % files
        segments.append(Segment(folder / f"{where}.bin", len(contents[where]), first, count))
        contents[where] += table[first : first + count].tobytes() + b"gap" * (i * 3000)
        first += count
    for i, content in enumerate(contents):
        (folder / f"{i}.bin").write_bytes(content)
    return segments, table


def read(store: Store) -> np.ndarray:
    """Every row behind the store's addresses."""
    starts = store.rows.starts
    parts = [
        ctypes.string_at(int(base), int(starts[i + 1] - starts[i]) * ROW_BYTES)
        for i, base in enumerate(store.rows.bases)
    ]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, ROW_BYTES)


@pytest.mark.parametrize("counts", [[1], [10, 10, 10, 4], [3, 50, 1, 9], [40_000, 17]], ids=str)
def test_the_addresses_hold_the_table(open_store: Open, tmp_path: Path, counts: list[int]) -> None:
    segments, table = write(tmp_path, counts)
    store = open_store(segments)
    assert np.array_equal(read(store), table)
    assert store.rows.starts[-1] == len(table)
    store.check()
    assert store.describe()["bytes"] == table.nbytes


def test_closing_releases_maps_and_descriptors_and_is_safe_twice(open_store: Open, tmp_path: Path) -> None:
    segments, _ = write(tmp_path, [1000, 1000])
    before = maps(), descriptors()
    store = open_store(segments)
    assert (maps(), descriptors()) != before
    store.close()
    store.close()
    assert (maps(), descriptors()) == before


@pytest.mark.parametrize("opener", [open_ram, open_file])
def test_a_store_that_nobody_closes_leaves_nothing_either(opener: Open, tmp_path: Path) -> None:
    segments, _ = write(tmp_path, [1000, 1000])
    before = maps(), descriptors()
    store = opener(segments)
    assert (maps(), descriptors()) != before
    del store
    gc.collect()
    assert (maps(), descriptors()) == before


def maps() -> int:
    return sum("ple-offload" in line or ".bin" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_file_that_is_too_short_is_refused_and_nothing_is_left(open_store: Open, tmp_path: Path) -> None:
    segments, _ = write(tmp_path, [1000, 1000])
    os.truncate(segments[1].path, segments[1].offset + 999 * ROW_BYTES)
    before = maps(), descriptors()
    with pytest.raises((StoreError, CheckpointError), match=r"1\.bin.*(cut|early)"):
        open_store(segments)
    assert (maps(), descriptors()) == before


def test_a_missing_file_is_refused(open_store: Open, tmp_path: Path) -> None:
    segments, _ = write(tmp_path, [10, 10])
    segments[0].path.unlink()
    with pytest.raises((StoreError, CheckpointError), match=r"0\.bin: cannot be opened"):
        open_store(segments)


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_the_file_tier_notices_a_changed_file(tmp_path: Path, change: str) -> None:
    segments, _ = write(tmp_path, [100, 100])
    store = open_file(segments)
    path = segments[0].path
    if change == "cut":
        os.truncate(path, 100)
    else:
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(1, 1))
    with pytest.raises(StoreError, match=r"0\.bin: changed while its table t was open"):
        store.check()
    store.close()


def test_a_file_replaced_by_rename_keeps_serving_the_old_rows(tmp_path: Path) -> None:
    segments, table = write(tmp_path, [100, 100])
    store = open_file(segments)
    (tmp_path / "new").write_bytes(b"something else")
    (tmp_path / "new").rename(segments[0].path)
    store.check()
    assert np.array_equal(read(store), table)
    store.close()


def test_reads_are_advised_as_random_unless_the_table_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_reads = [1000]
    monkeypatch.setattr(file, "_disk_reads", lambda: disk_reads[0])
    segments, _ = write(tmp_path, [40_000, 40_000])
    store = open_file(segments)

    def after(checks: int) -> list[bool]:
        for _ in range(checks):
            store.check()
        return advised_as_random()

    forget(segments)
    if not store.absent_bytes():
        pytest.skip("this file system has nothing but memory")
    assert after(checks=0) == [True, True]
    assert after(checks=100) == [True, True]
    store.bring_in(1)
    monkeypatch.setattr(file.FileStore, "_shown", lambda self: False)
    assert after(checks=100) == [True, True]
    monkeypatch.undo()
    monkeypatch.setattr(file, "_disk_reads", lambda: disk_reads[0])
    assert after(checks=99) == [True, True]
    assert after(checks=1) == [False, False]
    disk_reads[0] += 1  # somebody else's
    assert after(checks=1) == [False, False]
    forget(segments)
    assert after(checks=200) == [False, False]
    disk_reads[0] += 1
    assert after(checks=1) == [True, True]
    store.close()


def forget(segments: list[Segment]) -> None:
    """Drop the files' pages from memory."""
    for segment in segments:
        with segment.path.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def advised_as_random() -> list[bool]:
    """Of each map of a test's file."""
    smaps = Path("/proc/self/smaps").read_text()
    return ["rr" in flags.split() for flags in re.findall(r"\.bin$.*?^VmFlags:(.*?)$", smaps, re.MULTILINE | re.DOTALL)]


def test_the_ram_tier_outlives_its_files(tmp_path: Path) -> None:
    segments, table = write(tmp_path, [100, 100])
    store = open_ram(segments)
    for segment in segments:
        os.truncate(segment.path, 0)
    store.check()
    assert np.array_equal(read(store), table)
    store.close()


def test_the_ram_tier_sits_on_huge_pages_and_reports_it(tmp_path: Path) -> None:
    rows = 3 * HUGE_PAGE_BYTES // ROW_BYTES + 100
    segments, _ = write(tmp_path, [rows], files=1)
    store = open_ram(segments)
    facts = store.describe()
    if facts["huge_page_refusal"]:
        store.close()
        pytest.skip(f"this kernel has no MADV_COLLAPSE for shared memory: {facts['huge_page_refusal']}")
    assert facts["huge_page_bytes"] == 3 * HUGE_PAGE_BYTES
    store.close()


def test_loading_reports_every_byte_once(tmp_path: Path) -> None:
    segments, table = write(tmp_path, [1000, 2000])
    done: list[int] = []
    store = RamStore(segments, ROW_BYTES, name="t", threads=2, progress=done.append)
    assert sum(done) == table.nbytes
    store.close()
