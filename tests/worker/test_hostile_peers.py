"""What a peer does wrong ends its own connection, with a reason, and harms nobody: a good session runs beside each test."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.minimal_client import Client
from ple_offload.worker.spawn import SpawnedWorker
from worker.peers import (
    FUTURE_WRITE,
    GROW,
    REGION_BYTES,
    SHRINK,
    WRITE,
    GoodSession,
    Peer,
    announcing_for_ever,
    hello,
    nothing_leaks,
    packed,
    region,
    resources,
)

ASK = {"type": "Ask", "version": 2, "checkpoint": ""}
MFD_HUGETLB = 4
PUNCH_HOLE = 0x02 | 0x01  # of fallocate, with the size kept


@pytest.fixture
def peer(worker: SpawnedWorker, good: GoodSession) -> Iterator[Callable[[], Peer]]:
    """peer(): one more connection. All are closed after the test, and nothing of them may be left in the worker."""
    with nothing_leaks(worker.pid), ExitStack() as opened:

        def connect_one() -> Peer:
            made = Peer(worker.address)
            opened.callback(made.close)
            return made

        yield connect_one
        good.step()


# ---- messages ---------------------------------------------------------------------------------------------------------

WRONG_FIRST_MESSAGES: dict[str, tuple[Any, str]] = {
    "zeros": (bytes(100), "bytes that are none"),
    "text": (b"GET / HTTP/1.1\r\n\r\n", "bytes that are none"),
    "half a message": (packed(hello())[:50], "bytes that are none"),
    "more than a message": (packed(ASK) + b"x", "bytes that are none"),
    "too long": (packed({**ASK, "checkpoint": "x" * 40_000}), "at most 32768 bytes"),
    "much too long": (bytes(150_000), "at most 32768 bytes"),
    "deep": (b"\x91" * 30_000, "bytes that are none"),
    "no type": ({"version": 2, "checkpoint": ""}, "bytes that are none"),
    "unknown type": ({"type": "Steal\n\x1b[31m", "version": 2}, "bytes that are none"),
    "unknown field": ({**ASK, "please": 1}, "unknown field `please`"),
    "missing field": ({"type": "Ask", "version": 2}, "missing required field `checkpoint`"),
    "wrong kind of field": ({**ASK, "version": "1"}, "`int`"),
    "huge number": ({**ASK, "version": 2**64 - 1}, "protocol version 2, found 18446744073709551615"),
    "version 1": ({**ASK, "version": 1}, "protocol version 2, found 1. Install the same release"),
    "not UTF-8": (packed(ASK).replace(b"Ask", b"A\xffk"), "bytes that are none"),
    "checkpoint not there": ({**ASK, "checkpoint": "/etc"}, "expected one of the checkpoints"),
    "a worker's message": ({"type": "Ready", "step": 0}, "found Ready"),
    "goodbye first": ({"type": "Goodbye"}, "found Goodbye"),
    "hello without descriptors": (hello(), "expected 2 descriptors with Hello, found 0"),
}


@pytest.mark.parametrize("what", WRONG_FIRST_MESSAGES)
def test_a_wrong_first_message_is_refused(peer: Callable[[], Peer], what: str) -> None:
    message, reason = WRONG_FIRST_MESSAGES[what]
    refusal = peer().say(message).refusal()
    assert reason in refusal
    assert refusal.isprintable()


def test_an_empty_packet_is_the_end(peer: Callable[[], Peer]) -> None:
    assert peer().say(b"").hear() is None


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (ASK, "expected a Goodbye, found Ask"),
        ({"type": "Ready", "step": 0}, "expected a Goodbye, found Ready"),
        (b"\xc1", "bytes that are none"),
        (bytes(40_000), "at most 32768 bytes"),
    ],
)
def test_a_wrong_later_message_is_refused(peer: Callable[[], Peer], later: Any, reason: str) -> None:
    one = peer().greet()
    assert [one.hear()["type"], one.hear()["type"]] == ["Welcome", "Ready"]
    assert reason in one.say(later).refusal()


def test_a_second_ask_or_hello_is_refused(peer: Callable[[], Peer]) -> None:
    asks = peer().say(ASK)
    assert asks.hear()["type"] == "Facts"
    assert "expected a Hello, found Ask" in asks.say(ASK).refusal()
    greets = peer().greet()
    assert [greets.hear()["type"], greets.hear()["type"]] == ["Welcome", "Ready"]
    assert "expected a Goodbye, found Hello" in greets.greet().refusal()


def test_the_reason_arrives_though_more_was_sent(peer: Callable[[], Peer]) -> None:
    """Messages that the worker never reads must not swallow the Refused before them (ECONNRESET takes its place)."""
    for _ in range(20):
        one = peer()
        for message in (ASK, b"junk", ASK, hello(), b"junk"):
            one.say(message)
        assert "bytes that are none" in one.refusal()


WRONG_NUMBERS: dict[str, tuple[Any, str]] = {
    "version": (3, "protocol version 2, found 3"),
    "step": (-1, "step: expected 0 to"),
    "worker_id": (2**20 + 1, "worker_id: expected 0 to 1048576"),
    "dp_rank": (1, "dp_rank: expected 0 to 0, found 1"),
    "dp_size": (0, "dp_size: expected 1 to 1024"),
    "tp_rank": (-1, "tp_rank: expected 0 to 0"),
    "tp_size": (1025, "tp_size: expected 1 to 1024"),
    "max_num_tokens": (2**62, "max_num_tokens: expected 1 to 4194304"),
    "max_num_reqs": (0, "max_num_reqs: expected 1 to"),
    "slots": (65, "slots: expected 1 to 64"),
    "context_len": (3, "expected context_len [2], found 3"),
    "rows_per_token": (2**13, "rows_per_token: expected 0 to 4096"),
    "session": ("", "session: expected a name of 1 to 200"),
    "request": ("everything", "request: expected 'tokens' or 'rows'"),
    "checkpoint": ("other", "expected one of the checkpoints"),
}


@pytest.mark.parametrize("field", WRONG_NUMBERS)
def test_a_number_out_of_bounds_is_refused(peer: Callable[[], Peer], field: str) -> None:
    value, reason = WRONG_NUMBERS[field]
    assert reason in peer().greet(**{field: value}).refusal()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "expected different layers, at least one"),
        ([{"layer": 1, "output": "stored"}] * 2, "expected different layers"),
        ([{"layer": 0, "output": "stored"}], "expected a layer of [1], found 0"),
        ([{"layer": 1, "output": "int8"}], "output: expected one of stored"),
        ([{"layer": 1, "output": "stored", "fingerprint": "x\n"}], "were given different checkpoints"),
    ],
)
def test_wrong_layers_are_refused(peer: Callable[[], Peer], layers: Any, reason: str) -> None:
    assert reason in peer().greet(layers=layers).refusal()


# ---- descriptors ------------------------------------------------------------------------------------------------------


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def read_only_region() -> int:
    fd = region()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


WRONG_REGIONS: dict[str, tuple[Callable[[], int], str]] = {
    "regular file": (lambda: os.open(__file__, os.O_RDONLY), "expected a memfd as region"),
    "folder": (lambda: os.open("/", os.O_RDONLY), "expected a memfd as region"),
    "device": (lambda: os.open("/dev/zero", os.O_RDWR), "expected a memfd as region"),
    "pipe": (pipe_end, "expected a memfd as region"),
    "socket": (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(), "expected a memfd as region"),
    "eventfd": (lambda: os.eventfd(0), "expected a memfd as region"),
    "read-only memfd": (read_only_region, "found a read-only descriptor"),
    "unsealed": (lambda: region(seals=0), "sealed against shrinking"),
    "sealed against growing only": (lambda: region(seals=GROW), "sealed against shrinking"),
    "sealed against writing": (lambda: region(seals=SHRINK | WRITE), "not against writing"),
    "sealed against new writers": (lambda: region(seals=SHRINK | FUTURE_WRITE), "not against writing"),
    "a byte too small": (lambda: region(REGION_BYTES - 1), "expected a region of 413696 bytes, found 413695"),
    "empty": (lambda: region(0), "expected a region of 413696 bytes, found 0"),
    "sparse": (lambda: region(allocate=0), "bytes allocated"),
    "one page missing": (lambda: region(allocate=REGION_BYTES - 4096), "bytes allocated"),
    "huge pages": (lambda: region(2 << 20, allocate=0, flags=MFD_HUGETLB), "expected a region on ordinary pages"),
}


@pytest.mark.parametrize("what", WRONG_REGIONS)
def test_a_wrong_region_is_refused(peer: Callable[[], Peer], what: str) -> None:
    make, reason = WRONG_REGIONS[what]
    try:
        fds = make(), os.eventfd(0)
    except OSError as error:
        pytest.skip(f"this kernel has none: {error.strerror}")
    assert reason in peer().say(hello(), *fds).refusal()
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "make", [region, pipe_end, lambda: os.open(__file__, os.O_RDONLY)], ids=["memfd", "pipe", "file"]
)
def test_a_wrong_doorbell_is_refused(peer: Callable[[], Peer], make: Callable[[], int]) -> None:
    fds = region(), make()
    assert "expected an eventfd as doorbell" in peer().say(hello(), *fds).refusal()
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 100])
def test_too_many_or_too_few_descriptors_are_refused(peer: Callable[[], Peer], count: int) -> None:
    fds = [region(4096, seals=0) for _ in range(count)]
    assert "expected 2 descriptors with Hello, found" in peer().say(hello(), *fds).refusal()
    assert "expected 0 descriptors with Ask, found" in peer().say(ASK, *fds).refusal()
    for fd in fds:
        os.close(fd)


def test_a_later_message_with_descriptors_leaves_none_behind(peer: Callable[[], Peer]) -> None:
    for _ in range(20):
        one = peer().greet()
        assert [one.hear()["type"], one.hear()["type"]] == ["Welcome", "Ready"]
        one.greet().refusal()


def test_a_region_cannot_shrink_once_it_is_served(peer: Callable[[], Peer]) -> None:
    fds = region(), os.eventfd(0)
    one = peer().say(hello(), *fds)
    assert [one.hear()["type"], one.hear()["type"]] == ["Welcome", "Ready"]
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0], 4096)
    for fd in fds:
        os.close(fd)


def test_the_heartbeat_cannot_be_written(worker: SpawnedWorker) -> None:
    """The one page that all clients share: no client may fake the worker's life."""
    one = Peer(worker.address).greet(session="heart")
    _, fds, _, _ = socket.recv_fds(one.sock, 1 << 16, 4)
    with pytest.raises(PermissionError):
        mmap.mmap(fds[0], 4096)
    again = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR)  # root may, and others of the worker's user
    with pytest.raises(PermissionError):
        mmap.mmap(again, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    os.close(fds[0])
    one.close()


# ---- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dp_size", 3),
        ("tp_size", 2),
        ("request", "rows"),
        ("max_num_tokens", 1501),
        ("max_num_reqs", 9),
        ("slots", 3),
        ("layers", [{"layer": 1, "output": "fp32"}]),
    ],
)
def test_ranks_that_disagree_are_refused(peer: Callable[[], Peer], field: str, value: Any) -> None:
    first = peer().greet(dp_size=2)
    assert first.hear()["type"] == "Welcome"
    second = {"dp_size": 2, "dp_rank": 1, "worker_id": 1, "rows_per_token": 4, field: value}
    assert f"expected {field} " in peer().greet(**second).refusal()
    # the first is still there, and complete with the right one
    assert peer().greet(dp_size=2, dp_rank=1, worker_id=1).hear()["type"] == "Welcome"
    assert first.hear()["type"] == "Ready"


def test_a_rank_or_a_number_given_twice_is_refused(peer: Callable[[], Peer]) -> None:
    first = peer().greet(dp_size=2)
    assert first.hear()["type"] == "Welcome"
    assert "expected one connection of DP rank 0 TP rank 0, found two" in peer().greet(dp_size=2).refusal()
    assert "worker id 0 is already connected" in peer().greet(dp_size=2, dp_rank=1).refusal()


def test_sessions_that_ended_are_forgotten(worker: SpawnedWorker, good: GoodSession) -> None:
    """A client that names a new session with a thousand ranks each time does not fill the worker's memory."""

    def come_and_go(count: int) -> None:
        for i in range(count):
            one = Peer(worker.address).greet(session=f"{i} of {count} ".ljust(200, "x"), dp_size=1024)
            assert one.hear()["type"] == "Welcome"
            one.say({"type": "Goodbye"}).close()

    come_and_go(100)
    before = resources(worker.pid)[2]
    come_and_go(400)
    good.step()
    assert resources(worker.pid)[2] - before < 20 << 10  # KiB; each would keep 150


# ---- steps ------------------------------------------------------------------------------------------------------------


def test_inputs_that_cannot_be_are_refused_step_by_step(worker: SpawnedWorker, good: GoodSession) -> None:
    client = Client(worker.address, layer=1, max_num_tokens=64, session="wrong steps")
    slot = lambda: client.inputs_at + client.step % 2 * client.input_bytes  # noqa: E731

    def fails(reason: str) -> None:
        client.store(0, client.step)
        os.eventfd_write(client.doorbell, 1)
        with pytest.raises(Exception, match=reason):
            client.wait(client.step, 1)
        client.release(client.step)
        good.step()

    for head, reason in [
        ((5, 1), "expected at most 4 requests and 64 tokens"),
        ((1, 65), "expected at most 4 requests and 64 tokens"),
        ((2**63, 2**63), "expected at most 4 requests"),
        ((2**64 - 1, 1), "expected at most 4 requests"),
    ]:
        client.step += 1
        struct.pack_into("<QQQ", client.memory, slot(), client.step, *head)
        fails(reason)
    for ids, starts, reason in [
        ([1, 2, 3], [0, 2, 1], r"query_start_loc\[2\] = 1"),
        ([1, 2, 3], [1, 3], r"query_start_loc\[0\] = 1"),
        ([1, 2, 3], [0, 4], r"query_start_loc\[1\] = 4"),
        ([1, 2, 3], [0, -1, 3], r"query_start_loc\[1\] = -1"),
        ([1, 2, 3], [0, 2**62], r"query_start_loc\[1\]"),
        ([1, 1000], [0, 2], r"input_ids\[1\] = 1000"),
        ([-(2**63), 1], [0, 2], r"input_ids\[0\]"),
    ]:
        client.publish(ids, starts)
        fails(reason)
    client.close()


def test_random_words_in_a_region_during_service(worker: SpawnedWorker, good: GoodSession) -> None:
    """A client that rewrites its words, flags, heads and inputs all the time gets what it deserves, others their rows."""
    client = Client(worker.address, layer=1, max_num_tokens=64, session="random words", slots=4)
    memory = np.frombuffer(client.memory, np.uint64)
    seed = random.randrange(1 << 32)
    rng, stop = np.random.default_rng(seed), threading.Event()
    words = client.outputs_at // 8

    def scribble() -> None:
        small = np.array([0, 1, 2, 3, 63, 64, 65, 1 << 47, (1 << 64) - 1], np.uint64)
        while not stop.is_set():
            at = rng.integers(0, words, 200)
            memory[at] = rng.choice(small, 200)
            memory[rng.integers(0, words)] = rng.integers(0, 1 << 63)
            step = rng.integers(1, 1 << 20)
            for slot in range(4):
                memory[(client.inputs_at + slot * client.input_bytes) // 8 :][:3] = step + slot, 1, rng.integers(0, 64)
            memory[0] = step + 3
            os.eventfd_write(client.doorbell, 1)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        assert good.steps_for(1.5) > 10, f"seed {seed}"
    finally:
        stop.set()
        thread.join()
    client.sock.close()
    os.close(client.doorbell)
    assert good.slowest_s < 2, f"seed {seed}"


def test_holes_in_a_region_during_service(worker: SpawnedWorker, good: GoodSession) -> None:
    """Pages that a client gives back under the worker's hands are allocated again, and harm nobody."""
    fd = region()
    doorbell = os.eventfd(0)
    one = Peer(worker.address).say(hello(session="holes"), fd, doorbell)
    assert [one.hear()["type"], one.hear()["type"]] == ["Welcome", "Ready"]
    memory = mmap.mmap(fd, REGION_BYTES)
    libc = ctypes.CDLL(None)
    for step in range(1, 30):
        at = 576 + step % 2 * 12288
        struct.pack_into("<QQQ", memory, at, step, 1, 3)
        struct.pack_into("<3q", memory, at + 64, 1, 2, 3)
        struct.pack_into("<2q", memory, at + 64 + 12000, 0, 3)
        struct.pack_into("<Q", memory, 64, step - 1)
        struct.pack_into("<Q", memory, 0, step)
        os.eventfd_write(doorbell, 1)
        end = time.monotonic() + 5
        while struct.unpack_from("<Q", memory, 192 + step % 2 * 192)[0] & 0xFFFF != step:
            assert time.monotonic() < end
        assert libc.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(REGION_BYTES)) == 0
    good.step()
    one.close()
    memory.close()
    os.close(fd)
    os.close(doorbell)


# ---- too much of it -----------------------------------------------------------------------------------------------------


def test_a_doorbell_rung_in_a_tight_loop_starves_nobody(worker: SpawnedWorker, good: GoodSession) -> None:
    client = Client(worker.address, layer=1, max_num_tokens=64, session="rings")
    stop = threading.Event()

    def ring() -> None:
        while not stop.is_set():
            os.eventfd_write(client.doorbell, 1)

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        assert good.steps_for(1.0) > 10
    finally:
        stop.set()
        thread.join()
    assert good.slowest_s < 1
    client.close()


def test_sessions_that_always_want_more_starve_nobody(worker: SpawnedWorker, good: GoodSession) -> None:
    """Each takes its turn: between two steps of theirs one of the good session is served."""
    clients = [Client(worker.address, layer=1, max_num_tokens=5000, session=f"greedy {i}", slots=8) for i in range(2)]
    with announcing_for_ever(clients[0], 5000), announcing_for_ever(clients[1], 5000):
        assert good.steps_for(1.0) > 10
    assert good.slowest_s < 1
    for client in clients:
        client.close()


def test_a_client_that_never_reads_is_not_waited_for(worker: SpawnedWorker, good: GoodSession) -> None:
    """Thousands of StepFailed that nobody takes: the flags say it, and the worker goes on."""
    client = Client(worker.address, layer=1, max_num_tokens=64, session="deaf")
    for _ in range(2000):
        step = client.publish([-1])
        flag_at, end = client.flags_at + step % 2 * 8, time.monotonic() + 5
        while client.word(flag_at) != client.epoch << 48 | 1 << 47 | step:
            assert time.monotonic() < end
        client.release(step)
    good.step()
    client.close()
    assert good.slowest_s < 1


def test_connections_that_say_nothing(worker: SpawnedWorker, good: GoodSession) -> None:
    """600 of them: the oldest make room, a new client is served meanwhile, the rest are told to go within the limit."""
    with nothing_leaks(worker.pid), ExitStack() as opened:
        fds = resources(worker.pid)[0]
        silent = []
        for i in range(600):
            silent.append(Peer(worker.address))
            opened.callback(silent[-1].close)
            if i % 50 == 0:
                good.step()
        newcomer = Client(worker.address, layer=1, max_num_tokens=64, session="newcomer")
        assert resources(worker.pid)[0] < fds + 256 + 10
        newcomer.close()
        assert "this was the oldest" in silent[0].refusal()
        assert "expected an Ask or a Hello within 5 s" in silent[-1].refusal()
        good.step()


def test_a_worker_without_descriptors_left_goes_on(worker: SpawnedWorker, good: GoodSession) -> None:
    limits = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path(f"/proc/{worker.pid}/fd").iterdir())
    opened = []
    with nothing_leaks(worker.pid):
        try:
            resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            ticks = cpu_ticks(worker.pid)
            opened.extend(Peer(worker.address) for _ in range(100))
            assert "no descriptor left" in opened[-1].refusal()
            time.sleep(0.5)
            assert cpu_ticks(worker.pid) - ticks < 40  # of 100 a second: it does not spin
            good.step()
            # the first ones had a descriptor: their Hello brings two more, which there is no room for
            assert "descriptors" in opened[0].greet().refusal()
        finally:
            resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, limits)
            for one in opened:
                one.close()
    good.step()
    late = Peer(worker.address).say(ASK)
    assert late.hear()["type"] == "Facts"
    late.close()


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def test_many_bad_connections_leave_nothing_behind(worker: SpawnedWorker, good: GoodSession) -> None:
    bad_fds = [region(seals=0), region(allocate=0), os.eventfd(0), region()]
    with nothing_leaks(worker.pid):
        for i in range(300):
            one = Peer(worker.address)
            one.say(*[(b"junk",), (hello(), *bad_fds[:2]), (hello(), *bad_fds[1:3]), (ASK, bad_fds[0])][i % 4])
            one.refusal()
            one.close()
        for _ in range(50):  # good ones, broken off at every point
            for count in range(3):
                one = Peer(worker.address)
                if count:
                    one.greet(session="broken off")
                if count > 1:
                    assert one.hear()["type"] == "Welcome"
                one.close()
    for fd in bad_fds:
        os.close(fd)


def test_what_clients_do_wrong_does_not_fill_the_log(worker: SpawnedWorker, good: GoodSession) -> None:
    before = worker.log_path.stat().st_size
    for _ in range(250):
        one = Peer(worker.address).say(b"x" * 1000)
        one.refusal()
        one.close()
        one = Peer(worker.address).greet()
        assert one.hear()["type"] == "Welcome"
        one.close()
    assert worker.log_path.stat().st_size - before < 100_000
