"""Bytes of files, read straight into the memory where they will stay.

`read_into` is how a table gets into RAM. Its work is cut where the *memory* asks for it, not the file: a
slice never crosses a multiple of 16 MiB in the address space, so every 2 MiB page belongs to exactly one
slice, and one thread may prepare that page (touch it, collapse it into a huge page) right before it fills it.
Neighbouring jobs share a slice: a table of many small shards costs no more slices than one large tensor.

Threads take slices in address order, so a disk sees nearly sequential reads. The bytes are moved by pread(2)
without the GIL; Python runs only between slices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ple_offload.errors import CheckpointError, UsageError

SLICE_BYTES = 16 << 20  # a multiple of the 2 MiB huge page; at 4 GB/s one takes 4 ms

_libc = ctypes.CDLL(None, use_errno=True)
_pread = _libc.pread  # os.preadv would need a Python buffer over the address; this takes the address
_pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_pread.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file's bytes are known by: they count as the same as long as this is."""

    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, fd: int) -> Stamp:
        found = os.fstat(fd)
        return cls(found.st_size, found.st_mtime_ns)

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes modified at {self.modified_ns} ns"

    def require(self, found: Stamp, path: Path) -> None:
        """Raise CheckpointError when the file of `path` has another stamp by now."""
        if found != self:
            raise CheckpointError(
                f"{path}: changed while its table was opened: expected {self}, found {found}. "
                "Wait until the copy or download has ended, then open the table again."
            )


@dataclass(frozen=True)
class ReadJob:
    """`num_bytes` bytes of `path` from `offset` on go to memory at `address`; the caller keeps it mapped.

    stamp: the file's when its header was read; None: whatever it has.
    """

    path: Path
    offset: int
    num_bytes: int
    address: int
    stamp: Stamp | None = None


@dataclass(frozen=True)
class _Piece:
    """A job's share of one slice."""

    path: Path
    fd: int
    offset: int
    num_bytes: int
    address: int


def read_into(
    jobs: Sequence[ReadJob],
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
    before_slice: Callable[[int, int], None] | None = None,
    drop_cache: bool = False,
) -> None:
    """Fill the memory of all `jobs`; returns when every byte is there.

    Jobs must not overlap in memory. `threads`, the calling one included, read at the same time. Both
    callbacks run in those threads, several at once:

    * `before_slice(address, num_bytes)`, just before a slice is filled. A slice has at most 16 MiB and no
      gaps. The callback may write inside it, never outside: next to it another thread may be reading.
    * `progress(num_bytes)`, after a slice was filled. The calls add up to the bytes of all jobs.

    `drop_cache` frees the page cache of each slice after it was read.

    Raises CheckpointError when a file cannot be opened or read, ends too early, or changes meanwhile; an error of a
    callback is passed on. The first error stops all threads; the contents of the memory mean nothing then.
    """
    if threads < 1:
        raise UsageError(f"threads: expected at least 1, found {threads}")
    with ExitStack() as files:
        paths = dict.fromkeys(job.path for job in jobs)
        fds = {path: files.enter_context(open_file(path)) for path in paths}
        stamps = {path: Stamp.of(fd) for path, fd in fds.items()}
        for job in jobs:
            if job.stamp is not None:
                job.stamp.require(stamps[job.path], job.path)
        slices = _slices([_Piece(job.path, fds[job.path], job.offset, job.num_bytes, job.address) for job in jobs])
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    with lock:  # a generator cannot be advanced by two threads
                        pieces = next(slices, None)
                    if pieces is None:
                        return
                    num_bytes = sum(piece.num_bytes for piece in pieces)
                    if before_slice is not None:
                        before_slice(pieces[0].address, num_bytes)
                    for piece in pieces:
                        _fill(piece)
                        if drop_cache:
                            os.posix_fadvise(piece.fd, piece.offset, piece.num_bytes, os.POSIX_FADV_DONTNEED)
                    if progress is not None:
                        progress(num_bytes)
            except BaseException as error:  # also KeyboardInterrupt: the other threads must stop before files close
                errors.append(error)

        helpers = [threading.Thread(target=work, name=f"ple-offload-read-{i}") for i in range(threads - 1)]
        try:
            for helper in helpers:
                helper.start()
            work()
        except BaseException as error:
            errors.append(error)
        for helper in helpers:
            while helper.is_alive():
                try:
                    helper.join()
                except BaseException as error:
                    # A second Ctrl-C must not leave a thread behind that writes to this memory.
                    errors.append(error)
        if errors:
            raise errors[0]
        for path, stamp in stamps.items():
            stamp.require(Stamp.of(fds[path]), path)
        if drop_cache:
            # A page that two pieces share is only dropped when both have been read.
            for job in jobs:
                os.posix_fadvise(fds[job.path], job.offset, job.num_bytes, os.POSIX_FADV_DONTNEED)


def _slices(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Cut at multiples of SLICE_BYTES in memory; pieces that touch share a slice. In address order."""
    current: list[_Piece] = []
    end = 0  # the address one past the last piece of `current`
    for piece in sorted(pieces, key=lambda piece: piece.address):
        done = 0
        while done < piece.num_bytes:
            address = piece.address + done
            num_bytes = min(SLICE_BYTES - address % SLICE_BYTES, piece.num_bytes - done)
            if current and (address != end or address % SLICE_BYTES == 0):
                yield current
                current = []
            current.append(_Piece(piece.path, piece.fd, piece.offset + done, num_bytes, address))
            end = address + num_bytes
            done += num_bytes
    if current:
        yield current


def _fill(piece: _Piece) -> None:
    done = 0
    while done < piece.num_bytes:
        got = _pread(piece.fd, piece.address + done, piece.num_bytes - done, piece.offset + done)
        if got > 0:
            done += got
        elif got == 0:
            raise _ended_early(piece.path, piece.offset, piece.num_bytes, done)
        elif ctypes.get_errno() != errno.EINTR:
            code = ctypes.get_errno()
            raise CheckpointError(
                f"{piece.path}: reading {piece.num_bytes - done} bytes at offset {piece.offset + done} "
                "failed: "
                f"{os.strerror(code)} ({errno.errorcode.get(code, code)}). Check the disk, or copy the file "
                "anew."
            )


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file with (a link to one is fine), closed at the end.

    Raises CheckpointError when it is missing, not readable, or something else (a pipe would wait for ever).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{path}: cannot be opened: {reason}. Check that the checkpoint is complete and readable by this user."
        ) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: expected a regular file, found file type {stat.filemode(mode)[0]!r}.")
        yield fd
    finally:
        os.close(fd)


def read_bytes(fd: int, path: Path, offset: int, num_bytes: int) -> bytes:
    """Exactly `num_bytes` bytes at `offset`, for small reads. `path` is for the CheckpointError."""
    chunks: list[bytes] = []
    done = 0
    while done < num_bytes:
        try:
            chunk = os.pread(fd, num_bytes - done, offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{path}: reading {num_bytes - done} bytes at offset {offset + done} failed: "
                f"{error.strerror}. "
                "Check the disk, or copy the file anew."
            ) from error
        if not chunk:
            raise _ended_early(path, offset, num_bytes, done)
        chunks.append(chunk)
        done += len(chunk)
    return b"".join(chunks)


def _ended_early(path: Path, offset: int, num_bytes: int, found: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {num_bytes} bytes at offset {offset}, found {found}: the file ends too early. "
        "It was cut while it was read, or is incomplete: download it again."
    )
