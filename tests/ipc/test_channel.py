"""The socket between two processes: whole messages, descriptors counted and closed, every wait bounded."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ple_offload.errors import ConnectionLostError, ProtocolError, UsageError
from ple_offload.ipc.channel import Channel, parse_address, peer_uid
from ple_offload.ipc.messages import MAX_MESSAGE_BYTES, Ask, Goodbye, Ready, Refused, Welcome, encode


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at its other end. No descriptor may be left open by the test."""
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, "peer")
    yield channel, theirs
    channel.close()
    theirs.close()
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def send_with(sock: socket.socket, packet: bytes, fds: list[int]) -> None:
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_a_client_that_waits_for_somebody_to_listen_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ple_offload.ipc.channel.TELL_AFTER_S", 0.01)
    with pytest.raises(ConnectionLostError, match="connecting failed within 1 s"):
        Channel.connect("unix:@ple-offload-nobody", 1)
    assert caplog.messages == ["nobody listens at unix:@ple-offload-nobody yet; waiting up to 1 s"]


def test_addresses() -> None:
    assert parse_address("unix:/run/x") == "/run/x"
    assert parse_address("unix:@x") == "\0x"
    for bad in ("", "unix:", "unix:@", "/run/x", "tcp:1", "unix:x", "unix:/a\0b"):
        with pytest.raises(UsageError, match="expected"):
            parse_address(bad)
    assert parse_address("unix:/" + "x" * 106)
    with pytest.raises(UsageError, match=r"at most 107 bytes without NUL, found 108 bytes\. Choose a shorter path"):
        parse_address("unix:/" + "x" * 107)
    with pytest.raises(UsageError, match="found 109 bytes"):  # bytes count, not characters
        parse_address("unix:/" + "ü" * 54)


def test_messages_and_descriptors_arrive_whole(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    other = Channel(theirs, "other")
    reader, writer = os.pipe()
    assert channel.receive(0) is None
    assert other.send(Welcome(7), (writer,))
    assert other.send(Ready(3))
    os.close(writer)
    message, (fd,) = channel.receive(1)
    assert message == Welcome(7)
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    os.close(fd)
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    assert channel.receive(1) == (Ready(3), ())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 50])
def test_unexpected_descriptors_are_closed(pair: tuple[Channel, socket.socket], count: int) -> None:
    channel, theirs = pair
    for packet in (encode(Ready(1)), b"junk", b"", encode(Ready(1))):
        send_with(theirs, packet, [0] * count)
        with pytest.raises(ProtocolError):
            channel.receive(1)


def test_packets_that_are_no_messages(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.send(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most 32768 bytes"):
        channel.receive(1)
    theirs.send(b"junk")
    with pytest.raises(ProtocolError, match="found 4 bytes that are none"):
        channel.receive(1)


def test_the_end_is_told(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionLostError, match="peer: closed the connection"):
        channel.receive(1)
    assert not channel.send(Goodbye())
    channel.close()
    channel.close()
    with pytest.raises(ConnectionLostError, match="the connection is closed"):
        channel.receive(1)


@pytest.mark.parametrize("unread", [0, 1, 30])
def test_the_last_message_survives_unread_ones(pair: tuple[Channel, socket.socket], unread: int) -> None:
    """A socket closed with messages unread resets the connection, which would hide what was sent last."""
    channel, theirs = pair
    for _ in range(unread):
        theirs.send(encode(Ask(1, "")))
    assert channel.send(Refused("this is why"))
    channel.close()
    other = Channel(theirs, "other")
    assert other.receive(1) == (Refused("this is why"), ())
    with pytest.raises(ConnectionLostError, match="closed the connection"):
        other.receive(1)


def test_a_reset_does_not_hide_what_came_before(pair: tuple[Channel, socket.socket]) -> None:
    """The same from a peer that does not take the trouble."""
    channel, theirs = pair
    assert channel.send(Ready(1))
    theirs.send(encode(Goodbye()))
    theirs.close()
    assert channel.receive(1) == (Goodbye(), ())
    with pytest.raises(ConnectionLostError):
        channel.receive(1)


def test_sending_never_waits(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    began = time.monotonic()
    sent = 0
    while channel.send(Refused("x" * 1000)) and sent < 100_000:
        sent += 1
    assert 0 < sent < 100_000
    assert time.monotonic() - began < 5


def test_receiving_waits_as_long_as_told(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    began = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.04 < time.monotonic() - began < 2
    timer = threading.Timer(0.05, theirs.send, [encode(Ready(1))])
    timer.start()
    assert channel.receive(5) == (Ready(1), ())
    timer.join()


def test_connecting_waits_for_a_listener_and_then_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with pytest.raises(ConnectionLostError, match=r"within 0.1 s: No such file.*Is `ple-offload serve` running"):
        Channel.connect(f"unix:{path}", 0.1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    with pytest.raises(ConnectionLostError, match="Connection refused"):
        Channel.connect(f"unix:{path}", 0.1)
    timer = threading.Timer(0.1, listener.listen)
    timer.start()
    channel = Channel.connect(f"unix:{path}", 10)
    timer.join()
    accepted, _ = listener.accept()
    assert peer_uid(accepted) == os.getuid()
    for sock in (channel, accepted, listener):
        sock.close()


def test_connecting_gives_up_at_a_full_queue(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "socket"))
    listener.listen(0)
    first = Channel.connect(f"unix:{tmp_path}/socket", 1)
    with pytest.raises(ConnectionLostError, match="Resource temporarily unavailable"):
        Channel.connect(f"unix:{tmp_path}/socket", 0.1)
    first.close()
    listener.close()
