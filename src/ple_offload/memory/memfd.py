"""Anonymous memory behind a descriptor: written once, sealed, then read-only for everyone.

Life: create -> map writable -> fill -> unmap (a writable map blocks the seal) -> seal against write, grow and shrink ->
reopen read-only through /proc/self/fd -> keep only that descriptor. After this nobody, this process included, can change a
byte, so the descriptor can be handed to other processes; and unlinked by construction, it leaves nothing behind. The
read-only descriptor matters: before Linux 6.7 a shared map of a write-sealed memfd is refused through a writable one.
"""

from __future__ import annotations

import fcntl
import os

from ple_offload.errors import StoreError
from ple_offload.memory.mapping import Mapping

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 0x2, 0x4, 0x8
F_SEAL_FUTURE_WRITE = 0x10
SEALED = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE


def create(name: str, num_bytes: int) -> int:
    """A new writable memfd of exactly `num_bytes`; returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise StoreError(f"memfd {name}: sizing it to {num_bytes} bytes failed: {error.strerror}.") from error
    return fd


def seal(fd: int, name: str) -> int:
    """Seal a memfd that has no writable map left and close it; returns a read-only descriptor of the same memory."""
    try:
        fcntl.fcntl(fd, F_ADD_SEALS, SEALED)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(
            f"memfd {name}: sealing it read-only failed: {error.strerror}. It needs /proc, and a kernel with memfd seals."
        ) from error
    finally:
        os.close(fd)


def seal_size(fd: int, name: str) -> None:
    """Seal a memfd against shrinking and growing; its bytes may still be written."""
    _add_seals(fd, name, F_SEAL_SHRINK | F_SEAL_GROW)


def seal_against_new_writers(fd: int, name: str) -> int:
    """Let only the writable maps that exist now write on; returns a read-only descriptor and closes `fd`."""
    try:
        _add_seals(fd, name, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _add_seals(fd: int, name: str, seals: int) -> None:
    try:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError as error:
        raise StoreError(f"memfd {name}: sealing it failed: {error.strerror}. It needs Linux 5.1 or later.") from error


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is a memfd that can no longer change."""
    try:
        return fcntl.fcntl(fd, F_GET_SEALS) & SEALED == SEALED
    except OSError:
        return False


def map_read_only(fd: int, num_bytes: int, what: str) -> Mapping:
    """Map a sealed memfd for reading, on 2 MiB pages where the memory has them."""
    from ple_offload.memory.mapping import MADV_COLLAPSE

    mapping = Mapping(fd, num_bytes, what=what)
    mapping.advise(MADV_COLLAPSE)  # the pages are huge already: this only maps them so
    return mapping
