"""Random interleavings over two sessions of one daemon, every row checked: short by default, 100,000 steps with `-m long`.

STRESS_SEED=n repeats the actions of a run that failed, STRESS_STEPS=n changes how many steps there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.rig import make
from stress.machine import CALM, FAULTS, Machine, WrongError

# read here: the tests themselves run in a clean environment
SEED = int(os.environ["STRESS_SEED"]) if "STRESS_SEED" in os.environ else None
STEPS = int(os.environ["STRESS_STEPS"]) if "STRESS_STEPS" in os.environ else None
MEMORY_KIB = 4 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("stress") / "checkpoint", num_layers=2).path


@pytest.fixture
def machine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    seed = int(getattr(request, "param", 0)) if SEED is None else SEED
    with Machine(checkpoint, seed) as running:
        yield running


def run_and_compare_what_is_held(machine: Machine, steps: int) -> None:
    """The first half with every fault; the second ends no process, so what they hold can be compared."""
    machine.run(steps // 2)
    machine.run(max(200, steps // 10), faults=False)
    machine.settle()
    before = machine.held()
    machine.run(steps // 2, faults=False)
    machine.settle()
    after = machine.held()
    print(f"seed {machine.seed}: {machine.steps} steps, {machine.rows_checked} rows, {machine.counts}")
    print(f"(descriptors, threads, KiB) before {before}, after {after}")
    for name in before:
        assert after[name][:2] == before[name][:2], (machine.seed, name, before, after)
        assert after[name][2] <= before[name][2] + MEMORY_KIB, (machine.seed, name, before, after)
    assert machine.rows_checked > steps


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_few_hundred_steps(machine: Machine) -> None:
    run_and_compare_what_is_held(machine, STEPS or 600)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [int(time.time())], indirect=True, ids=["a new seed"])
def test_a_hundred_thousand_steps(machine: Machine) -> None:
    run_and_compare_what_is_held(machine, STEPS or 100_000)
    assert set(machine.counts) == {*CALM, *FAULTS}


BREAKS = {
    "rows of the step before": """
import numpy as np
transport, last = connector._transport, {}
original = transport.deliver
def deliver(layer, step, num_tokens, out):
    original(layer, step, num_tokens, out)
    mine = out.copy()
    before = last.get(layer)
    if before is not None and len(before) >= len(mine):
        out[:] = before[:len(mine)]
    last[layer] = mine
transport.deliver = deliver
""",
    "zeros and no error": """
from ple_offload.errors import PleOffloadError
transport = connector._transport
original = transport.deliver
def deliver(layer, step, num_tokens, out):
    try:
        original(layer, step, num_tokens, out)
    except PleOffloadError:
        out[:] = 0
transport.deliver = deliver
""",
    "one value now and then": """
import random
transport = connector._transport
original = transport.deliver
def deliver(layer, step, num_tokens, out):
    original(layer, step, num_tokens, out)
    if len(out) and random.random() < 0.05:
        out[-1, -1] += 1
transport.deliver = deliver
""",
    "a failure without NaN": """
original = connector._fail
def fail(step, error):
    original(step, error)
    step.error = None
connector._fail = fail
""",
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_transport_is_caught(checkpoint: Path, broken: str) -> None:
    """The negative control: the checker sees each of these within a few hundred steps."""
    found = r"seed 3, step \d+: WrongError: .*The last ones: "
    with Machine(checkpoint, 3, break_engine=BREAKS[broken]) as running, pytest.raises(WrongError, match=found):
        running.run(3000, faults=False)
