"""The life of steps: how many are in flight, dummies, what is released, and that numbers count every prepare_forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from connector.rig import Made, Rank, all_nan, random_inputs
from ple_offload.errors import StepError, TokenIdError, UsageError
from ple_offload.worker.spawn import SpawnedWorker


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def dummy_forward(one: Rank, padded: int) -> bool:
    """Whether a forward gets zeros."""
    found = one.forward(padded)
    return all(tuple(values.shape) == (padded, 64) and not values.any() for values in found)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_batches_in_flight_up_to_the_limit_and_one_more_is_an_error(
    rank: Callable[..., Rank], rng: np.random.Generator, depth: int
) -> None:
    one = rank(max_concurrent_batches=depth)
    flight = [random_inputs(rng, 10 + i, 2) for i in range(depth)]
    for inputs in flight:
        one.prepare(inputs)
    with pytest.raises(UsageError, match=rf"at most {depth} steps in flight .*release_outputs"):
        one.connector.prepare_forward(1, 1)
    for inputs in flight:  # they come in the order they were prepared, whatever was refused meanwhile
        assert one.right(one.forward(inputs.padded), inputs)
    for _ in flight:
        one.connector.release_outputs()
    inputs = random_inputs(rng, 20, 3)
    assert one.right(one.run(inputs), inputs)


def test_a_refused_batch_never_takes_the_slot_of_one_in_flight(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    """Slots follow the numbers and a refused step has one: with two slots, step 4 would write into the slot of step 2."""
    one = rank(max_concurrent_batches=2)
    first, second, third = (random_inputs(rng, 10 + i, 2) for i in range(3))
    one.prepare(first)
    one.prepare(second)
    with pytest.raises(UsageError, match="one more"):
        one.connector.prepare_forward(1, 1)
    assert one.right(one.forward(first.padded), first)
    one.connector.release_outputs()
    with pytest.raises(UsageError, match="one more"):
        one.prepare(third)
    assert one.right(one.forward(second.padded), second)
    one.connector.release_outputs()
    assert one.right(one.run(third), third)


@pytest.mark.parametrize("failures", [1, 2, 3, 7])
def test_numbers_of_refused_steps_are_counted_and_hold_nobody_up(
    rank: Callable[..., Rank], rng: np.random.Generator, failures: int
) -> None:
    one = rank(max_concurrent_batches=2)
    inputs = random_inputs(rng, 10, 2)
    one.run(inputs)
    for _ in range(failures):
        with pytest.raises(UsageError, match="num_tokens: expected 0 to 64, found 65"):
            one.connector.prepare_forward(1, 65)
    with pytest.raises(UsageError, match="num_reqs: expected 0 to 8, found -1"):
        one.connector.prepare_forward(-1, 1)
    assert one.prepare(inputs) == failures + 3
    assert one.right(one.forward(inputs.padded), inputs)


def test_mirror_has_one_batch_in_flight(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    for staging in ("mirror", "auto"):
        one = rank(staging=staging, max_concurrent_batches=4)
        assert one.connector.staging == "mirror"
        inputs = random_inputs(rng, 10, 2)
        for _ in range(5):
            assert one.right(one.run(inputs), inputs)
        one.prepare(inputs)
        with pytest.raises(UsageError, match=r"at most 1 steps in flight .one with sources on the CPU"):
            one.prepare(inputs)
        assert one.right(one.forward(10), inputs)


def test_sources_are_read_by_prepare_forward_and_may_change_afterwards(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    for staging in ("mirror", "async"):
        one = rank(staging=staging)
        inputs = random_inputs(rng, 30, 4)
        one.prepare(inputs)
        one.load(random_inputs(rng, 30, 4))
        assert one.right(one.forward(30), inputs)


def test_dummy_runs_are_zeros_read_no_source_and_count(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    one = rank(max_concurrent_batches=2)
    inputs = random_inputs(rng, 10, 2)
    for round_ in range(4):
        one.ids.fill_(-1)
        one.starts.fill_(-1)
        assert one.connector.prepare_forward(3, 12, dummy_run=True) == 2 * round_ + 1
        assert one.prepare(inputs) == 2 * round_ + 2  # a real one behind it, both in flight
        assert dummy_forward(one, 12)
        assert one.right(one.forward(10), inputs)
        one.connector.release_outputs()
        one.connector.release_outputs()
    one.connector.check()


def test_dummy_outputs_satisfy_one_forward_each_without_a_step(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    one = rank()
    inputs = random_inputs(rng, 10, 2)
    for padded in (64, 32, 1, 0):
        one.connector.signal_dummy_outputs(padded)
        assert dummy_forward(one, padded)
        assert one.right(one.run(inputs), inputs)
    one.connector.signal_dummy_outputs(8)
    one.connector.signal_dummy_outputs(16)
    assert dummy_forward(one, 8)
    assert dummy_forward(one, 16)
    with pytest.raises(StepError, match=r"no step was prepared. Call prepare_forward first"):
        one.forward(16)
    with pytest.raises(UsageError, match="num_tokens: expected 0 to 64, found 65"):
        one.connector.signal_dummy_outputs(65)
    assert one.prepare(inputs) == 5


def test_dummy_outputs_reach_every_layer_in_any_order(rank: Callable[..., Rank]) -> None:
    one = rank()
    hidden = torch.zeros(4, 8)
    for order in ((0, 1), (1, 0)):
        one.connector.signal_dummy_outputs(4)
        assert not any(one.layers[i](hidden, one.ids).any() for i in order)
        with pytest.raises(StepError, match="no step was prepared"):
            one.layers[order[0]](hidden, one.ids)


def test_a_real_step_never_gets_the_zeros_of_a_dummy_nobody_took(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    """A warm-up forward that did not come would otherwise make the first real one zeros, which read as fluent text."""
    one = rank()
    inputs = random_inputs(rng, 10, 2)
    one.connector.signal_dummy_outputs(10)
    assert one.right(one.run(inputs), inputs)


def test_a_forward_without_a_step_gets_nan(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    one = rank()
    found = [one.connector.deliver(i, 5) for i in range(2)]
    assert all_nan(found)
    with pytest.raises(StepError, match="no step was prepared"):
        one.connector.check()
    inputs = random_inputs(rng, 10, 2)
    assert one.right(one.run(inputs), inputs)


def test_a_forward_smaller_than_its_step_gets_nan(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    one = rank()
    inputs = random_inputs(rng, 10, 2)
    step = one.prepare(inputs)
    with pytest.raises(StepError, match=rf"step {step} layer 1: 10 tokens were prepared, the forward has 9"):
        one.forward(9)
    one.connector.release_outputs()
    assert one.right(one.run(inputs), inputs)


def test_a_step_may_be_released_without_a_forward(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    """A forward that was cancelled: its rows are never looked at, and the next step gets its own."""
    one = rank(max_concurrent_batches=2)
    for _ in range(5):
        one.prepare(random_inputs(rng, 30, 3))
        one.connector.release_outputs()
        inputs = random_inputs(rng, 10, 2)
        assert one.right(one.run(inputs), inputs)
    one.connector.release_outputs()  # nothing is in flight: nothing happens
    one.connector.release_outputs()
    assert one.right(one.run(inputs), inputs)


@pytest.mark.parametrize("where", ["ids", "context"])
def test_a_bad_id_fails_its_step_alone_and_is_told_once(
    rank: Callable[..., Rank], rng: np.random.Generator, where: str
) -> None:
    """NaN, an error from the layer, from check as often as asked, not again from the next call; the next step is right."""
    one = rank()
    good = random_inputs(rng, 12, 3)
    for value in (-1, 1000, 2**31 - 1):
        one.load(good)
        if where == "ids":
            one.ids[4] = value
        else:
            one.context[1, 0] = value
        step = one.connector.prepare_forward(3, 12)
        place = r"input_ids\[4\]" if where == "ids" else r"ngram_context\[1, 0\]"
        message = rf"step {step} layer 1: {place} = {value}: expected a token id from 0 to 999"
        with pytest.raises(StepError, match=message):
            one.forward(12)
        assert all_nan([one.connector.deliver(1, 12)])  # the layers behind it get NaN as well
        for _ in range(2):
            with pytest.raises(StepError, match=message):
                one.connector.check(step)
        one.connector.release_outputs()
        assert one.right(one.run(good), good)


def test_an_error_nobody_was_told_is_raised_by_the_next_call_once(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    """In a compiled graph the layer cannot raise: here `deliver` is called as the op calls it."""
    good = random_inputs(rng, 12, 3)
    for call in ("prepare_forward", "release_outputs", "signal_dummy_outputs", "check"):
        one = rank()
        one.load(good)
        one.ids[0] = -1
        step = one.connector.prepare_forward(3, 12)
        assert all_nan([one.connector.deliver(i, 12) for i in range(2)])
        arguments = {"prepare_forward": (1, 1), "signal_dummy_outputs": (4,)}.get(call, ())
        with pytest.raises(StepError, match=rf"step {step} "):
            getattr(one.connector, call)(*arguments)
        one.connector.release_outputs()
        assert one.right(one.run(good), good)
        one.close()


def test_failed_steps_hold_no_rows(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    """What a step failed with is kept for `check`; the frames it was raised in, and so the rows, are not."""
    one = rank()
    one.load(random_inputs(rng, 12, 3))
    one.ids[0] = -1
    step = one.connector.prepare_forward(3, 12)
    rows = weakref.ref(one.connector.deliver(0, 12))
    for _ in range(2):
        with pytest.raises(StepError):
            one.connector.check(step)
    gc.collect()
    assert rows() is None


def test_a_bad_row_number_fails_its_step(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    one = rank(request="rows")
    good = random_inputs(rng, 12, 3)
    for layer in (1, 3):
        for value in (-1, one.tables[0].num_rows + 1000):
            one.load(good)
            one.rows[layer][5, 2] = value
            step = one.connector.prepare_forward(1, 12)
            with pytest.raises(StepError, match=rf"step {step} layer {layer}: row number {value} \(at index 22"):
                one.forward(12)
            one.connector.release_outputs()
            assert one.right(one.run(good), good)


def test_an_error_of_one_of_two_steps_in_flight(rank: Callable[..., Rank], rng: np.random.Generator) -> None:
    for bad in (0, 1):
        one = rank()
        good = random_inputs(rng, 12, 3)
        for i in range(2):
            one.load(good)
            if i == bad:
                one.ids[0] = 5000
            one.connector.prepare_forward(3, 12)
        for i in range(2):
            found = [one.connector.deliver(layer, 12) for layer in range(2)]
            assert all_nan(found) if i == bad else one.right(found, good)
        with pytest.raises(StepError):
            one.connector.check(1 + bad)
        one.connector.check(2 - bad)
        for _ in range(2):
            one.connector.release_outputs()


def test_the_inline_error_keeps_its_cause(made: dict[str, Made], rank: Callable[..., Rank], transport: str) -> None:
    if transport != "inline":
        return
    one = rank()
    one.load(random_inputs(np.random.default_rng(0), 3, 1))
    one.ids[0] = -7
    one.connector.prepare_forward(1, 3)
    with pytest.raises(StepError) as error:
        one.forward(3)
    assert isinstance(error.value.__cause__, TokenIdError)


def test_reconnect_goes_on_with_the_numbers_and_fails_what_was_in_flight(
    rank: Callable[..., Rank], rng: np.random.Generator
) -> None:
    one = rank(max_concurrent_batches=2)
    inputs = random_inputs(rng, 12, 3)
    for _ in range(10):
        one.run(inputs)
    for round_ in range(3):
        step = one.prepare(inputs)
        one.connector.reconnect()
        with pytest.raises(Exception, match=rf"step {step}: given up by `reconnect`"):
            one.connector.check(step)
        with pytest.raises(StepError, match="no step was prepared"):
            one.forward(12)
        for i in range(3):
            assert one.prepare(inputs) == 12 + round_ * 4 + i
            assert one.right(one.forward(12), inputs)
            one.connector.release_outputs()


def test_a_delivered_step_survives_reconnect(made: dict[str, Made], worker: SpawnedWorker) -> None:
    one = Rank.of(made["BF16"], worker.address, session="delivered before")
    inputs = random_inputs(np.random.default_rng(1), 12, 3)
    step = one.prepare(inputs)
    found = one.forward(12)
    one.connector.reconnect()
    one.connector.check(step)
    assert one.right(found, inputs)
    one.close()
