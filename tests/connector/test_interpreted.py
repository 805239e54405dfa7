"""Every GPU route from `prepare_forward` to `check`, against a real worker, with the kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="GPU routes need triton (extra `cuda`)")

from connector.interpreted import BORDER, Gpu, Model
from connector.rig import Inputs, Made, make, random_inputs
from ple_offload import cuda, open_table
from ple_offload.connector import direct
from ple_offload.connector.drain_triton import Drain
from ple_offload.errors import StepError, StoreError, UsageError
from ple_offload.worker.spawn import SpawnedWorker

ROUTES = ["inline", "direct", "staged", "auto"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("it"), "F8_E4M3", num_layers=2)


@pytest.fixture(scope="module")
def worker(made: Made) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(made.path, tier="file", threads=1) as started:
        yield started


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu(monkeypatch)
    before = cuda.set_driver(found.driver)
    yield found
    cuda.set_driver(before)


@pytest.fixture
def model(gpu: Gpu, made: Made, worker: SpawnedWorker) -> Iterator[Callable[..., Model]]:
    opened: list[Any] = []

    def start(route: str, **options: Any) -> Model:
        if route == "inline":
            tables = {t.layer: open_table(made.path, t.layer, "file", threads=1) for t in made.spec.tables}
            opened.extend(tables.values())
            opened.append(Model(made, "inline", "direct", tables=tables, **options))
        else:
            opened.append(Model(made, worker.address, route, **options))
        return opened[-1]

    yield start
    for one in reversed(opened):
        one.close()
    assert gpu.driver.in_use() == []


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("route", ROUTES)
def test_rows_of_every_size(model: Callable[..., Model], rng: np.random.Generator, route: str) -> None:
    one = model(route)
    for tokens, reqs, padded in (
        (1, 1, 1),
        (5, 3, 8),
        (16, 2, 16),
        (17, 2, 20),
        (64, 8, 64),
        (3, 2, 40),
        (0, 1, 4),
        (0, 1, 0),
    ):
        inputs = random_inputs(rng, tokens, reqs, padded=padded)
        assert one.right(one.run(inputs), inputs), (tokens, padded)


# ---- forwards that break off -------------------------------------------------------------------------------------------


def break_off(one: Model, padded: int) -> None:
    """A forward that ends in every layer between its two ops, as one that runs out of memory does."""
    for index in range(len(one.layers)):
        one.connector.start(index, one.ids[:padded].clone(), one.starts, one.context)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [BORDER, BORDER + 1])
def test_a_forward_that_broke_off_leaves_no_rows_to_the_next_step(
    model: Callable[..., Model], rng: np.random.Generator, route: str, tokens: int
) -> None:
    one = model(route)
    one.prepare(random_inputs(rng, BORDER, 2))
    break_off(one, BORDER)
    one.connector.release_outputs()
    inputs = random_inputs(rng, tokens, 2)
    assert one.right(one.run(inputs), inputs)


@pytest.mark.parametrize(
    ("tokens", "capturing", "forks"), [(15, True, False), (16, True, True), (16, False, False), (64, False, True)]
)
def test_many_tokens_go_on_a_side_stream_that_the_forward_joins(
    model: Callable[..., Model],
    gpu: Gpu,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    capturing: bool,
    forks: bool,
) -> None:
    """In eager mode from more tokens on: to fork takes the host longer than few tokens take the GPU."""
    monkeypatch.setattr(direct, "EAGER_FORK_TOKENS", 64)
    one = model("inline")
    inputs = random_inputs(rng, tokens, 2)
    step = one.prepare(inputs)
    side = one.connector._route._side
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    gpu.main.waited_for.clear()
    found = one.forward(tokens)
    assert (side.waited_for, gpu.main.waited_for) == (([gpu.main] * 2, [side] * 2) if forks else ([], []))  # two layers
    one.connector.check(step)
    assert one.right(found, inputs)


@pytest.mark.parametrize("route", ["inline", "auto"])
def test_memory_of_a_forward_that_broke_off_is_given_back_behind_what_writes_it(
    model: Callable[..., Model],
    gpu: Gpu,
    rng: np.random.Generator,
    route: str,
) -> None:
    one = model(route)
    one.prepare(random_inputs(rng, 5, 2))
    break_off(one, 5)
    gpu.main.waited_for.clear()
    one.prepare(random_inputs(rng, 5, 2))
    assert len(gpu.main.waited_for) == 1


# ---- whose error it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [BORDER, BORDER + 4])
@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_steps_in_flight_the_one_with_the_bad_id_fails(
    model: Callable[..., Model], rng: np.random.Generator, route: str, tokens: int, bad: int
) -> None:
    """Both have run when the first one is asked for."""
    one = model(route)
    steps, found = [], []
    all_inputs = [random_inputs(rng, tokens, 2) for _ in range(2)]
    all_inputs[bad].ids[3] = 1000
    for inputs in all_inputs:
        steps.append(one.prepare(inputs))
        if one.asks_worker(tokens):
            one.await_flags(steps[-1], tokens)
        found.append(one.forward(tokens))
    good = 1 - bad
    one.connector.check(steps[good]) if good == 0 else None
    with pytest.raises(StepError, match=r"input_ids\[3\]"):
        one.connector.check(steps[bad])
    one.connector.check(steps[good])
    assert one.right(found[good], all_inputs[good])
    assert all(bool(values.isnan().any()) for values in found[bad])
    for _ in steps:
        one.connector.release_outputs()
    assert one.right(one.run(all_inputs[good]), all_inputs[good])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("counted", [False, True])
def test_what_a_dummy_brings_is_no_error_of_the_next_step(
    model: Callable[..., Model], rng: np.random.Generator, route: str, counted: bool
) -> None:
    one = model(route)
    inputs = random_inputs(rng, 10, 2)
    one.ids.fill_(-1)
    one.starts.fill_(10)
    one.starts[0] = 0
    if counted:
        one.connector.prepare_forward(1, 10, dummy_run=True)
    else:
        one.connector.signal_dummy_outputs(10)
    one.forward(10)
    one.connector.check()
    one.connector.release_outputs()
    assert one.right(one.run(inputs), inputs)


# ---- what the forward brings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["inline", "auto"])
def test_a_forward_with_more_ids_than_a_step_has_is_refused(
    model: Callable[..., Model], rng: np.random.Generator, route: str
) -> None:
    one = model(route)
    one.prepare(random_inputs(rng, 5, 2))
    with pytest.raises(UsageError, match="expected at most 64 ids in the forward, found 128"):
        one.layers[0](torch.zeros((128, 1)), torch.zeros(128, dtype=torch.int32), one.starts, one.context)


@pytest.mark.parametrize("route", ["inline", "auto"])
def test_as_many_ids_as_hidden_states(model: Callable[..., Model], rng: np.random.Generator, route: str) -> None:
    one = model(route)
    one.prepare(random_inputs(rng, 5, 2))
    with pytest.raises(UsageError, match="expected as many ids as hidden states, found 5 and 8"):
        one.layers[0](torch.zeros((8, 1)), one.ids[:5], one.starts, one.context)


@pytest.mark.parametrize("route", ROUTES)
def test_a_dummy_is_refused_where_a_prepared_step_could_get_its_zeros(
    model: Callable[..., Model], rng: np.random.Generator, route: str
) -> None:
    one = model(route)
    inputs = random_inputs(rng, 20, 2)
    step = one.prepare(inputs)
    with pytest.raises(UsageError, match=rf"step {step} is in flight"):
        one.connector.signal_dummy_outputs(20)
    if one.asks_worker(20):
        one.await_flags(step, 20)
    assert one.right(one.forward(20), inputs)


# ---- files that change -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["inline", "direct", "auto"])
def test_a_file_that_changed_in_place_fails_the_steps(
    gpu: Gpu,
    tmp_path: Path,
    rng: np.random.Generator,
    route: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(tmp_path / "it", "F8_E4M3", num_layers=2)
    inputs = random_inputs(rng, 5, 2)
    with contextlib.ExitStack() as stack:
        if route == "inline":
            tables = {t.layer: stack.enter_context(open_table(made.path, t.layer, "file")) for t in made.spec.tables}
            one = Model(made, "inline", "direct", tables=tables)
        else:
            one = Model(made, stack.enter_context(SpawnedWorker(made.path, tier="file", threads=1)).address, route)
        assert one.right(one.run(inputs), inputs)
        file = made.path / "3.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"\x01")
        time.sleep(0.15)
        with pytest.raises(StoreError, match="changed while its table"):
            one.run(inputs)
        one.close()
    assert gpu.driver.in_use() == []


# ---- what an earlier step left -----------------------------------------------------------------------------------------


def test_a_step_that_failed_leaves_nothing_to_the_next_one_in_its_slot(
    model: Callable[..., Model], rng: np.random.Generator
) -> None:
    """Neither while it has not begun on the device, nor the worker's reason, for ever."""
    one = model("staged")
    for _ in range(3):
        inputs = random_inputs(rng, 10, 2)
        inputs.ids[3] = 1000
        with pytest.raises(StepError, match=r"input_ids\[3\]"):
            one.run(inputs)
        failed = one.connector._route._words.clone()
        one.connector.release_outputs()
        one.prepare(random_inputs(rng, 10, 2))
        one.connector.release_outputs()
        step = one.prepare(inputs := random_inputs(rng, 10, 2))
        one.connector._route._words.copy_(failed)  # as long as the device is behind
        one.connector.check(step)
        one.await_flags(step, 10)
        assert one.right(one.forward(10), inputs)
        one.connector.check(step)
        one.connector.release_outputs()
    assert one.connector._transport._failed == {}


# ---- where it runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["staged", "auto"])
def test_the_wait_is_launched_on_its_own_device_whatever_the_current_one_is(
    model: Callable[..., Model], gpu: Gpu, rng: np.random.Generator, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model(route)
    current: list[Any] = []
    run = Drain.run

    def seen(drain: Drain, *arguments: Any) -> None:
        current.append(gpu.driver.current)
        run(drain, *arguments)

    monkeypatch.setattr(Drain, "run", seen)
    inputs = random_inputs(rng, BORDER + 1, 2)
    assert one.right(one.run(inputs), inputs)
    assert current == [torch.device("cuda", 0)] * 2


def test_connectors_of_one_process_share_its_tables(gpu: Gpu, made: Made, rng: np.random.Generator) -> None:
    """The driver registers memory once; it stays registered until the last connector has gone, in whatever order."""
    inputs = random_inputs(rng, 20, 2)
    with contextlib.ExitStack() as stack:
        tables = {t.layer: stack.enter_context(open_table(made.path, t.layer, "ram")) for t in made.spec.tables}
        first, second, third = (Model(made, "inline", "direct", tables=tables) for _ in range(3))
        assert first.right(first.run(inputs), inputs)
        first.close()
        assert second.right(second.run(inputs), inputs)
        third.close()
        assert gpu.driver.registered
        second.close()
        assert gpu.driver.in_use() == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_forked_child_leaves_the_device_to_its_parent(
    model: Callable[..., Model], gpu: Gpu, rng: np.random.Generator, route: str
) -> None:
    """When it closes, as at its exit: the driver refuses a child everything, and memory may be shared with the parent."""
    one = model(route)
    inputs = random_inputs(rng, 20, 2)
    assert one.right(one.run(inputs), inputs)
    calls, end = len(gpu.driver.calls), one.connector._route.close
    closed: list[None] = []
    one.connector._route.close = lambda: closed.append(end())
    child = os.fork()
    if not child:
        try:
            one.close()
            os._exit(0 if len(gpu.driver.calls) == calls and not closed else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert one.right(one.run(inputs), inputs)


# ---- anything, in any order --------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("route", ["direct", "staged", "auto"])
def test_random_steps(model: Callable[..., Model], rng: np.random.Generator, route: str) -> None:
    """Up to two in flight: whole forwards, forwards that broke off or never came, bad ids, dummies, reconnections.

    Each step delivers its rows, or NaN and an error of its own; no wait takes longer than the worker.
    """
    one = model(route)
    # step, inputs, rows, whether ids are bad
    flight: deque[tuple[int, Inputs | None, list[torch.Tensor], bool]] = deque()

    def release() -> None:
        step, inputs, found, bad = flight.popleft()
        if bad and found:
            with pytest.raises(StepError, match=r"input_ids"):
                one.connector.check(step)
            assert any(bool(values.isnan().any()) for values in found)
        else:
            one.connector.check(step)
            assert not found or inputs is None or one.right(found, inputs)
        one.connector.release_outputs()

    kinds = ["whole", "whole", "whole", "bad", "broken off", "never came", "dummy", "uncounted dummy", "reconnect"]
    for kind in rng.choice(kinds, 60):
        while len(flight) == 2 or (flight and (kind == "uncounted dummy" or rng.random() < 0.3)):
            release()
        if kind == "reconnect":
            one.connector.reconnect()
            flight.clear()
        elif kind == "uncounted dummy":
            one.connector.signal_dummy_outputs(8)
        elif kind == "dummy":
            step = one.connector.prepare_forward(1, 8, dummy_run=True)
            one.ids.fill_(-1)
            flight.append((step, None, one.forward(8), False))
        else:
            tokens = int(rng.integers(1, rng.choice([BORDER, 60])))
            inputs = random_inputs(rng, tokens, int(rng.integers(1, 9)), padded=tokens + int(rng.integers(0, 5)))
            if kind == "bad":
                inputs.ids[int(rng.integers(0, tokens))] = 1000
            step, found = one.prepare(inputs), []
            if kind == "broken off":
                break_off(one, inputs.padded)
            elif kind != "never came":
                if one.asks_worker(inputs.padded):
                    one.await_flags(step, inputs.padded)
                found = one.forward(inputs.padded)
            flight.append((step, inputs, found, kind == "bad"))
    while flight:
        release()
