"""Helpers that several test files use. No torch here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, tuple[str, np.ndarray | bytes, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write {name: (dtype in safetensors spelling, array or raw little-endian bytes, shape)} as one file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    chunks: list[bytes] = []
    offset = 0
    for name, (dtype, data, shape) in tensors.items():
        raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        expected = math.prod(shape) * _ITEM_BYTES[dtype]
        assert len(raw) == expected, f"{name}: {len(raw)} bytes given, {dtype} {shape} needs {expected}"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        chunks.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))
    return Path(path)


def forked(run: Callable[[], object], limit_s: float = 10) -> bool:
    """Whether `run` ends well in a forked child within the limit; else the child is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run()
            os._exit(0)
        os._exit(1)
    end_s = time.monotonic() + limit_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end_s:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended == (child, 0)
