"""Sealed memory: nobody can change it any more, and maps sit where huge pages can."""

from __future__ import annotations

import gc
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

from ple_offload.errors import StoreError
from ple_offload.memory import mapping as mapping_module
from ple_offload.memory import memfd
from ple_offload.memory.mapping import HUGE_PAGE_BYTES, Mapping, collapse


def sealed(data: bytes) -> int:
    fd = memfd.create("test", len(data))
    mapping = Mapping(fd, len(data), writable=True, what="test")
    mapping.view()[:] = np.frombuffer(data, np.uint8)
    mapping.close()
    return memfd.seal(fd, "test")


def test_a_sealed_memfd_keeps_its_bytes_and_refuses_every_change() -> None:
    data = os.urandom(70_001)
    fd = sealed(data)
    try:
        assert memfd.is_sealed(fd)
        assert os.pread(fd, len(data) + 1, 0) == data
        with memfd_map(fd, len(data)) as mapping:
            assert mapping.view().tobytes() == data
            assert mapping.address % HUGE_PAGE_BYTES == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)  # the descriptor is read-only
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # and a writable one finds the seals
        try:
            for change in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 1)):
                with pytest.raises(PermissionError):
                    change()
            with pytest.raises(PermissionError):
                mmap.mmap(again, len(data), mmap.MAP_SHARED, mmap.PROT_WRITE)
        finally:
            os.close(again)
    finally:
        os.close(fd)


class memfd_map:  # noqa: N801
    def __init__(self, fd: int, num_bytes: int) -> None:
        self.mapping = memfd.map_read_only(fd, num_bytes, "test")

    def __enter__(self) -> Mapping:
        return self.mapping

    def __exit__(self, *exception: object) -> None:
        self.mapping.close()


def test_a_writable_map_blocks_the_seal_and_the_error_says_so() -> None:
    fd = memfd.create("test", 4096)
    mapping = Mapping(fd, 4096, writable=True, what="test")
    with pytest.raises(StoreError, match="sealing it read-only failed"):
        memfd.seal(fd, "test")
    mapping.close()


def test_other_descriptors_are_not_sealed(tmp_path: os.PathLike[str]) -> None:
    fd = memfd.create("test", 10)
    assert not memfd.is_sealed(fd)
    os.close(fd)
    with open(os.path.join(tmp_path, "f"), "w") as file:  # noqa: PTH118, PTH123
        assert not memfd.is_sealed(file.fileno())


def test_collapse_gives_huge_pages_for_the_whole_pages_inside_and_touches_nothing_outside() -> None:
    size = 3 * HUGE_PAGE_BYTES + 5000
    fd = memfd.create("test", size)
    mapping = Mapping(fd, size, writable=True, what="test")
    refused = collapse(mapping.address + 100, size - 100)
    if refused:
        mapping.close()
        os.close(fd)
        pytest.skip(f"this kernel has no MADV_COLLAPSE for shared memory: {os.strerror(refused)}")
    assert mapping.huge_bytes() == 2 * HUGE_PAGE_BYTES  # the first page is cut by the range, the last by the size
    assert not mapping.view().any()
    mapping.close()
    os.close(fd)


def test_a_range_without_a_whole_huge_page_is_left_alone() -> None:
    fd = memfd.create("test", 4096)
    mapping = Mapping(fd, 4096, writable=True, what="test")
    assert collapse(mapping.address, 4096) == 0
    assert mapping.huge_bytes() == 0
    mapping.close()
    mapping.close()
    os.close(fd)


def test_a_map_that_failed_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmapped again by the destructor, it would tear a hole into whatever lies there by then."""
    given_back: list[int] = []
    libc = SimpleNamespace(mmap=mapping_module._libc.mmap, munmap=lambda address, num_bytes: given_back.append(address))
    monkeypatch.setattr(mapping_module, "_libc", libc)
    with pytest.raises(StoreError, match="Bad file descriptor"):
        Mapping(-1, 4096, what="table t")
    gc.collect()
    assert len(given_back) == 1


def test_a_map_that_the_kernel_refuses_is_an_error_with_the_remedy() -> None:
    with pytest.raises(StoreError, match=r"table t: mapping \d+ bytes failed.*ulimit"):
        Mapping(-1, 1 << 60, what="table t")
