"""FP8 decoded by arithmetic: the very bits of the table of codes, or not used at all."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from ple_offload.formats import RowFormat
from ple_offload.formats.e4m3 import vector_tables
from ple_offload.formats.gather import GATHERED, PREFETCH_ROWS, Gather
from ple_offload.stores.base import RowMap


@pytest.mark.parametrize("row_dim", [1, 31, 32, 33, 64, 65, 160, 256])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("scale", [0.000199, 1.0, -3.7, 1e-30, 65504.0, 1e37])
def test_rows_equal_the_table_of_codes(scale: float, parallel: bool, row_dim: int) -> None:
    """Odd addresses, whole and partial vectors; products that overflow to infinity and NaN codes included."""
    row_format = RowFormat("fp8_e4m3", row_dim, scale)
    tables = vector_tables(row_format, "bf16")
    assert tables is not None
    assert tables[0] == np.float32(ml_dtypes.bfloat16(scale))
    table = np.resize(np.arange(256, dtype=np.uint8), 256 * row_dim + 3)
    at = RowMap.of([table.ctypes.data + 3], [256])
    rows = np.random.default_rng(0).integers(0, 256, 3 * PREFETCH_ROWS)
    out = np.full((rows.size + 1, row_dim), 0xAAAA, np.uint16)
    gather = Gather(row_format, at.bases, at.starts, at.step, "bf16")
    assert gather.run(rows, out[:-1].view(ml_dtypes.bfloat16), 3 if parallel else 1) == GATHERED
    codes_to_values = row_format.codes_to_values("bf16")
    assert codes_to_values is not None
    assert np.array_equal(out[:-1], codes_to_values[table[3:].reshape(256, row_dim)[rows]])
    assert (out[-1] == 0xAAAA).all()  # nothing is written past the end


def test_every_ordinary_bf16_scale_decodes_exactly() -> None:
    """One scale of every exponent in the range that is offered, all mantissas of some."""
    bits = [exponent << 7 | (exponent * 37 & 0x7F) for exponent in range(10, 255)] + list(range(0x3F80, 0x4000))
    for scale in np.array(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32):
        tables = vector_tables(RowFormat("fp8_e4m3", 1, float(scale)), "bf16")
        assert tables is not None
        assert tables[0] == scale


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    [("fp8_e4m3", 1e-37, "bf16"), ("fp8_e4m3", 3.4e38, "bf16"), ("fp8_e4m3", 1.0, "fp16"), ("bf16", None, "bf16")],
)
def test_what_it_cannot_do_exactly_is_left_to_the_table_of_codes(name: str, scale: float | None, dtype: str) -> None:
    """Subnormal products, a scale that bf16 rounds to infinity, other dtypes and formats."""
    assert vector_tables(RowFormat(name, 1, scale), dtype) is None


def test_a_processor_without_byte_permutes_gives_the_same_bits() -> None:
    """Compiled for the oldest x86-64 (where this is one): rows of two vectors of 64 and more."""
    script = """
import ml_dtypes
import numpy as np
from ple_offload.formats import RowFormat
from ple_offload.formats.gather import GATHERED, Gather
row_format = RowFormat("fp8_e4m3", 160, 0.0123)
table = np.resize(np.arange(256, dtype=np.uint8), (256, 160))
out = np.empty((256, 160), ml_dtypes.bfloat16)
at = np.array([table.ctypes.data], np.uint64), np.array([0, 256]), 256
assert Gather(row_format, *at, "bf16").run(np.arange(256), out, 1) == GATHERED
assert np.array_equal(out.view(np.uint16), row_format.codes_to_values("bf16")[table])
"""
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        check=True,
        timeout=50,
    )
