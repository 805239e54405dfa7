"""What a row's bytes stand for, bit for bit against torch; and the compiled gathers against plain NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_offload.errors import CheckpointError
from ple_offload.formats import VALUE_DTYPES, RowFormat, detect
from ple_offload.formats.gather import PREFETCH_ROWS, copy_rows, copy_rows_parallel, decode_rows, decode_rows_parallel
from ple_offload.stores.base import RowMap


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scale", [0.000199, 1.0, -3.7, 1e-30, 65504.0])
def test_fp8_equals_the_expression_of_the_engines_in_torch(dtype: str, scale: float) -> None:
    """Row to the activation dtype, times the scale in the activation dtype: all 256 codes, every bit."""
    torch = pytest.importorskip("torch", reason="the expression of the comparison is torch's")
    activation = getattr(torch, VALUE_DTYPES[dtype].name)
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(activation) * torch.tensor(scale).to(activation)
    bits = expected.view(torch.int32 if dtype == "fp32" else torch.int16).numpy()
    found = RowFormat("fp8_e4m3", 1, scale).codes_to_values(dtype)
    assert found is not None
    # a NaN's sign depends on the processor torch ran on; every other bit must agree
    nan = torch.isnan(expected).numpy()
    assert np.array_equal(found.view(bits.dtype)[~nan], bits[~nan])
    assert np.isnan(found.view(VALUE_DTYPES[dtype])[nan].astype(np.float32)).all()
    assert {0x7F, 0xFF} <= set(np.flatnonzero(nan))


@pytest.mark.parametrize("stored", ["bf16", "fp16"])
@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
def test_sixteen_bit_codes_convert_as_torch_does(stored: str, wanted: str) -> None:
    torch = pytest.importorskip("torch", reason="the conversion of the comparison is torch's")
    codes = np.arange(1 << 16, dtype=np.uint16)
    source = torch.from_numpy(codes.copy()).view(getattr(torch, VALUE_DTYPES[stored].name))
    expected = source.to(getattr(torch, VALUE_DTYPES[wanted].name)).to(torch.float32).numpy()
    table = RowFormat(stored, 1).codes_to_values(wanted)
    if stored == wanted:
        assert table is None  # the bytes are the values
        return
    assert table is not None
    assert np.array_equal(table.view(VALUE_DTYPES[wanted]).astype(np.float32), expected, equal_nan=True)


def packed(rng: np.random.Generator, counts: list[int], row_bytes: int) -> tuple[list[np.ndarray], RowMap]:
    """Random segments at odd addresses, and their row map."""
    buffers = [rng.integers(0, 256, count * row_bytes + 3, dtype=np.uint8) for count in counts]
    return [b[3:] for b in buffers], RowMap.of([b.ctypes.data + 3 for b in buffers], counts)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["bf16", "fp16", "fp32", "fp8_e4m3"]),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    row_dim=st.sampled_from([1, 3, 16, 33, 160]),
    counts=st.one_of(
        st.lists(st.integers(1, 40), min_size=1, max_size=6),
        st.tuples(st.integers(1, 9), st.integers(1, 5)).map(lambda t: [t[0]] * t[1]),
    ),
    number=st.integers(0, 3 * PREFETCH_ROWS),
    parallel=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gathers_equal_the_reference(
    name: str, dtype: str, row_dim: int, counts: list[int], number: int, parallel: bool, seed: int
) -> None:
    """Any format, any segments, any alignment, any count around the prefetch distance, serial and parallel."""
    rng = np.random.default_rng(seed)
    row_format = RowFormat(name, row_dim, 0.5 if name == "fp8_e4m3" else None)
    segments, at = packed(rng, counts, row_format.row_bytes)
    table = np.concatenate(segments).reshape(-1, row_format.row_bytes)
    rows = rng.integers(0, len(table), number)
    where = (at.bases, at.starts, at.step, rows, row_format.row_bytes)
    end = (3,) if parallel else (0, number)
    raw = np.full((number, row_format.row_bytes), 0xAA, np.uint8)
    assert (copy_rows_parallel if parallel else copy_rows)(*where, raw, *end) == -1
    assert np.array_equal(raw, table[rows])

    codes = None if name == "fp32" else row_format.codes_to_values(dtype)
    if codes is None:
        return
    out = np.zeros((number, row_dim), codes.dtype)
    zero = np.uint8(0) if name == "fp8_e4m3" else np.uint16(0)
    assert (decode_rows_parallel if parallel else decode_rows)(*where, zero, codes, out, *end) == -1
    expected = row_format.decode_reference(table[rows], dtype).view(codes.dtype)
    nan = np.isnan(row_format.decode_reference(table[rows], dtype).astype(np.float32))
    assert np.array_equal(out[~nan], expected[~nan])


@pytest.mark.parametrize("bad", [-1, 12, 2**62, -(2**62)])
@pytest.mark.parametrize("place", [0, 1, 40])
def test_a_row_outside_the_table_is_found_before_it_is_read(bad: int, place: int) -> None:
    _, at = packed(np.random.default_rng(0), [5, 7], 16)
    rows = np.arange(41) % 12
    rows[place] = bad
    raw = np.zeros((41, 16), np.uint8)
    assert copy_rows(at.bases, at.starts, at.step, rows, 16, raw, 0, 41) == place
    assert copy_rows_parallel(at.bases, at.starts, at.step, rows, 16, raw, 4) == place
    codes = RowFormat("fp8_e4m3", 16, 1.0).codes_to_values("bf16")
    out = np.zeros((41, 16), np.uint16)
    assert decode_rows(at.bases, at.starts, at.step, rows, 16, np.uint8(0), codes, out, 0, 41) == place
    assert decode_rows_parallel(at.bases, at.starts, at.step, rows, 16, np.uint8(0), codes, out, 4) == place


def test_equal_segments_are_divided_and_others_are_searched() -> None:
    assert RowMap.of([1, 2, 3], [4, 4, 3]).step == 4
    assert RowMap.of([1, 2, 3], [4, 3, 4]).step == 0
    assert RowMap.of([1, 2], [4, 5]).step == 0
    assert RowMap.of([1], [9]).step == 9


@pytest.mark.parametrize("scale", [None, 0.0, float("nan"), float("inf"), -0.0])
def test_fp8_without_a_usable_scale_is_refused(scale: float | None) -> None:
    with pytest.raises(CheckpointError, match="weight_scale"):
        detect("F8_E4M3", 160, scale, "file x: tensor t")


def test_other_refusals_name_the_place() -> None:
    with pytest.raises(CheckpointError, match=r"file x: tensor t: expected dtype .*found U8"):
        detect("U8", 80, None, "file x: tensor t")
    with pytest.raises(CheckpointError, match="no scale"):
        detect("BF16", 160, 0.5, "file x: tensor t")


def test_the_reference_itself_by_hand() -> None:
    """Expected bytes written out: 0x38 is 1.0, 0xC0 is -2.0, 0x01 the least subnormal 2**-9."""
    rows = np.array([[0x38, 0xC0, 0x01]], np.uint8)
    assert RowFormat("fp8_e4m3", 3, 4.0).decode_reference(rows, "fp32").tolist() == [[4.0, -8.0, 2.0**-7]]
    bf16 = np.array([[0x80, 0x3F, 0x00, 0xC0]], np.uint8)
    assert RowFormat("bf16", 2).decode_reference(bf16, "bf16").tolist() == [
        [ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(-2)]
    ]
