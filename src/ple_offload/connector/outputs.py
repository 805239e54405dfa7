"""Memory for outputs on the CPU, used again once nobody looks at it.

Every forward gets a fresh tensor. For a large step fresh memory is expensive: the kernel clears it, page by page, which
takes as long as looking the rows up. So the last few large buffers are kept, and one is handed out again when the reference
count says that only this pool still holds it: a tensor, or any view of it, keeps its buffer alive and thereby out of use.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

LARGE_BYTES = 1 << 20  # smaller blocks come from the allocator's own pools
KEPT = 2


def _count_alone() -> int:
    """What getrefcount says of an array that only a list holds; asked in the same way as below, by this interpreter."""
    buffers = [np.empty(0, np.uint8)]
    return sys.getrefcount(buffers[0])


_ALONE = _count_alone()


class OutputPool:
    """Uninitialised arrays; not for two threads at once."""

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array that shares memory with nothing that anybody else can still see."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return np.empty(shape, dtype)
        for i in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[i]) == _ALONE and self._buffers[i].size >= num_bytes:
                return self._buffers[i][:num_bytes].view(dtype).reshape(shape)
        buffer = np.empty(num_bytes, np.uint8)
        self._buffers = [*self._buffers[1 - KEPT :], buffer] if len(self._buffers) >= KEPT else [*self._buffers, buffer]
        return buffer.view(dtype).reshape(shape)
