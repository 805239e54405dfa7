"""Keeps a model's n-gram (PLE) embedding table out of GPU memory and looks up the rows each step needs.

Importing this package is cheap: no torch, no numba. The public names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ple_offload.errors import (
    CheckpointError,
    ConnectionLostError,
    CudaError,
    ForkError,
    MemoryLimitError,
    PleOffloadError,
    ProtocolError,
    StepError,
    StoreError,
    TokenIdError,
    UsageError,
)

if TYPE_CHECKING:
    from ple_offload import engines
    from ple_offload.cuda import CpuGpuSemaphore
    from ple_offload.spec import CheckpointSpec, TableSpec, inspect
    from ple_offload.table import Table, open_table

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "CheckpointSpec",
    "ConnectionLostError",
    "CpuGpuSemaphore",
    "CudaError",
    "ForkError",
    "MemoryLimitError",
    "PleOffloadError",
    "ProtocolError",
    "StepError",
    "StoreError",
    "Table",
    "TableSpec",
    "TokenIdError",
    "UsageError",
    "__version__",
    "engines",
    "inspect",
    "open_table",
]

# Public name -> the module that defines it.
_LAZY = {
    "CpuGpuSemaphore": "ple_offload.cuda",
    "CheckpointSpec": "ple_offload.spec",
    "TableSpec": "ple_offload.spec",
    "inspect": "ple_offload.spec",
    "Table": "ple_offload.table",
    "open_table": "ple_offload.table",
}


def __getattr__(name: str) -> Any:
    if name == "engines":
        return importlib.import_module("ple_offload.engines")
    if name not in _LAZY:
        raise AttributeError(f"module 'ple_offload' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
