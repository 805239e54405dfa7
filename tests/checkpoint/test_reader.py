"""`read_into` puts every byte where it belongs, whatever the offsets, and stops at once when it cannot."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_offload.checkpoint import reader
from ple_offload.checkpoint.reader import ReadJob, read_into
from ple_offload.errors import CheckpointError, UsageError

SLICE = 4096


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SLICE_BYTES", SLICE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "data"
    path.write_bytes(np.random.default_rng(0).bytes(100_003))
    return path


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3 * SLICE), st.integers(0, 2 * SLICE), st.booleans()), max_size=12),
    start=st.integers(0, SLICE),
    threads=st.integers(1, 4),
    drop_cache=st.booleans(),
    data=st.data(),
)
def test_every_byte_arrives_and_no_other_changes(
    file: Path,
    sizes: list[tuple[int, int, bool]],
    start: int,
    threads: int,
    drop_cache: bool,
    data: st.DataObject,
) -> None:
    """Jobs at odd offsets, of odd sizes, touching in memory or apart, in any order, from one file."""
    content = file.read_bytes()
    expected = np.full(start + sum(size + gap for size, gap, _ in sizes) + 64, 0xEE, np.uint8)
    memory = expected.copy()
    jobs: list[ReadJob] = []
    place = start
    for size, gap, touching in sizes:
        place += 0 if touching else gap
        offset = data.draw(st.integers(0, len(content) - size))
        jobs.append(ReadJob(file, offset, size, memory.ctypes.data + place))
        expected[place : place + size] = np.frombuffer(content[offset : offset + size], np.uint8)
        place += size
    slices: list[tuple[int, int]] = []
    done: list[int] = []
    read_into(
        data.draw(st.permutations(jobs)),
        threads=threads,
        progress=done.append,
        before_slice=lambda address, num_bytes: slices.append((address, num_bytes)),
        drop_cache=drop_cache,
    )
    np.testing.assert_array_equal(memory, expected)
    assert sum(done) == sum(size for size, _, _ in sizes)
    assert sorted(done) == sorted(num_bytes for _, num_bytes in slices)
    for address, num_bytes in slices:
        assert 0 < num_bytes <= SLICE
        assert address // SLICE == (address + num_bytes - 1) // SLICE  # never crosses a multiple
    slices.sort()
    for (first, num_bytes), (second, _) in itertools.pairwise(slices):
        # slices meet only at a multiple, or there is a gap: no page is prepared by two threads
        assert first + num_bytes < second or (first + num_bytes == second and second % SLICE == 0)


def test_shards_of_several_files_share_slices(tmp_path: Path) -> None:
    """300 shards of 100 bytes: nine or so slices, not 300."""
    files = [tmp_path / str(i) for i in range(3)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i]) * 10_000)
    memory = np.zeros(30_000, np.uint8)
    jobs = [ReadJob(files[i % 3], i // 3 * 100, 100, memory.ctypes.data + i * 100) for i in range(300)]
    slices: list[int] = []
    read_into(jobs, threads=2, before_slice=lambda address, _: slices.append(address))
    np.testing.assert_array_equal(memory, np.repeat(np.arange(300) % 3, 100))
    assert len(slices) <= 30_000 // SLICE + 2


def test_the_hook_runs_before_its_slice_is_filled(file: Path) -> None:
    """It may scribble on its slice (a touch does), in the thread that will read."""
    memory = np.zeros(5 * SLICE, np.uint8)
    readers: set[int] = set()

    def scribble(address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0xFF, num_bytes)
        readers.add(threading.get_ident())

    read_into([ReadJob(file, 7, memory.size, memory.ctypes.data)], threads=3, before_slice=scribble)
    assert memory.tobytes() == file.read_bytes()[7 : 7 + memory.size]
    assert len(readers) <= 3


def test_reads_run_at_the_same_time(file: Path) -> None:
    """Two threads meet inside the hook: one alone would wait until the barrier breaks."""
    memory = np.zeros(2 * SLICE, np.uint8)
    barrier = threading.Barrier(2, timeout=20)
    jobs = [ReadJob(file, i * 100, 100, memory.ctypes.data + i * SLICE) for i in range(2)]
    read_into(jobs, threads=2, before_slice=lambda address, num_bytes: barrier.wait())


def test_no_jobs(file: Path) -> None:
    read_into([], threads=4)
    read_into([ReadJob(file, 0, 0, 0)], threads=4)


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(bytes(5 * SLICE))
    memory = np.zeros(8 * SLICE, np.uint8)
    before = _descriptors()
    with pytest.raises(CheckpointError, match=r"shard\.safetensors: expected \d+ bytes at offset \d+, found \d+"):
        read_into([ReadJob(path, 0, memory.size, memory.ctypes.data)], threads=2)
    assert _descriptors() == before


def test_the_message_counts_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(150))
    memory = np.zeros(2 * SLICE, np.uint8)
    begin = memory.ctypes.data + -memory.ctypes.data % SLICE  # 100 bytes anywhere might be cut between two slices
    with pytest.raises(CheckpointError, match="expected 100 bytes at offset 120, found 30"):
        read_into([ReadJob(path, 120, 100, begin)], threads=1)


def test_a_missing_file_is_found_before_anything_is_read(file: Path, tmp_path: Path) -> None:
    memory = np.zeros(20, np.uint8)
    jobs = [
        ReadJob(file, 0, 10, memory.ctypes.data),
        ReadJob(tmp_path / "gone", 0, 10, memory.ctypes.data + 10),
    ]
    before = _descriptors()
    with pytest.raises(CheckpointError, match="gone: cannot be opened: No such file"):
        read_into(jobs, threads=2)
    assert not memory.any()
    assert _descriptors() == before


def test_a_read_error_is_reported_with_its_name(file: Path) -> None:
    """An address nothing is mapped at makes pread fail with EFAULT."""
    with pytest.raises(CheckpointError, match=r"data: reading 10 bytes at offset 5 failed: Bad address \(EFAULT\)"):
        read_into([ReadJob(file, 5, 10, 16)], threads=1)


def test_short_and_interrupted_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, turns = reader._pread, itertools.count()

    def pread(fd: int, address: int, num_bytes: int, offset: int) -> int:
        if next(turns) % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(fd, address, min(num_bytes, 1000), offset))

    monkeypatch.setattr(reader, "_pread", pread)
    memory = np.zeros(10_000, np.uint8)
    read_into([ReadJob(file, 3, memory.size, memory.ctypes.data)], threads=2)
    assert memory.tobytes() == file.read_bytes()[3:10_003]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_the_first_error_stops_all_threads(file: Path, error: BaseException) -> None:
    memory = np.zeros(20 * SLICE, np.uint8)
    started: list[int] = []

    def hook(address: int, num_bytes: int) -> None:
        started.append(address)
        if len(started) == 3:
            raise error

    before = _descriptors()
    threads_before = threading.active_count()
    with pytest.raises(type(error)) as caught:
        read_into([ReadJob(file, 0, memory.size, memory.ctypes.data)], threads=3, before_slice=hook)
    assert caught.value is error
    assert len(started) <= 3 + 2  # each of the other two may have begun one more
    assert _descriptors() == before
    assert threading.active_count() == threads_before


def test_an_error_of_progress_is_passed_on(file: Path) -> None:
    memory = np.zeros(SLICE, np.uint8)

    def progress(num_bytes: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        read_into([ReadJob(file, 0, SLICE, memory.ctypes.data)], threads=2, progress=progress)


def test_drop_cache_covers_every_byte(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: dropped.append((offset, size)))
    memory = np.zeros(5 * SLICE, np.uint8)
    jobs = [ReadJob(file, 11, memory.size, memory.ctypes.data)]
    read_into(jobs, threads=1)
    assert dropped == []
    read_into(jobs, threads=1, drop_cache=True)
    assert dropped[-1] == (11, memory.size)
    assert sum(size for _, size in dropped[:-1]) == memory.size


def test_at_least_one_thread(file: Path) -> None:
    with pytest.raises(UsageError, match="threads: expected at least 1, found 0"):
        read_into([ReadJob(file, 0, 1, 0)], threads=0)
