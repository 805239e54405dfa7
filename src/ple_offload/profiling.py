"""Named ranges on a profiler's time line (NVTX): what the host does for a step, on both sides of the socket.

    gather    the worker reads rows, or `direct` launches the kernel that does
    copy      inputs of a step are brought to where the rows are found
    publish   the step is announced
    wait      the forward waits for rows, or launches the kernel that does

Off unless PLE_OFFLOAD_NVTX=1, since a range costs about a microsecond. It needs the package `nvtx`, or a torch with CUDA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ple_offload.config import settings
from ple_offload.errors import UsageError

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_make: Callable[[str], AbstractContextManager[Any]] | None = None


def span(name: str) -> AbstractContextManager[Any]:
    """A range for a `with` block. The environment is read at the first one.

    Raises UsageError where ranges are asked for and neither package is there.
    """
    global _make
    if _make is None:
        _make = _maker() if settings().nvtx else lambda _: _NOTHING
    return _make(name)


def _maker() -> Callable[[str], AbstractContextManager[Any]]:
    with contextlib.suppress(ImportError):
        import nvtx

        return functools.partial(nvtx.annotate, domain="ple_offload")
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return lambda name: torch.cuda.nvtx.range(f"ple_offload: {name}")
    raise UsageError(
        "PLE_OFFLOAD_NVTX=1: expected the package nvtx, or a torch with CUDA, found neither: pip install nvtx, or unset it."
    )


def reset() -> None:
    """Read the environment anew; for tests."""
    global _make
    _make = None
