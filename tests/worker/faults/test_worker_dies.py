"""The worker dies, stops or dawdles: NaN and an exception within the limits, never zeros, never an earlier step's rows."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from engine import Engine, all_nan, same
from faulty import PLACES, Fault
from ple_offload import Table
from ple_offload.errors import ConnectionLostError, StepError
from worker.faults.conftest import BIG, Worker, is_stopped, regions

Start = Callable[..., Engine]
StartWorker = Callable[..., Worker]
IDS = [i % 900 for i in range(BIG)]


def one_good_step(engine: Engine, table: Table, ids: list[int]) -> None:
    step = engine.prepare(ids)
    found = engine.take()
    engine.check(step)
    engine.release()
    assert same(found, table.lookup(ids))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "ready"])
def test_it_dies_in_a_step(place: str, start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """The first step is served, in the second the worker dies: all of its rows are NaN, the next call raises, and after
    `reconnect` a fresh worker serves."""
    nth = {"block": 3, "flag": 3}.get(place, 2)  # the first step is one block, so this is in the second one's second
    worker = start_worker(Fault(place, "kill", nth))
    engine = start_engine(worker.address)
    one_good_step(engine, table, [1, 2, 3])
    step = engine.prepare(IDS)
    started = time.monotonic()
    assert all_nan(engine.take())
    with pytest.raises(ConnectionLostError, match=f"worker {worker.pid} .*{worker.log}.*it died, or was ended"):
        engine.check(step)
    engine.release()
    with pytest.raises(ConnectionLostError, match=str(worker.pid)):
        engine.prepare([1])
    assert time.monotonic() - started < 1.0  # told by the socket, not by a limit
    assert worker.process.exit_status() == -signal.SIGKILL
    engine.reconnect(start_worker().address)
    one_good_step(engine, table, IDS)
    engine.disconnect(limit_s=1)


def test_the_layer_raises_in_eager_mode(start_worker: StartWorker, start_engine: Start) -> None:
    engine = start_engine(start_worker(Fault("doorbell", "kill")).address)
    engine.prepare([1, 2, 3])
    with pytest.raises(ConnectionLostError):
        engine.forward()


def test_it_dies_before_ready(start_worker: StartWorker, start_engine: Start) -> None:
    worker = start_worker(Fault("ready", "kill"))
    engine = start_engine()
    with pytest.raises(ConnectionLostError, match=f"worker at {worker.address}"):
        engine.connect(worker.address, max_num_tokens=8, max_num_reqs=1)
    assert regions(engine.pid) == 0


def test_it_dies_idle(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """A new worker at the same address serves after `reconnect`; step numbers go on."""
    worker = start_worker()
    engine = start_engine(worker.address)
    one_good_step(engine, table, [1, 2, 3])
    worker.kill()
    with pytest.raises(ConnectionLostError, match=str(worker.log)):
        engine.prepare([1])
    start_worker(address=worker.address)
    engine.reconnect()
    assert engine.prepare([4, 5]) == 3
    assert same(engine.take(), table.lookup([4, 5]))
    engine.release()
    assert regions(engine.pid) == 1


def test_reconnecting_to_nobody_fails_and_can_be_tried_again(
    start_worker: StartWorker, start_engine: Start, table: Table
) -> None:
    worker = _listening(start_worker, start_engine)
    engine = start_engine(worker.address, limits={"connect_s": 0.1})
    worker.kill()
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match=r"connecting failed within 0\.1 s"):
            engine.reconnect()
        with pytest.raises(ConnectionLostError):
            engine.prepare([1, 2, 3])
    engine.reconnect(_listening(start_worker, start_engine).address)
    one_good_step(engine, table, [1, 2, 3])


def _listening(start_worker: StartWorker, start_engine: Start) -> Worker:
    """A worker that has been connected to."""
    worker = start_worker()
    start_engine(worker.address, session="somebody else").disconnect()
    return worker


def test_stopped_in_a_step_then_woken(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """Alive but silent: given up after no_progress_s. What it writes when it wakes, nobody reads."""
    worker = start_worker(Fault("block", "stop", 3))  # after the first block's flag of the second step
    engine = start_engine(worker.address)
    one_good_step(engine, table, [1, 2, 3])
    step = engine.prepare(IDS)
    started = time.monotonic()
    assert all_nan(engine.take())
    assert 1.0 <= time.monotonic() - started < 2.5
    with pytest.raises(ConnectionLostError, match=rf"worker {worker.pid} .*1 s \(limit no_progress_s\) in step 2"):
        engine.check(step)
    assert is_stopped(worker.pid)
    engine.reconnect(start_worker().address)
    assert regions(engine.pid) == 1  # the old one is not even mapped
    other = [(7 * i) % 900 for i in range(BIG)]
    step = engine.prepare(other)
    worker.process.kill(signal.SIGCONT)
    found = engine.take()
    # it has finished the old step once it serves a newcomer
    one_good_step(start_engine(worker.address), table, [9])
    engine.check(step)
    engine.release()
    assert same(found, table.lookup(other))
    one_good_step(engine, table, IDS)


def test_stopped_before_it_answers(start_worker: StartWorker, start_engine: Start) -> None:
    """Who connects to a worker that is alive but silent is told so after answer_s."""
    worker = _listening(start_worker, start_engine)
    worker.kill(signal.SIGSTOP)
    engine = start_engine()
    started = time.monotonic()
    with pytest.raises(ConnectionLostError, match=r"waited 0\.3 s \(limit answer_s\) for its facts"):
        engine.connect(worker.address, max_num_tokens=8, max_num_reqs=1, limits={"answer_s": 0.3})
    assert time.monotonic() - started < 1.5


def test_closing_beside_a_stopped_worker_is_quick(start_worker: StartWorker, start_engine: Start) -> None:
    worker = _listening(start_worker, start_engine)
    engine = start_engine(worker.address)
    worker.kill(signal.SIGSTOP)
    engine.prepare([1, 2, 3])
    engine.disconnect(limit_s=1)
    assert regions(engine.pid) == 0


def test_slow_but_making_progress(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """Each block takes longer than half of no_progress_s. Neither who waits for the step of three blocks gives the worker
    up, nor who waits behind it for a step of his own, to whom only the worker's heartbeat speaks."""
    worker = start_worker(Fault("block", "slow", seconds=0.4))
    limits = {"no_progress_s": 0.7}
    engine = start_engine(worker.address, limits=limits)
    behind = start_engine(worker.address, limits=limits, session="behind")
    step = engine.prepare(IDS)
    started = time.monotonic()
    one_good_step(behind, table, [1, 2, 3])
    assert time.monotonic() - started >= 1.2
    assert same(engine.take(), table.lookup(IDS))
    engine.check(step)
    engine.release()
    started = time.monotonic()
    one_good_step(engine, table, IDS)
    assert time.monotonic() - started >= 1.2


def test_the_hard_cap_ends_what_makes_progress_for_too_long(start_worker: StartWorker, start_engine: Start) -> None:
    engine = start_engine(
        start_worker(Fault("block", "slow", seconds=0.4)).address, limits={"no_progress_s": 5.0, "hard_cap_s": 0.2}
    )
    step = engine.prepare(IDS)
    assert all_nan(engine.take())
    with pytest.raises(ConnectionLostError, match=r"step 1 not delivered within 0\.2 s \(limit hard_cap_s\)"):
        engine.check(step)


def test_a_failed_step_fails_alone(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """The worker reports a bad id: that step is NaN, the connection goes on."""
    engine = start_engine(start_worker().address)
    step = engine.prepare([1, 5000])
    assert np.isnan(engine.take().astype(np.float32)).all()
    with pytest.raises(StepError, match=rf"step {step} .*input_ids\[1\] = 5000"):
        engine.check(step)
    engine.release()
    one_good_step(engine, table, [1, 2])
