"""Output memory is used again only once nobody can see it."""

from __future__ import annotations

import numpy as np
import torch

from ple_offload.connector.outputs import KEPT, LARGE_BYTES, OutputPool

ROWS = LARGE_BYTES // 512  # of 256 float32: 2 MiB
SHAPE = (ROWS, 256)
FP32 = np.dtype(np.float32)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_view_has_gone() -> None:
    pool = OutputPool()
    array = pool.take(SHAPE, FP32)
    first = address(array)
    tensor = torch.from_numpy(array)
    del array
    view = tensor[5:7].t()
    del tensor
    assert address(pool.take(SHAPE, FP32)) != first  # a view of a view still holds it
    del view
    assert address(pool.take(SHAPE, FP32)) == first


def test_outputs_that_are_held_never_overlap() -> None:
    pool = OutputPool()
    held = [torch.from_numpy(pool.take(SHAPE, FP32)) for _ in range(3 * KEPT)]
    for i, tensor in enumerate(held):
        tensor.fill_(i)
    assert [tensor.unique().tolist() for tensor in held] == [[float(i)] for i in range(3 * KEPT)]
    assert len(pool._buffers) == KEPT


def test_smaller_steps_use_a_part_and_larger_ones_get_more() -> None:
    pool = OutputPool()
    first = address(pool.take(SHAPE, FP32))
    smaller = pool.take((ROWS - 9, 256), FP32)
    assert address(smaller) == first
    assert smaller.shape == (ROWS - 9, 256)
    del smaller
    assert pool.take((2 * ROWS, 256), FP32).shape == (2 * ROWS, 256)


def test_small_outputs_are_the_allocators() -> None:
    pool = OutputPool()
    assert pool.take((1, 256), FP32).shape == (1, 256)
    assert pool._buffers == []
