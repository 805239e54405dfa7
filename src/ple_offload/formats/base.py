"""What a format is: the values that a row's bytes stand for. It knows nothing of token ids or places.

A row is `row_dim` codes, one element each. Every format here decodes a code on its own, so a decoder is one of two things:

* `copy`: the stored bytes are the values already (BF16 rows wanted as BF16);
* a lookup table of all codes, 256 or 65,536 entries, filled once with the very expression an engine computes. It is exact
  by construction and does not depend on the processor's rounding or flush-to-zero mode. FP8 wanted as bf16, the case that
  serves models, is decoded many codes at a time instead where that gives the very same bits (e4m3.py). FP32 rows wanted
  in 16 bits have too many codes and are cast after the copy.

Values leave as bf16, fp16 or fp32 (`VALUE_DTYPES`); bfloat16 in NumPy is `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ple_offload.errors import CheckpointError, UsageError

Bytes = npt.NDArray[np.uint8]

VALUE_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
# safetensors name -> (our name, dtype of one stored code)
STORED_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "BF16": ("bf16", VALUE_DTYPES["bf16"]),
    "F16": ("fp16", VALUE_DTYPES["fp16"]),
    "F32": ("fp32", VALUE_DTYPES["fp32"]),
    "F8_E4M3": ("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn)),
}


@dataclass(frozen=True)
class RowFormat:
    """The facts of a table's rows, decided once when the table is found and never guessed again."""

    name: str  # "bf16", "fp16", "fp32" or "fp8_e4m3"
    row_dim: int  # elements of one row
    scale: float | None = None  # fp8_e4m3 only: one scale for the table, as stored

    @cached_property
    def stored_dtype(self) -> np.dtype[Any]:
        """dtype of one stored code."""
        return next(dtype for name, dtype in STORED_DTYPES.values() if name == self.name)

    @cached_property
    def row_bytes(self) -> int:
        return self.row_dim * self.stored_dtype.itemsize

    @property
    def value_dtype(self) -> str:
        """The natural value dtype: the stored one, bf16 for fp8."""
        return "bf16" if self.name == "fp8_e4m3" else self.name

    def decode_reference(self, rows: Bytes, dtype: str) -> npt.NDArray[Any]:
        """Values [..., row_dim] of raw rows [..., row_bytes] uint8, in plain NumPy: the specification.

        Plain formats are cast to the wanted dtype, nearest even. FP8 follows the engines (vLLM 0.33, SGLang): the row in
        the activation dtype, times the scale in the activation dtype, rounded once.
        """
        wanted = VALUE_DTYPES[dtype]
        with np.errstate(invalid="ignore", over="ignore"):
            values = np.ascontiguousarray(rows).view(self.stored_dtype).astype(wanted)
            if self.scale is not None:
                values = values * np.float32(self.scale).astype(wanted)
        return values

    def codes_to_values(self, dtype: str) -> npt.NDArray[Any] | None:
        """All codes' values, as unsigned integers of the value's width: [256] or [65536] uint16/uint32.

        None when the stored bytes are the values already. Raises UsageError where a code is too wide to list (fp32).
        """
        if self.name == dtype:
            return None
        if self.stored_dtype.itemsize > 2:
            raise UsageError(f"{self.name} codes have no lookup table; cast the copied rows instead.")
        return _codes_to_values(self.name, self.scale, dtype)


@lru_cache(maxsize=16)
def _codes_to_values(name: str, scale: float | None, dtype: str) -> npt.NDArray[Any]:
    one = RowFormat(name, 1, scale)
    width = one.row_bytes
    codes = np.arange(1 << (8 * width), dtype=f"<u{width}").view(np.uint8).reshape(-1, width)
    values = one.decode_reference(codes, dtype)[:, 0]
    integers = values.view(f"u{values.dtype.itemsize}")
    # NaN in a table is damage; give it the one bit pattern torch gives it, so that results compare bit for bit
    integers[np.isnan(values)] = {"bf16": 0x7FC0, "fp16": 0x7E00, "fp32": 0x7FC00000}[dtype]
    integers.flags.writeable = False
    return integers


def detect(stored_dtype: str, row_dim: int, scale: float | None, place: str) -> RowFormat:
    """Decide a table's format from what its tensors are: safetensors dtype, elements per row, companion scale.

    `place` names the table in errors. Raises CheckpointError for a dtype that is not understood, for FP8 without a scale,
    a scale that is not finite or is zero, and a scale beside a dtype that has none.
    """
    if stored_dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{place}: expected dtype {', '.join(STORED_DTYPES)}, found {stored_dtype}. "
            "This row format is not supported; use a checkpoint with one of those."
        )
    name = STORED_DTYPES[stored_dtype][0]
    if name == "fp8_e4m3":
        if scale is None:
            raise CheckpointError(
                f"{place}: dtype F8_E4M3 needs a companion weight_scale, found none. Without it every value is wrong; "
                "get a complete checkpoint."
            )
        if not np.isfinite(scale) or scale == 0:
            raise CheckpointError(
                f"{place}: weight_scale: expected a finite number other than zero, found {scale}. "
                "The checkpoint is damaged; get it again."
            )
    elif scale is not None:
        raise CheckpointError(
            f"{place}: dtype {stored_dtype} has no scale, yet a weight_scale is stored ({scale}). "
            "Which of the two is wrong cannot be told; get a consistent checkpoint."
        )
    return RowFormat(name, row_dim, scale)
