"""Whose turn it is: lanes that always want more are served in rotation, and one that has nothing costs nobody a turn."""

from __future__ import annotations

from collections import Counter
from itertools import count

from ple_offload.worker.session import Turns


class EagerLane:
    """Stands in for a Lane: `wants` steps are announced."""

    def __init__(self, wants: int) -> None:
        self.wants, self.rung_at_s, self._steps = wants, 0.0, count(1)

    def ready_step(self) -> int | None:
        return next(self._steps) if self.wants else None

    def has_more(self, step: int) -> bool:
        return step < self.wants

    def is_promised(self) -> bool:
        return False


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
