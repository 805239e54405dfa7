"""A world's table where a GPU reads it: page-locked in the host's memory, or all of it in the GPU's own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from world import World

from ple_offload.cuda import CHUNK_BYTES, Cuda, Registration


def words_of(world: World) -> torch.Tensor:
    """The table as a CPU tensor of int64 words [num_rows, row_bytes / 8]; not to be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is read-only, and torch has no such tensors
        return torch.from_numpy(world.store.raw.view("int64"))


@contextlib.contextmanager
def page_locked(world: World, device: torch.device) -> Iterator[int]:
    """The table registered for reading, and where the device sees it.

    All users of this process share one registration: the driver page-locks about as much as the machine has, however
    often the same memory is mapped. It costs a second to make and more to end, so whoever has several users holds it.
    """
    ((address, num_bytes),) = world.store.ranges()
    if device.type == "cpu":
        yield address
        return
    registration = Registration(Cuda(device), address, num_bytes, read_only=True, owner=world.store)
    try:
        yield registration.device_address
    finally:
        torch.cuda.synchronize(device)
        registration.close()


def resident(world: World, device: torch.device) -> torch.Tensor:
    """The whole table on the device: int64 words [num_rows, row_bytes / 8]."""
    rows = torch.empty((world.spec.num_rows, world.spec.row_bytes // 8), dtype=torch.int64, device=device)
    with page_locked(world, device):  # else the driver would copy everything twice
        source, target = words_of(world).view(-1), rows.view(-1)
        for first in range(0, len(source), CHUNK_BYTES // 8):  # no copy may reach from one registration into the next
            part = slice(first, first + CHUNK_BYTES // 8)
            target[part].copy_(source[part])
    return rows
