"""Which contenders of `lookup` are compared with which, round by round. Loads no torch."""

from __future__ import annotations

from typing import Any

from intervals import fastest, ratio

UVA = ("uva", "uva fused")
REQUESTS = ("", " tokens")  # endings of our contenders' names


def comparisons(figure: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """From microseconds, contender -> [rounds]: how many times longer than the better of the plain GPU gathers, and `auto`
    than the better of its two routes (where all three were measured).
    """
    found: dict[str, Any] = {}
    base = fastest(times, UVA)
    if base is not None:
        others = {name: ratio(values, times[base]) for name, values in times.items() if name != base}
        found[f"{figure}_over_uva"] = {"base": base, **others}
    for request in REQUESTS:
        both, auto = [f"direct{request}", f"staged{request}"], f"auto{request}"
        better = fastest(times, both)
        if better is not None and all(times.get(name) for name in (auto, *both)):
            found.setdefault(f"{figure}_regret", {})[auto] = {"better": better, **ratio(times[auto], times[better])}
    return found
