"""What a client does to its own region, and when, costs it at most its own step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine import Engine, all_nan, same
from ple_offload import Table
from ple_offload.errors import ConnectionLostError, StepError
from worker.faults.conftest import Worker

Start = Callable[..., Engine]
StartWorker = Callable[..., Worker]

# publish a step whose slot is not what the connector's own checks would let through
WRITE = """
from ple_offload.connector.remote import RemoteTransport
original = RemoteTransport.publish
def publish(self, step, num_reqs, num_tokens):
    slot = self.inputs(step)
    for name, index, value in writes:
        getattr(slot, name)[index] = value
    original(self, step, *(num_reqs, num_tokens) if head is None else head)
RemoteTransport.publish, engine.original = publish, original
"""
RESTORE = """
from ple_offload.connector.remote import RemoteTransport
RemoteTransport.publish = engine.original
"""
BIG = 1 << 62
HOSTILE = [
    ("not from 0", [("query_start_loc", 0, 1)], None, r"query_start_loc\[0\] = 1"),
    ("falls", [("query_start_loc", slice(0, 3), [0, 3, 2])], None, r"query_start_loc\[2\] = 2"),
    ("beyond the tokens", [("query_start_loc", 2, 5)], None, r"query_start_loc\[2\] = 5"),
    ("beyond everything", [("query_start_loc", 2, BIG)], None, rf"query_start_loc\[2\] = {BIG}"),
    ("negative", [("query_start_loc", 1, -BIG)], None, rf"query_start_loc\[1\] = -{BIG}"),
    ("negative at the end", [("query_start_loc", 2, -1)], None, r"query_start_loc\[2\] = -1"),
    ("bad id", [("input_ids", 2, 1000)], None, r"input_ids\[2\] = 1000: expected a token id from 0 to 999"),
    ("negative id", [("input_ids", 3, -1)], None, r"input_ids\[3\] = -1"),
    ("huge id", [("input_ids", 0, BIG)], None, rf"input_ids\[0\] = {BIG}"),
    ("bad context", [("ngram_context", (1, 0), -5)], None, r"ngram_context\[1, 0\] = -5"),
    ("too many tokens", [], (2, 4097), r"found step \d+ with 2 requests and 4097 tokens"),
    ("too many requests", [], (9, 4), r"found step \d+ with 9 requests and 4 tokens"),
    ("numbers that wrap", [], (BIG * 2 - 1, BIG * 3), "expected at most 8 requests"),
]


def test_hostile_numbers_fail_their_own_step(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """Each fails one step with what is wrong; the connection, and another session, go on."""
    worker = start_worker()
    engine, other = start_engine(worker.address), start_engine(worker.address, session="other")
    for name, writes, head, message in HOSTILE:
        engine.run(WRITE, writes=writes, head=head)
        step = engine.prepare([1, 2, 3, 4], [0, 2, 4])
        assert all_nan(engine.take()), name
        with pytest.raises(StepError, match=message):
            engine.check(step)
        engine.release()
        engine.run(RESTORE)
        for rank in (engine, other):
            rank.prepare([5, 6])
            assert same(rank.take(), table.lookup([5, 6])), name
            rank.release()


def test_scribbling_while_the_worker_reads(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """A thread rewrites the slot all the time. The worker survives; each row is that of one of the values it may have
    read, or the step fails; the other session never notices."""
    worker = start_worker()
    engine, other = (
        start_engine(worker.address, limits={"hard_cap_s": 0.3}),
        start_engine(worker.address, session="other"),
    )
    scribble = """
import threading, numpy as np
stop = threading.Event()
slots = list(connector._transport._inputs)
heads = list(connector._transport._heads)
def work():
    generator = np.random.default_rng(0)
    while not stop.is_set():
        for slot, head in zip(slots, heads):
            slot.input_ids[:4096] = 7 if generator.random() < 0.5 else 8
            slot.ngram_context[:] = 7
            kind = generator.integers(4)
            if kind == 0: slot.query_start_loc[:3] = generator.integers(-5, 5000, 3)
            if kind == 1: head[1:3] = generator.integers(0, 1 << 63, 2, dtype=np.uint64)
            if kind == 2: slot.input_ids[generator.integers(4096)] = generator.integers(-(1 << 60), 1 << 60)
            if kind == 3: slot.query_start_loc[:3] = [0, 100, 4000]; head[1:3] = 2, 4000
engine.stop, engine.thread = stop, threading.Thread(target=work, daemon=True)
engine.thread.start()
"""
    engine.prepare([7] * 4000, [0, 100, 4000])
    engine.take()
    engine.release()
    engine.run(scribble)
    served = failed = 0
    possible = {row.tobytes() for row in np.concatenate([_rows(table, first) for first in (7, 8)])}
    for _ in range(30):
        try:
            step = engine.prepare([7] * 4000, [0, 100, 4000])
            rows = engine.take()
            engine.check(step)
            served += 1
            assert {row.tobytes() for row in rows} <= possible
        except ConnectionLostError:  # its step was made shorter than it waits for
            engine.run("engine.stop.set(); engine.thread.join()")
            engine.reconnect()
            engine.run(scribble)
            continue
        except StepError:
            failed += 1
        engine.release()
        other.prepare([5, 6])
        assert same(other.take(), table.lookup([5, 6]))
        other.release()
    assert served
    assert failed
    engine.run("engine.stop.set(); engine.thread.join()")
    engine.reconnect()
    engine.prepare([1, 2])
    assert same(engine.take(), table.lookup([1, 2]))


def _rows(table: Table, first: int) -> np.ndarray:
    """Every row that a token can have after tokens 7 and 8."""
    return np.concatenate([table.lookup([first], ngram_context=[[a, b]]) for a in (7, 8) for b in (7, 8)])
