"""What a layer receives, byte by byte against the plain reference: formats, dtypes, requests, outputs, shapes of steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from connector.rig import Inputs, Rank, all_nan, random_inputs

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("request_kind", ["tokens", "rows"])
@pytest.mark.parametrize("output", ["stored", "values"])
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32", "F8_E4M3"])
def test_rows_are_the_references_in_every_format_and_dtype(
    rank: Callable[..., Rank], stored: str, output: str, request_kind: str
) -> None:
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        one = rank(stored, dtype=dtype, output=output, request=request_kind, width=torch.int32)
        for tokens, reqs in ((1, 1), (40, 5), (64, 8)):
            inputs = random_inputs(rng, tokens, reqs)
            assert one.right(one.run(inputs), inputs)
        one.close()


@pytest.mark.parametrize("output", ["stored", "values"])
def test_a_zeroed_table_fails_the_comparison(rank: Callable[..., Rank], output: str) -> None:
    """The negative control: the comparison of every test here sees rows that are not the table's."""
    one = rank("zero", output=output)
    inputs = random_inputs(np.random.default_rng(2), 20, 3)
    found = one.run(inputs)
    assert not any(values.any() for values in found)
    assert not one.right(found, inputs)


@pytest.mark.parametrize("request_kind", ["tokens", "rows"])
def test_rows_behind_the_tokens_are_zero_and_padded_lanes_may_hold_anything(
    rank: Callable[..., Rank], request_kind: str
) -> None:
    """The sources hold -1 wherever the step has no token of its own (see `Rank.load`)."""
    one = rank("F16", request=request_kind, dtype=torch.float32)
    rng = np.random.default_rng(3)
    for tokens, padded in ((1, 2), (5, 64), (63, 64), (0, 16)):
        full = random_inputs(rng, 64, 4)
        assert one.right(one.run(full), full)  # so that a slot holds something to leak
        inputs = random_inputs(rng, tokens, 4, padded=padded)
        found = one.run(inputs)
        assert one.right(found, inputs)
        assert not any(values[tokens:].any() for values in found)


def test_every_size_from_nothing_to_the_largest_step(rank: Callable[..., Rank]) -> None:
    one = rank(max_num_tokens=33, max_num_reqs=5)
    rng = np.random.default_rng(4)
    for tokens in range(34):
        inputs = random_inputs(rng, tokens, 1 + tokens % 5)
        assert one.right(one.run(inputs), inputs), tokens


def test_many_requests_and_requests_without_tokens(rank: Callable[..., Rank]) -> None:
    one = rank(max_num_tokens=64, max_num_reqs=500)
    rng = np.random.default_rng(5)
    for tokens, reqs in ((64, 500), (1, 500), (0, 500), (64, 64), (0, 0)):
        inputs = random_inputs(rng, tokens, reqs)
        assert one.right(one.run(inputs), inputs), (tokens, reqs)


def test_steps_of_several_blocks(rank: Callable[..., Rank]) -> None:
    """4,096 rows are a block: 4 rows a token make this step one block and a bit, two blocks, and almost three."""
    one = rank("F8_E4M3", max_num_tokens=3000, max_num_reqs=20)
    rng = np.random.default_rng(6)
    for tokens in (1024, 1025, 2048, 3000, 1):
        inputs = random_inputs(rng, tokens, 20)
        assert one.right(one.run(inputs), inputs), tokens


def test_layers_may_take_their_rows_in_any_order(rank: Callable[..., Rank]) -> None:
    one = rank(max_concurrent_batches=2)
    rng = np.random.default_rng(7)
    first, second = random_inputs(rng, 9, 2), random_inputs(rng, 30, 3)
    one.prepare(first)
    one.prepare(second)
    last, before = one.layers[1], one.layers[0]
    found = {}
    for inputs in (first, second):
        hidden = torch.zeros(inputs.padded, 8)
        found = {1: last(hidden, one.ids), 0: before(hidden, one.ids)}
        assert one.right([found[0], found[1]], inputs)
        one.connector.release_outputs()


def test_two_models_of_one_process_do_not_mix(rank: Callable[..., Rank]) -> None:
    """Two connectors, the same decoder layers, different tables; with a worker both share it."""
    one, other = rank("BF16"), rank("F32", dtype=torch.float32)
    rng = np.random.default_rng(8)
    for _ in range(5):
        mine, theirs = random_inputs(rng, 20, 3), random_inputs(rng, 31, 4)
        one.prepare(mine)
        other.prepare(theirs)
        assert other.right(other.forward(theirs.padded), theirs)
        assert one.right(one.forward(mine.padded), mine)
        one.connector.release_outputs()
        other.connector.release_outputs()


def test_what_a_forward_received_is_its_own(rank: Callable[..., Rank]) -> None:
    """Outputs of earlier steps stay as they were while later steps use the same slots."""
    one = rank()
    rng = np.random.default_rng(9)
    kept = []
    for _ in range(6):
        inputs = random_inputs(rng, 25, 2)
        kept.append((one.run(inputs), inputs))
    assert all(one.right(found, inputs) for found, inputs in kept)


@pytest.mark.parametrize(
    "starts", [[0, 9, 5], [1, 5, 9], [0, 5, -1], [0, 5, 0], [0, -5, 9], [0, 5, 65], [0, 2**40, 9]], ids=str
)
def test_a_query_start_loc_that_is_none_fails_the_step(rank: Callable[..., Rank], starts: list[int]) -> None:
    """Also where its end says that there is nothing to look up: an empty step must not hide the error."""
    one = rank()
    rng = np.random.default_rng(10)
    good = random_inputs(rng, 9, 2)
    bad = Inputs(good.ids, np.array(starts), good.context, 9)
    step = one.prepare(bad)
    found = [one.connector.deliver(i, 9) for i in range(2)]
    assert all_nan(found)
    with pytest.raises(Exception, match="query_start_loc"):
        one.connector.check(step)
    one.connector.release_outputs()
    assert one.right(one.run(good), good)
