"""Maps of files and memfds at chosen addresses: the few libc calls that Python's mmap module does not give.

Python's `mmap` cannot place a map at a 2 MiB boundary, keeps a duplicate of the descriptor, and cannot be closed while an
array looks at it. A `Mapping` here is an address and a length; arrays made from it do not own it, so the store that made
it closes it last.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ple_offload.errors import StoreError

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = mmap.PAGESIZE
MADV_NORMAL, MADV_RANDOM = 0, 1
MADV_COLLAPSE = 25  # Linux 6.1: put a range on huge pages now, whatever shmem_enabled says

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class NotCopied:
    """What holds memory or descriptors of this process and gives them back at its end: a copy would give back the same."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, it holds memory of this process. Pass it on as it is, or "
            "open the table again where it is needed."
        )


class Mapping(NotCopied):
    """A shared map of `num_bytes` of a descriptor, from a page-aligned `offset`, placed at a 2 MiB boundary.

    The descriptor may be closed afterwards. `close` unmaps; nothing may read the address from then on.
    Raises StoreError when the kernel refuses the map.
    """

    def __init__(self, fd: int, num_bytes: int, *, offset: int = 0, writable: bool = False, what: str) -> None:
        self.address = 0
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # reserve address space with room to align, map into it, give the rest back
        length = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        reserved = length + HUGE_PAGE_BYTES
        start = _map(0, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0, what)
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.num_bytes = num_bytes
        self._length = length
        try:
            _map(self.address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset, what)
        except StoreError:
            _libc.munmap(start, reserved)
            self.address = 0  # or the destructor would unmap what lies there by then
            raise
        if self.address > start:
            _libc.munmap(start, self.address - start)
        end = self.address + length
        _libc.munmap(end, start + reserved - end)

    def advise(self, advice: int, first: int = 0, num_bytes: int | None = None) -> int:
        """madvise a byte range of the map; returns 0, or the errno of a refusal (advice is never required)."""
        length = self._length - first if num_bytes is None else num_bytes
        return 0 if _libc.madvise(self.address + first, length, advice) == 0 else ctypes.get_errno()

    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes as a uint8 array [num_bytes] that does not own them; writable only if the map is."""
        return np.ctypeslib.as_array(ctypes.cast(self.address, ctypes.POINTER(ctypes.c_uint8)), (self.num_bytes,))

    def huge_bytes(self) -> int:
        """How many bytes of the map sit on 2 MiB pages, from /proc/self/smaps."""
        with contextlib.suppress(OSError):
            smaps = Path("/proc/self/smaps").read_text()
            block = re.search(rf"^{self.address:x}-[0-9a-f]+ .*?^VmFlags", smaps, re.MULTILINE | re.DOTALL)
            if block:
                kinds = re.findall(r"^(?:Shmem|File)PmdMapped: +(\d+) kB", block.group(), re.MULTILINE)
                return sum(int(kib) for kib in kinds) * 1024
        return 0

    def absent_bytes(self) -> int:
        """How many bytes lie on pages that are not in memory, as mincore tells; all where it does not."""
        pages = np.zeros(self._length // PAGE_BYTES, np.uint8)
        if _libc.mincore(self.address, self._length, pages.ctypes.data):
            return self._length
        return int(np.count_nonzero(pages & 1 == 0)) * PAGE_BYTES

    def is_in_memory(self, offset: int) -> bool:
        """Whether the page at a page-aligned offset is in memory, as mincore tells."""
        page = ctypes.c_uint8()
        return not _libc.mincore(self.address + offset, PAGE_BYTES, ctypes.addressof(page)) and bool(page.value & 1)

    def close(self) -> None:
        address, self.address = self.address, 0  # first: a signal handler may close as well
        if address:
            _libc.munmap(address, self._length)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def collapse(address: int, num_bytes: int) -> int:
    """Put the 2 MiB pages that lie wholly in a writable memfd range on huge pages; returns 0 or an errno.

    One byte of each page is touched first: the kernel collapses no page that is entirely absent. Done before the range
    is filled, this allocates the huge page at once, so filling it costs one fault instead of 512 and no later copy.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= first:
        return 0
    for page in range(first, end, HUGE_PAGE_BYTES):
        ctypes.memset(page, 0, 1)
    return 0 if _libc.madvise(first, end - first, MADV_COLLAPSE) == 0 else ctypes.get_errno()


def _map(address: int, num_bytes: int, protection: int, flags: int, fd: int, offset: int, what: str) -> int:
    result = _libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if result == _MAP_FAILED or result is None:
        error = ctypes.get_errno()
        raise StoreError(
            f"{what}: mapping {num_bytes} bytes failed: {os.strerror(error)}. "
            "Check the address-space limit (ulimit -v) and vm.max_map_count."
        )
    return int(result)
