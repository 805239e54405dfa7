"""Whose turn it is: lanes that always want more are served in rotation, and one that has nothing costs nobody a turn."""

from __future__ import annotations

import ctypes
import errno
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

import ple_offload
from checkpoint import tiny
from ple_offload import native
from ple_offload.worker import server, session
from ple_offload.worker.server import PleOffloadWorker, Served
from ple_offload.worker.session import Turns


class EagerLane:
    """Stands in for a Lane: `wants` steps are announced."""

    def __init__(self, wants: int) -> None:
        self.wants, self.rung_at_s, self._steps = wants, 0.0, count(1)

    def ready_step(self) -> int | None:
        return next(self._steps) if self.wants else None

    def has_more(self, step: int) -> bool:
        return step < self.wants

    def promised(self) -> int | None:
        return None


def test_lanes_that_always_want_more_are_served_in_rotation() -> None:
    turns, lanes = Turns(), [EagerLane(1000), EagerLane(1000), EagerLane(0), EagerLane(1000)]
    for lane in lanes:
        turns.ring(lane)
    served = []
    for _ in range(300):
        lane, _ = turns.next()
        served.append(lanes.index(lane))
        turns.ring(lanes[0])  # ringing more often gains nothing
        turns.ring(lanes[2])
    assert Counter(served) == {0: 100, 1: 100, 3: 100}
    assert served[:6] == [0, 1, 3, 0, 1, 3]


def test_a_lane_without_a_step_is_dropped() -> None:
    turns = Turns()
    turns.ring(EagerLane(0))
    assert turns.next() is None
    assert not turns


class PromisedLane(EagerLane):
    """A device will announce its step."""

    step = 1

    def promised(self) -> int | None:
        return self.step


def test_how_long_a_step_has_been_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    turns, lane = Turns(), PromisedLane(0)
    turns.ring(lane)
    assert turns.promised() == []
    assert turns.next() is None
    now += 0.5
    assert turns.promised() == [(lane, 0.5)]
    turns.ring(lane)  # a reader has released a slot; or a client rings for ever
    assert turns.next() is None
    assert turns.promised() == [(lane, 0.5)]
    lane.step += 1
    turns.ring(lane)
    assert turns.next() is None
    assert turns.promised() == [(lane, 0.0)]


@pytest.mark.parametrize(("seconds", "rehearsed", "woken"), [(0.0, 1, 1), (0.001, 1, 1), (0.1, 1, 0), (1.0, 0, 0)])
def test_what_is_done_for_a_step_that_is_on_its_way(seconds: float, rehearsed: int, woken: int) -> None:
    """Threads are kept awake for a moment; serving is rehearsed for as long as the step can be expected soon."""
    calls: list[str] = []
    turns = SimpleNamespace(next=lambda: None, promised=lambda: [("a lane", seconds)])
    worker = SimpleNamespace(
        _turns=turns, _rehearse=lambda _: calls.append("rehearse"), _wake_threads=lambda _: calls.append("wake")
    )
    assert not PleOffloadWorker._serve_next(worker)
    assert (calls.count("rehearse"), calls.count("wake")) == (rehearsed, woken)


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_rehearsal_goes_the_whole_way_now_and_then_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    now, gathered = 1000.0, []
    monkeypatch.setattr(server.time, "monotonic", lambda: now)
    path = tiny.write_default(tmp_path / "it")
    with ple_offload.open_table(path, 1, "file", threads=1) as table:
        worker = PleOffloadWorker([Served(path, {1: table})])
        monkeypatch.setattr(table, "gather_into", lambda *arguments: gathered.append(arguments))
        wish, first = SimpleNamespace(output="bf16"), SimpleNamespace(request=kind)
        first.layers = [wish]
        lane = SimpleNamespace(session=SimpleNamespace(first=first, tables=(table,)))
        worker._rehearse(lane)
        worker._rehearse(lane)
        assert len(gathered) == 1
        assert gathered[0][0].size == 0
        monkeypatch.undo()
        worker._next_rehearsal_s = 0
        worker._rehearse(lane)
        table.close()
        worker._next_rehearsal_s = 0
        worker._rehearse(lane)  # the step itself will tell
        worker._close()


def test_a_rehearsal_that_fails_in_an_unexpected_way_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a step: there it costs the step. A file of a network file system can become unreadable at any time."""

    def stale() -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    path = tiny.write_default(tmp_path / "it")
    with ple_offload.open_table(path, 1, "file", threads=1) as table:
        worker = PleOffloadWorker([Served(path, {1: table})])
        first = SimpleNamespace(request="tokens", layers=[SimpleNamespace(output="bf16")])
        monkeypatch.setattr(table.store, "check", stale)
        monkeypatch.setattr(table, "_next_check_s", 0.0)
        worker._rehearse(SimpleNamespace(session=SimpleNamespace(first=first, tables=(table,))))
        assert table._next_check_s > 0, "it came to the check"
        worker._close()


def test_the_workers_thread_sleeps_precisely_and_no_other() -> None:
    prctl, set_slack, get_slack = ctypes.CDLL(None).prctl, 29, 30  # linux/prctl.h

    def run() -> int:
        prctl(set_slack, ctypes.c_ulong(50_000), 0, 0, 0)
        server._sleep_precisely()
        return prctl(get_slack, 0, 0, 0, 0)

    before_ns = prctl(get_slack, 0, 0, 0, 0)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result(10) == 1000
    assert prctl(get_slack, 0, 0, 0, 0) == before_ns


def test_a_promise_that_is_not_kept_lets_the_worker_sleep_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was stopped, or failed between promise and step, must not keep a core busy; another promise renews."""
    now = 1000.0
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    turns, lane = Turns(), PromisedLane(0)
    lane.ready_step = lambda: None  # type: ignore[method-assign]
    turns.ring(lane)
    for seconds, sleeps in ((0.0, False), (59.0, False), (0.0, False), (59.0, False), (2.0, True), (100.0, True)):
        now += seconds
        if seconds == 59.0 and now < 1060:
            lane.step += 1
        turns.ring(lane)
        assert turns.next() is None
        assert (turns.patience_s(0.25) == 0.25) == sleeps, now
    lane.ready_step = lambda: 7  # type: ignore[method-assign]
    lane.has_more = lambda step: False  # type: ignore[method-assign]
    assert turns.next() == (lane, 7), "late, but it is kept"
    turns.ring(lane)
    lane.ready_step = lambda: None  # type: ignore[method-assign]
    assert turns.next() is None
    lane.promised = lambda: None  # type: ignore[method-assign]  # its rank has gone
    now += 1
    assert turns.next() is None
    assert turns.patience_s(0.25) == 0.25


def test_a_step_that_is_coming_behind_the_one_that_is_served_is_not_forgotten() -> None:
    """Two in flight: the doorbell of the second is heard before the first is served, and there is no other."""
    rank = SimpleNamespace(announced=1, coming=1, served=0, released=0)
    rank.hello = SimpleNamespace(tp_rank=0, slots=2)
    rank.next_step = lambda: rank.announced if rank.announced > rank.served else None
    lane = session.Lane(SimpleNamespace(), 0, ready=True, targets=[rank])
    turns = Turns()
    turns.ring(lane)
    rank.coming = 2
    turns.ring(lane)
    assert turns.next() == (lane, 1)
    rank.served = 1
    assert turns.next() is None
    rank.announced = 2  # by the device, which rings no doorbell
    assert turns.next() == (lane, 2)


@pytest.mark.parametrize(
    ("coming", "announced", "tokens", "cpus", "woken"),
    [
        (5, 4, 100, 4, [3]),
        (5, 4, 99, 4, []),
        (5, 5, 100, 4, []),
        (5, 4, 2**64 - 1, 4, [3]),
        (5, 4, 100, 3, []),  # they would have every core
    ],
)
def test_threads_are_woken_for_a_large_step_that_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, coming: int, announced: int, tokens: int, cpus: int, woken: list[int]
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(native, "wake", calls.append)
    rank = SimpleNamespace(coming=coming, announced=announced, expected_tokens=tokens)
    table = SimpleNamespace(rows_per_token=4, parallel_rows=400, threads=3)
    lane = SimpleNamespace(tp_rank_0=lambda: rank, session=SimpleNamespace(tables=(table,)))
    PleOffloadWorker._wake_threads(SimpleNamespace(_cpus=cpus), lane)
    assert calls == woken
