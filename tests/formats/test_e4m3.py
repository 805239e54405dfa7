"""FP8 decoded by arithmetic: the very bits of the table of codes, or not used at all."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ple_offload.formats import RowFormat
from ple_offload.formats.e4m3 import vector_scale
from ple_offload.formats.gather import PREFETCH_ROWS, decode_e4m3_rows, decode_e4m3_rows_parallel
from ple_offload.stores.base import RowMap


@pytest.mark.parametrize("row_dim", [1, 31, 32, 33, 160, 256])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("scale", [0.000199, 1.0, -3.7, 1e-30, 65504.0, 1e37])
def test_rows_equal_the_table_of_codes(scale: float, parallel: bool, row_dim: int) -> None:
    """Odd addresses, whole and partial vectors; products that overflow to infinity and NaN codes included."""
    row_format = RowFormat("fp8_e4m3", row_dim, scale)
    factor = vector_scale(row_format, "bf16")
    assert factor == np.float32(ml_dtypes.bfloat16(scale))
    table = np.resize(np.arange(256, dtype=np.uint8), 256 * row_dim + 3)
    at = RowMap.of([table.ctypes.data + 3], [256])
    rows = np.random.default_rng(0).integers(0, 256, 3 * PREFETCH_ROWS)
    out = np.full((rows.size + 1, row_dim), 0xAAAA, np.uint16)
    where = (at.bases, at.starts, at.step, rows, row_dim, factor, out[:-1])
    bad = decode_e4m3_rows_parallel(*where, 3) if parallel else decode_e4m3_rows(*where, 0, rows.size)
    assert bad == -1
    codes_to_values = row_format.codes_to_values("bf16")
    assert codes_to_values is not None
    assert np.array_equal(out[:-1], codes_to_values[table[3:].reshape(256, row_dim)[rows]])
    assert (out[-1] == 0xAAAA).all()  # nothing is written past the end


def test_every_ordinary_bf16_scale_decodes_exactly() -> None:
    """One scale of every exponent in the range that is offered, all mantissas of some."""
    bits = [exponent << 7 | (exponent * 37 & 0x7F) for exponent in range(10, 255)] + list(range(0x3F80, 0x4000))
    for scale in np.array(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32):
        assert vector_scale(RowFormat("fp8_e4m3", 1, float(scale)), "bf16") == scale


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    [("fp8_e4m3", 1e-37, "bf16"), ("fp8_e4m3", 3.4e38, "bf16"), ("fp8_e4m3", 1.0, "fp16"), ("bf16", None, "bf16")],
)
def test_what_it_cannot_do_exactly_is_left_to_the_table_of_codes(name: str, scale: float | None, dtype: str) -> None:
    """Subnormal products, a scale that bf16 rounds to infinity, other dtypes and formats."""
    assert vector_scale(RowFormat(name, 1, scale), dtype) is None


@pytest.mark.parametrize("bad", [-1, 12, 2**62])
def test_a_row_outside_the_table_is_found_before_it_is_read(bad: int) -> None:
    table = np.zeros(12 * 16, np.uint8)
    at = RowMap.of([table.ctypes.data], [12])
    rows = np.array([3, bad, 5])
    out = np.zeros((3, 16), np.uint16)
    assert decode_e4m3_rows(at.bases, at.starts, at.step, rows, 16, np.float32(1), out, 0, 3) == 1
    assert decode_e4m3_rows_parallel(at.bases, at.starts, at.step, rows, 16, np.float32(1), out, 2) == 1
