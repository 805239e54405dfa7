"""One end of a connection: whole messages with descriptors over a SOCK_SEQPACKET unix socket, every wait bounded.

SEQPACKET keeps message borders, so there is no half a message to wait for, and tells the end of a peer at once. Addresses:

    unix:/path/to/socket    a socket file; who may connect is decided by its folder's mode and by the peer's uid
    unix:@name              an abstract name of this network namespace: nothing in the file system, nothing left behind
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
import time

from ple_offload.errors import ConnectionLostError, ProtocolError, UsageError
from ple_offload.ipc import messages
from ple_offload.ipc.messages import DESCRIPTORS, MAX_MESSAGE_BYTES, Message

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 4  # more than any message carries
MAX_PATH_BYTES = 107
TELL_AFTER_S = 1.0  # of waiting for somebody to listen
MAX_UNREAD = 1000  # messages of a peer that are thrown away at the end; more than a socket holds


def parse_address(address: str) -> str:
    """What to give to bind and connect; UsageError for an address that is none, or too long for the kernel."""
    path = address.removeprefix("unix:")
    if path == address or not path or path == "@" or not (path.startswith(("/", "@"))):
        raise UsageError(f"address: expected unix:/path/to/socket, found {address!r}.")
    if "\0" in path or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(
            f"address {address!r}: expected a path of at most {MAX_PATH_BYTES} bytes without NUL, found "
            f"{len(os.fsencode(path))} bytes. Choose a shorter path, as in unix:/run/ple-offload/socket."
        )
    return "\0" + path[1:] if path.startswith("@") else path


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process at the other end, as this user namespace sees it."""
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


class Channel:
    """A connected socket. `peer` names the other end in errors. Not for use by two threads at once."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer

    @classmethod
    def connect(cls, address: str, timeout_s: float) -> Channel:
        """Connect to a worker, trying until `timeout_s` while nobody listens yet."""
        where = parse_address(address)
        began_s = time.monotonic()
        deadline, told = began_s + timeout_s, False
        while True:
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            except OSError as error:
                raise ConnectionLostError(f"worker at {address}: no socket could be made: {error.strerror}.") from error
            try:
                sock.setblocking(False)
                sock.connect(where)
                return cls(sock, f"worker at {address}")
            except OSError as error:
                sock.close()
                starting = isinstance(error, (FileNotFoundError, ConnectionRefusedError, BlockingIOError))
                if not starting or time.monotonic() >= deadline:
                    raise ConnectionLostError(
                        f"worker at {address}: connecting failed within {timeout_s:g} s: {error.strerror}. "
                        "Is `ple-offload serve` running, on this host and in this network namespace, for this user?"
                    ) from error
                if not told and time.monotonic() > began_s + TELL_AFTER_S:
                    told = True
                    log.warning("nobody listens at %s yet; waiting up to %g s", address, timeout_s)
            time.sleep(0.02)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        """Send one message; False when the peer does not take it now (its buffer is full) or has gone."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._sock.sendmsg([messages.encode(message)], ancillary, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> tuple[Message, tuple[int, ...]] | None:
        """The next message and its descriptors, which the caller owns; None when none came in time.

        Raises ConnectionLostError at the end of the connection, ProtocolError for a packet that is no message, is too
        large, or carries another number of descriptors than its kind does (all are closed).
        """
        if self._sock.fileno() < 0:
            raise ConnectionLostError(f"{self.peer}: the connection is closed.")
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(max(0, round(timeout_s * 1000))):
            return None
        try:
            packet, ancillary, flags = self._next_packet()
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(f"{self.peer}: the connection broke: {error.strerror}.") from error
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % 4])
        try:
            if not packet and not received:
                raise ConnectionLostError(f"{self.peer}: closed the connection.")
            if len(packet) > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"{self.peer}: expected at most {MAX_MESSAGE_BYTES} bytes a message, found more.")
            message = messages.decode(packet, self.peer)
            expected = DESCRIPTORS.get(type(message), 0)
            if flags & socket.MSG_CTRUNC or len(received) != expected:
                raise ProtocolError(
                    f"{self.peer}: expected {expected} descriptors with {type(message).__name__}, found {len(received)}"
                    f"{' and no room for more (ulimit -n), or too many' if flags & socket.MSG_CTRUNC else ''}."
                )
        except BaseException:
            for fd in received:
                os.close(fd)
            raise
        return message, tuple(received)

    def _next_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        for last_try in (False, True):
            try:
                packet, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
                )
                break
            except (
                ConnectionResetError
            ):  # said once, when the peer left messages unread; its own are still in the queue
                if last_try:
                    raise
        return packet, ancillary, flags

    def end(self) -> None:
        """Tell the peer that nothing more comes: it hears the end of the connection, and can still close it first."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def peer_closed(self, timeout_s: float) -> bool:
        """Wait until the peer has closed its end, or has died; False when it has not in time."""
        if self._sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._sock, 0)  # the kernel says POLLHUP unasked
        return bool(poll.poll(max(0, round(timeout_s * 1000))))

    def close(self) -> None:
        """Close, in a way that lets the peer read what it was sent last: unread messages would take its place."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
            for _ in range(MAX_UNREAD):
                if not self._sock.recv(1):  # without room for descriptors: the kernel closes them
                    break
        self.abandon()

    def abandon(self) -> None:
        """Close this process's descriptor only: the connection lives on in the process that it was forked from."""
        with contextlib.suppress(OSError):
            self._sock.close()
