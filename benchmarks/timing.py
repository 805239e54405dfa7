"""Times of several ways to do one thing, taken in turns, so that whatever the machine does hits all of them alike.

A round gives every contender one block of calls in a row, in an order drawn anew. Before a block begins the threads of the
one before have gone to sleep, and a block that other work on the machine disturbed is repeated (calm.py). The first calls
of a block are not counted; a block yields its median. Ratios are taken within a round, medians and quartiles over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from calm import Calm

T = TypeVar("T")
# makes one call ready for an input, untimed, and returns the call
Contender = Callable[[T], Callable[[], object]]


@dataclass(frozen=True)
class Plan:
    """How often: rounds x blocks of `calls` timed calls after `warm_calls` that are not."""

    rounds: int
    calls: int
    warm_calls: int
    call_pause_s: float = 0.0  # before every call: how long the caller was busy elsewhere


def interleave(
    contenders: Mapping[str, Contender[T]], inputs: Callable[[], T], plan: Plan, calm: Calm
) -> dict[str, list[float]]:
    """Median microseconds of each block: contender -> [rounds]. Every call gets a new input."""
    rng = np.random.default_rng(11)
    names = list(contenders)
    blocks: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(plan.rounds):
        for name in rng.permutation(names):
            blocks[name].append(calm.undisturbed(partial(_block_us, contenders[name], inputs, plan)))
    return blocks


def _block_us(contender: Contender[T], inputs: Callable[[], T], plan: Plan) -> float:
    calls = [contender(inputs()) for _ in range(plan.warm_calls + plan.calls)]
    times = [_time_us(call, plan.call_pause_s) for call in calls]
    return float(np.median(times[plan.warm_calls :]))


def _time_us(call: Callable[[], object], pause_s: float) -> float:
    if pause_s:
        time.sleep(pause_s)
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def spread(values: list[float] | np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    p25, p50, p75 = np.percentile(values, [25, 50, 75])
    return {"p50": round(float(p50), 3), "p25": round(float(p25), 3), "p75": round(float(p75), 3)}


def ratio(slower: list[float], faster: list[float]) -> dict[str, float]:
    """How many times longer `slower` takes, round by round."""
    return spread(np.array(slower) / np.array(faster))
