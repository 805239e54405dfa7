"""Medians with intervals that assume nothing of how times are spread, and ratios taken round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

LEVEL = 0.95


def order_interval(count: int, level: float = LEVEL) -> tuple[int, int]:
    """Indices (low, high) into `count` sorted values between which the median lies with at least that probability.

    By the binomial distribution of how many values are below the median. Fewer than six values can't promise 95 %: then the
    interval is all of them.
    """
    low, below = 0, 0.0
    for i in range(count // 2):
        below += math.comb(count, i) / 2**count
        if below > (1 - level) / 2:
            break
        low = i
    return low, count - 1 - low


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median `p50`, its interval `low` to `high`, quartiles, `p99` and how many: `n`."""
    ordered = np.sort(np.array(values, float))
    low, high = order_interval(ordered.size)
    p25, p50, p75, p99 = np.percentile(ordered, [25, 50, 75, 99])
    found = {"p50": p50, "low": ordered[low], "high": ordered[high], "p25": p25, "p75": p75, "p99": p99}
    return {key: round(float(value), 4) for key, value in found.items()} | {"n": ordered.size}


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """`summary` of values / base, each pair of one round."""
    return summary(np.array(values, float) / np.array(base, float))


def fastest(times: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    """The one of `names` that was measured and has the lowest median; None when none was."""
    measured = [name for name in names if times.get(name)]
    return min(measured, key=lambda name: float(np.median(times[name])), default=None)
