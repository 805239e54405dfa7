"""A listening socket of the worker: bound without ever taking a living worker's place, gone when it is closed.

A socket file's folder is made if it is missing: mode 0700, or 2770 and the group's where a group may connect, or 0711
where other users may. A folder that exists is left as it is: whoever may enter it and write the socket may try to connect,
and the worker checks the uid.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ple_offload.errors import UsageError
from ple_offload.ipc.channel import parse_address

BACKLOG = 128
LOCK_LIMIT_S = 10.0


class Listener:
    """Listens at `unix:/path` or `unix:@name`.

    group: a group id that may connect beside the socket file's owner. others: any user may try; the worker checks the uid.

    Raises UsageError when another process serves this address, or the path cannot be used; it leaves nothing behind then.
    """

    def __init__(self, address: str, group: int | None = None, *, others: bool = False) -> None:
        where = parse_address(address)
        self.address = address
        self._path = None if where.startswith("\0") else Path(where)
        self._file: tuple[int, int] | None = None  # device and inode of our socket file
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self.sock.setblocking(False)
            if self._path is None:
                self.sock.bind(where)
                self.sock.listen(BACKLOG)
            else:
                self._listen_at(self._path, group, others)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"{address}: another process already serves this address. Choose another.") from None
            raise UsageError(
                f"{address}: cannot listen: {error.strerror}. Choose a folder this user can write."
            ) from error
        except BaseException:
            self.close()
            raise

    def _listen_at(self, path: Path, group: int | None, others: bool) -> None:
        _make_folder(path.parent, group, others)
        with _locked(path.parent):
            _remove_dead_socket(path)
            before = os.umask(0o177)
            try:
                self.sock.bind(str(path))
            finally:
                os.umask(before)
            self._file = _file_of(path)
            if group is not None:
                _give_to(path, group, 0o660)
            if others:
                path.chmod(0o666)
            # under the lock: a socket that does not listen yet looks like a dead one
            self.sock.listen(BACKLOG)

    def close(self) -> None:
        """Stop listening and remove the socket file, unless it is another worker's by now. Safe to call twice."""
        if self._path is not None and self._file is not None:
            with contextlib.suppress(OSError):
                if _file_of(self._path) == self._file:
                    self._path.unlink()
            self._file = None
        self.sock.close()


def _file_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _make_folder(folder: Path, group: int | None, others: bool) -> None:
    if folder.is_dir():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if group is not None:
        try:
            _give_to(folder, group, 0o2771 if others else 0o2770)
        except UsageError:
            folder.rmdir()
            raise
    elif others:
        folder.chmod(0o711)


def _give_to(path: Path, group: int, mode: int) -> None:
    try:
        os.chown(path, -1, group)
    except PermissionError:
        raise UsageError(
            f"{path}: this user may not give it to group {group}. Name a group this user belongs to."
        ) from None
    path.chmod(mode)  # after chown, which clears the set-group-id bit


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on the folder keeps two workers that start at once from taking each other's socket for dead."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{folder}: another process has held its lock for {LOCK_LIMIT_S:g} s. Choose another folder."
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a worker that has died; OSError EADDRINUSE if it lives, UsageError for another kind of file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            f"unix:{path}: expected a socket or nothing there, found a "
            f"{'folder' if stat.S_ISDIR(mode) else 'file'}. Choose another path."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)  # a living one whose queue is full would let us wait for ever
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError:  # another kind of socket, another user's, or busy: somebody's in any case
            pass
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
