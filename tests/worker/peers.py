"""Raw peers of a worker: messages and regions as wrong as a test wants them, and a good session that must not notice.

The worker serves the table of `checkpoint/tiny.py`: 120 rows of 16 bf16, 4 rows a token, look-back 2. Sizes are those of
the example in docs/PROTOCOL.md, whose region has 413,696 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from checkpoint import tiny
from ipc.minimal_client import Client, connect, send

REGION_BYTES = 413_696
F_ADD_SEALS, SHRINK, GROW, WRITE, FUTURE_WRITE = 1033, 2, 4, 8, 16
TABLE = np.frombuffer(tiny.table_bytes(tiny.ROWS, "BF16"), np.uint8).reshape(tiny.ROWS, 32)


def hello(**changes: Any) -> dict[str, Any]:
    """A Hello of the example; `changes` replace or add fields, None takes one away."""
    message = {
        "type": "Hello",
        "version": 2,
        "checkpoint": "",
        "session": "hostile",
        "step": 0,
        "worker_id": 0,
        "dp_rank": 0,
        "dp_size": 1,
        "tp_rank": 0,
        "tp_size": 1,
        "request": "tokens",
        "layers": [{"layer": 1, "output": "stored"}],
        "max_num_tokens": 1500,
        "max_num_reqs": 8,
        "slots": 2,
        "context_len": 2,
        "rows_per_token": 0,
    }
    message.update(changes)
    return {name: value for name, value in message.items() if value is not None}


def packed(message: Any) -> bytes:
    return message if isinstance(message, bytes) else msgspec.msgpack.encode(message)


def region(num_bytes: int = REGION_BYTES, *, seals: int = SHRINK, allocate: int | None = None, flags: int = 0) -> int:
    """A memfd; `allocate`: how many of its bytes (default all)."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, num_bytes)
    allocate = num_bytes if allocate is None else allocate
    if allocate:
        os.posix_fallocate(fd, 0, allocate)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


class Peer:
    """A connection that says what it is told."""

    def __init__(self, address: str) -> None:
        self.sock = connect(address)

    def say(self, message: Any, *descriptors: int) -> Peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was cut off before
            send(self.sock, packed(message), *descriptors)
        return self

    def greet(self, **changes: Any) -> Peer:
        """Say a Hello with a good region and doorbell."""
        fds = region(), os.eventfd(0)
        self.say(hello(**changes), *fds)
        for fd in fds:
            os.close(fd)
        return self

    def hear(self, limit_s: float = 10.0) -> dict[str, Any] | None:
        """The next message; None at the end of the connection."""
        if not select.select([self.sock], [], [], limit_s)[0]:
            raise TimeoutError(f"nothing heard within {limit_s:g} s")
        packet, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        return msgspec.msgpack.decode(packet) if packet else None

    def refusal(self) -> str:
        """The reason of the Refused that must come, with the end of the connection behind it."""
        while (message := self.hear()) is not None:
            if message["type"] == "Refused":
                assert self.hear() is None
                return str(message["reason"])
        raise AssertionError("the connection ended without a reason")

    def close(self) -> None:
        self.sock.close()


class GoodSession:
    """A session that looks rows up, checks every one, and remembers its slowest step."""

    def __init__(self, address: str, session: str = "good") -> None:
        self.client = Client(address, layer=1, max_num_tokens=64, session=session)
        self.rng = np.random.default_rng(1)
        self.slowest_s = 0.0

    def step(self) -> None:
        ids = self.rng.integers(0, 1000, self.rng.integers(1, 64))
        began = time.monotonic()
        step = self.client.publish(ids)
        rows = self.client.wait(step, len(ids))
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        np.testing.assert_array_equal(rows, expected_rows(ids))
        self.client.release(step)

    def steps_for(self, seconds: float) -> int:
        """Step on for a while; returns how many."""
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self.step()
            count += 1
        return count

    def close(self) -> None:
        self.client.close()


@contextlib.contextmanager
def announcing_for_ever(client: Client, num_tokens: int) -> Iterator[None]:
    """A thread announces steps of `num_tokens` tokens as fast as it can, releases them unserved, and rings."""
    stop = threading.Event()
    for slot in range(client.slots):
        starts_at = client.inputs_at + slot * client.input_bytes + 64 + 8 * client.max_num_tokens
        struct.pack_into("<qq", client.memory, starts_at, 0, num_tokens)
    client.store(64, 1 << 40)  # released
    client.store(0, 1 << 40)  # announced

    def announce() -> None:
        first = client.slots
        while not stop.is_set():
            for slot in range(client.slots):
                head = client.inputs_at + slot * client.input_bytes
                struct.pack_into("<QQQ", client.memory, head, first + slot, 1, num_tokens)
                os.eventfd_write(client.doorbell, 1)
            first += client.slots

    thread = threading.Thread(target=announce)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def expected_rows(ids: Any, starts: Any = None, context: Any = None) -> np.ndarray:
    """Bytes [num_tokens, 128] by the NumPy reference."""
    starts = np.array([0, len(ids)] if starts is None else starts)
    context = np.full((len(starts) - 1, 2), 7) if context is None else np.asarray(context)
    numbers = tiny.family(0).row_numbers_reference(np.asarray(ids), starts, context)
    return TABLE[numbers].reshape(len(numbers), 128)


@contextlib.contextmanager
def nothing_leaks(pid: int) -> Iterator[None]:
    """The process has as many descriptors and memfd maps afterwards, and hardly more memory, within 5 s."""
    before = settled(pid)
    yield
    end = time.monotonic() + 5
    while True:
        after = resources(pid)
        fds, maps, kib = (b - a for a, b in zip(before, after, strict=True))
        if (fds, maps) == (0, 0) and kib < 16 << 10:
            return
        if time.monotonic() > end:
            raise AssertionError(f"worker {pid}: {fds} descriptors, {maps} maps, {kib} KiB more than before")
        time.sleep(0.02)


def settled(pid: int) -> tuple[int, int, int]:
    """`resources`, once they stand still: what was closed last may be on its way."""
    seen = resources(pid)
    for _ in range(100):
        time.sleep(0.03)
        before, seen = seen, resources(pid)
        if seen[:2] == before[:2]:
            break
    return seen


def resources(pid: int) -> tuple[int, int, int]:
    """Descriptors, maps of memfds, resident KiB."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    status = Path(f"/proc/{pid}/status").read_text()
    resident = status.split("VmRSS:")[1].split()[0]
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), maps.count("/memfd:"), int(resident)
