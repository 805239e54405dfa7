"""Random and damaged messages with random descriptors against a real worker: it goes on, keeps nothing, and serves others.

`-m long` sends a million messages. A failure prints its seed; SEED repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.minimal_client import connect, send
from ple_offload.worker.spawn import SpawnedWorker
from worker.peers import GROW, REGION_BYTES, SHRINK, WRITE, GoodSession, hello, nothing_leaks, region

SEED: int | None = None
AT_ONCE = 50  # connections open at the same time

TEMPLATES: list[dict[str, Any]] = [
    {"type": "Ask", "version": 2, "checkpoint": ""},
    {"type": "Borrow", "version": 2, "checkpoint": "", "layer": 1, "fingerprint": "", "part": 0},
    hello(session="fuzz"),
    hello(session="fuzz", dp_size=2, tp_size=2, tp_rank=1),
    hello(
        session="fuzz rows", request="rows", rows_per_token=4, context_len=0, layers=[{"layer": 1, "output": "fp32"}]
    ),
    {"type": "Goodbye"},
    {"type": "Facts", "version": 2, "pid": 1, "log": "", "layers": []},
    {"type": "Welcome", "epoch": 1},
    {"type": "Refused", "reason": "no"},
    {"type": "Ready", "step": 0},
    {"type": "StepFailed", "step": 1, "reason": "no"},
    {"type": "RankLost", "dp_rank": 0, "tp_rank": 0},
    {"type": "Closing", "reason": "no"},
]
NUMBERS = [0, 1, -1, 2, 64, 65, 1024, 1 << 15, 1 << 22, (1 << 22) + 1, 1 << 31, 1 << 47, (1 << 63) - 1, (1 << 64) - 1]
WORDS = ["", "x", "tokens", "rows", "stored", "bf16", "fp32", "fuzz", "fuzz rows", "\0", "\n", "é" * 300, "x" * 40_000]


@pytest.fixture
def descriptors() -> Iterator[dict[str, int]]:
    """One of each kind, made once: what a message carries is a copy."""
    reader, writer = os.pipe()
    kinds = {
        "region": region(),
        "large region": region(4 * REGION_BYTES, seals=SHRINK | GROW),
        "unsealed": region(seals=0),
        "small": region(4096),
        "sparse": region(allocate=0),
        "write-sealed": region(seals=SHRINK | WRITE),
        "doorbell": os.eventfd(0),
        "file": os.open(__file__, os.O_RDONLY),
        "null": os.open("/dev/null", os.O_RDWR),
        "reader": reader,
        "writer": writer,
        "socket": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    }
    yield kinds
    for fd in kinds.values():
        os.close(fd)


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.getrandbits(rng.choice((8, 16, 32, 63))),
        lambda: rng.choice(WORDS),
        lambda: rng.choice((None, True, False, 0.0, -1.5, float("nan"), float("inf"))),
        lambda: rng.randbytes(rng.randrange(20)),
    ]
    if depth < 3:
        kinds.append(lambda: [any_value(rng, depth + 1) for _ in range(rng.randrange(4))])
        kinds.append(lambda: {rng.choice(WORDS[:9]): any_value(rng, depth + 1) for _ in range(rng.randrange(4))})
        kinds.append(lambda: [{"layer": rng.choice((0, 1, 1, 2)), "output": rng.choice(WORDS[:7])}])
    return rng.choice(kinds)()


def any_packet(rng: random.Random) -> bytes:
    """Noise, a good message, one with other values in its fields, or one whose bytes were changed, cut or lengthened."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 1000, 32768, 32769, 60000)))
    message = dict(rng.choice(TEMPLATES))
    if kind < 0.6:
        for name in rng.choices(sorted(message), k=rng.randint(0, 2)):
            message[name] = any_value(rng)
        if rng.random() < 0.1:
            message.pop(rng.choice(sorted(message)))
        if rng.random() < 0.1:
            message[rng.choice(WORDS)] = any_value(rng)
    packet = bytearray(msgspec.msgpack.encode(message))
    if kind > 0.85 and packet:
        for _ in range(rng.randint(1, 3)):
            packet[rng.randrange(len(packet))] = rng.randrange(256)
        if rng.random() < 0.3:
            del packet[rng.randrange(len(packet)) :]
        if rng.random() < 0.2:
            packet += rng.randbytes(rng.randrange(50))
    return bytes(packet)


def any_descriptors(rng: random.Random, kinds: dict[str, int]) -> list[int]:
    if rng.random() < 0.6:
        return [kinds["region"], kinds["doorbell"]]
    return [rng.choice(list(kinds.values())) for _ in range(rng.choice((0, 0, 1, 2, 2, 2, 3, 4, 5, 20)))]


def fuzz(worker: SpawnedWorker, good: GoodSession, kinds: dict[str, int], num_messages: int, seed: int) -> None:
    rng, sent, rounds = random.Random(seed), 0, 0
    while sent < num_messages:
        socks = [connect(worker.address) for _ in range(AT_ONCE)]
        for sock in socks:
            for _ in range(rng.choice((1, 1, 2, 4))):
                packet = any_packet(rng)
                fds = any_descriptors(rng, kinds) if b"Hello" in packet or rng.random() < 0.05 else []
                sent += 1
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was cut off already
                    send(sock, packet, *fds)
        rounds += 1
        if rounds % 10 == 0:
            good.step()
        for sock in socks:
            if rng.random() < 0.5:  # some read what they were told, some just leave
                sock.settimeout(0.001)
                with contextlib.suppress(OSError):
                    while sock.recv(1 << 16):
                        pass
            sock.close()


def run(worker: SpawnedWorker, good: GoodSession, kinds: dict[str, int], num_messages: int) -> None:
    seed = random.randrange(1 << 32) if SEED is None else SEED
    try:
        fuzz(worker, good, kinds, 500, seed)  # what it allocates once
        with nothing_leaks(worker.pid):
            fuzz(worker, good, kinds, num_messages, seed + 1)
        assert "an error of the worker itself" not in Path(worker.log_path).read_text()
    except BaseException as error:
        raise AssertionError(f"SEED = {seed}; the worker's log ends: {worker.log_tail()}") from error


def test_a_few_thousand_messages(worker: SpawnedWorker, good: GoodSession, descriptors: dict[str, int]) -> None:
    run(worker, good, descriptors, 5_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_messages(worker: SpawnedWorker, good: GoodSession, descriptors: dict[str, int]) -> None:
    run(worker, good, descriptors, 1_000_000)
