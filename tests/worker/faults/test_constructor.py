"""A connector whose constructor fails, at whatever step, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

from engine import Engine
from worker.faults.conftest import Worker
from worker.faults.constructor_steps import TAKES


def test_it_fails_at_every_step(start_worker: Callable[..., Worker], start_engine: Callable[..., Engine]) -> None:
    """No descriptor, map or registered layer is left, and the worker takes the same rank again each time."""
    source = "from worker.faults.constructor_steps import run; result = run(address)"
    steps = start_engine().run(source, address=start_worker().address)
    assert {name for _, name in TAKES} == set(steps)
