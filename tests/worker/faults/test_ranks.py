"""A GPU worker's process is killed: its TP group is told within the limits, everybody else goes on, it can come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from engine import Engine, same
from faulty import Fault
from ple_offload import Table
from ple_offload.errors import ConnectionLostError
from worker.faults.conftest import SHAPE, Worker, is_stopped, regions, wait_until

Start = Callable[..., Engine]
StartWorker = Callable[..., Worker]
Group = dict[tuple[int, int], Engine]


def start_group(start_engine: Start, address: str, dp_size: int, tp_size: int, **config: object) -> Group:
    """All ranks of an engine, by (DP rank, TP rank)."""
    group = {(dp, tp): start_engine() for dp in range(dp_size) for tp in range(tp_size)}
    for (dp, tp), engine in group.items():
        begin_connect(engine, address, dp, tp, dp_size, tp_size, **config)
    for engine in group.values():
        engine.result()
    return group


def begin_connect(
    engine: Engine, address: str, dp: int, tp: int, dp_size: int, tp_size: int, **config: object
) -> Engine:
    ranks = {"dp_rank": dp, "tp_rank": tp, "dp_size": dp_size, "tp_size": tp_size}
    return engine.begin("connect", address, **{**SHAPE, **ranks, **config})


def step_of(ranks: list[Engine], table: Table, ids: list[int]) -> int:
    """One step of the TP ranks of a DP rank: all get its rows, and call it by the same number."""
    numbers = {engine.prepare(ids) for engine in ranks}
    for engine in ranks:
        assert same(engine.take(), table.lookup(ids))
        engine.check()
        engine.release()
    assert len(numbers) == 1
    return numbers.pop()


def steps_until_told(ranks: list[Engine]) -> None:
    """Steps until one raises: the news travels while the first of them are served, or not."""
    for _ in range(100):
        for engine in ranks:
            engine.prepare([4])
            engine.take()
            engine.check()
            engine.release()
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_with_a_batch_in_flight(
    victim: int, start_worker: StartWorker, start_engine: Start, table: Table
) -> None:
    worker = start_worker(Fault("block", "slow", nth=1, seconds=0.01))
    group = start_group(start_engine, worker.address, 2, 2, session="first")
    other = start_engine(worker.address, session="second")
    lane_0, lane_1 = ([group[dp, 0], group[dp, 1]] for dp in (0, 1))
    for _ in range(3):
        step_of(lane_0, table, [1, 2, 3])
    step_of(lane_1, table, [4])
    for engine in lane_0:
        engine.prepare(list(range(500)))
    lane_0[victim].kill()
    # everybody else is served
    step_of(lane_1, table, [5, 6])
    step_of([other], table, [7, 8])
    # its group is told, by the rank that is left and with the next call at the latest
    survivor = lane_0[1 - victim]
    started = time.monotonic()
    rows = survivor.take()
    assert same(rows, table.lookup(list(range(500)))) or bool((rows != rows).all())
    survivor.release()
    with pytest.raises(ConnectionLostError, match=f"TP rank {victim} of DP rank 0 has gone"):
        steps_until_told([survivor])
    assert time.monotonic() - started < 2.0
    # a new process takes its place; the group counts on from where the survivor is
    lane_0[victim] = start_engine()
    begin_connect(lane_0[victim], worker.address, 0, victim, 2, 2, session="first")
    survivor.begin("reconnect").result()
    lane_0[victim].result()
    assert step_of(lane_0, table, [9, 10, 11]) >= 6
    step_of(lane_1, table, [12])
    step_of([other], table, [13])


def test_a_rank_that_waits_is_told_when_tp_rank_0_dies(start_worker: StartWorker, start_engine: Start) -> None:
    worker = start_worker(Fault("doorbell", "stop"))
    group = start_group(start_engine, worker.address, 1, 2, limits={"no_progress_s": 30.0})
    for engine in group.values():
        engine.prepare([1, 2, 3])
    waiting = group[0, 1].begin("take")
    wait_until(lambda: is_stopped(worker.pid))
    group[0, 0].kill()
    worker.kill(signal.SIGCONT)  # it serves the step first, or hears of the death first: either is right
    started = time.monotonic()
    waiting.result()
    assert time.monotonic() - started < 1.0
    group[0, 1].release()
    with pytest.raises(ConnectionLostError, match="TP rank 0 of DP rank 0 has gone"):
        steps_until_told([group[0, 1]])


def test_a_rank_that_publishes_nothing_may_leave_first(
    start_worker: StartWorker, start_engine: Start, table: Table
) -> None:
    """TP rank 1 says goodbye: TP rank 0 is served on. When TP rank 1 comes again, the group begins anew."""
    worker = start_worker()
    group = start_group(start_engine, worker.address, 1, 2)
    zero, one = group[0, 0], group[0, 1]
    assert step_of([zero, one], table, [1]) == 1
    one.disconnect()
    assert step_of([zero], table, [2]) == 2
    assert step_of([zero], table, [3]) == 3
    begin_connect(one, worker.address, 0, 1, 1, 2)
    with pytest.raises(ConnectionLostError, match="TP rank 1 of DP rank 0 has gone or connected anew"):
        steps_until_told([zero])
    zero.begin("reconnect").result()
    one.result()
    numbers = {zero.run("result = connector._step"), one.run("result = connector._step")}
    assert len(numbers) == 1
    step_of([zero, one], table, [5])


def test_goodbye_of_tp_rank_0_ends_the_group(start_worker: StartWorker, start_engine: Start) -> None:
    """Nobody would publish for the others: they are not left waiting for the hard cap."""
    group = start_group(start_engine, start_worker().address, 1, 2)
    group[0, 1].prepare([1, 2])
    group[0, 0].disconnect()
    started = time.monotonic()
    rows = group[0, 1].take()
    assert bool((rows != rows).all())
    assert time.monotonic() - started < 1.0
    with pytest.raises(ConnectionLostError, match="TP rank 0 of DP rank 0 has gone"):
        group[0, 1].check()


def test_an_engine_starts_again_under_its_name(start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """A new process has counted no steps and made no connections before; the worker serves it like a first one."""
    worker = start_worker()
    for _ in range(3):
        engine = start_engine(worker.address, session="the engine")
        assert step_of([engine], table, [1, 2, 3]) == 1
        engine.kill()
        engine.exit_status()


def test_a_rank_is_killed_before_the_session_is_ready(
    start_worker: StartWorker, start_engine: Start, table: Table
) -> None:
    worker = start_worker()
    first, second, third = start_engine(), start_engine(), start_engine()
    begin_connect(first, worker.address, 0, 0, 1, 2)
    wait_until(lambda: regions(worker.pid) == 1)
    begin_connect(second, worker.address, 0, 1, 1, 3)  # does not belong here: refused, and the first goes on waiting
    with pytest.raises(ConnectionLostError, match="expected tp_size"):
        second.result()
    begin_connect(second, worker.address, 0, 0, 1, 2)  # the rank is taken
    with pytest.raises(ConnectionLostError, match="found two"):
        second.result()
    first.kill()
    first.exit_status()
    begin_connect(second, worker.address, 0, 0, 1, 2)
    begin_connect(third, worker.address, 0, 1, 1, 2)
    second.result()
    third.result()
    step_of([second, third], table, [1, 2, 3])
