"""What a row's bytes stand for, bit for bit against torch; and the compiled gathers against plain NumPy."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ple_offload.errors import CheckpointError
from ple_offload.formats import VALUE_DTYPES, RowFormat, detect
from ple_offload.formats.gather import CHUNK_ROWS, FAULTED, GATHERED, PREFETCH_ROWS, Gather, Readers, _find
from ple_offload.memory import sigbus
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
    number=st.one_of(
        st.integers(0, 3 * PREFETCH_ROWS),
        st.sampled_from([CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS + 9]),
    ),
    parallel=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gathers_equal_the_reference(
    name: str, dtype: str, row_dim: int, counts: list[int], number: int, parallel: bool, seed: int
) -> None:
    """Any format, any segments, any alignment, any count around the prefetch distance and a chunk, serial and parallel."""
    rng = np.random.default_rng(seed)
    row_format = RowFormat(name, row_dim, 0.5 if name == "fp8_e4m3" else None)
    segments, at = packed(rng, counts, row_format.row_bytes)
    table = np.concatenate(segments).reshape(-1, row_format.row_bytes)
    rows = rng.integers(0, len(table), number)
    shares = 3 if parallel else 1
    raw = np.full((number, row_format.row_bytes), 0xAA, np.uint8)
    assert Gather(row_format, at.bases, at.starts, at.step, "stored").run(rows, raw, shares) == GATHERED
    assert np.array_equal(raw, table[rows])

    out = np.zeros((number, row_dim), VALUE_DTYPES[dtype])
    with np.errstate(all="ignore"):
        assert Gather(row_format, at.bases, at.starts, at.step, dtype).run(rows, out, shares) == GATHERED
        expected = row_format.decode_reference(table[rows], dtype)
    bits, nan = f"u{out.itemsize}", np.isnan(expected.astype(np.float32))
    assert np.array_equal(out.view(bits)[~nan], expected.view(bits)[~nan])
    assert np.isnan(out[nan].astype(np.float32)).all()


@pytest.mark.parametrize("bad", [-1, 12, 2**62, -(2**62)])
@pytest.mark.parametrize("place", [0, 1, 40, CHUNK_ROWS, 2 * CHUNK_ROWS])
@pytest.mark.parametrize("name", ["stored", "bf16", "fp32"])
def test_a_row_outside_the_table_is_found_before_it_is_read(bad: int, place: int, name: str) -> None:
    _, at = packed(np.random.default_rng(0), [5, 7], 16)
    count = place + 1 if place > 40 else 41
    rows = np.arange(count) % 12
    rows[place] = bad
    out = np.zeros((count, 16), np.uint8 if name == "stored" else VALUE_DTYPES[name])
    gather = Gather(RowFormat("fp8_e4m3", 16, 1.0), at.bases, at.starts, at.step, name)
    assert gather.run(rows, out, 1) == place
    assert gather.run(rows, out, 4) == place


@settings(deadline=None)  # it may have to compile
@example(step=49, segments=9, seed=0)  # one too low: 49 * (1 / 49) < 1
@example(step=(1 << 53) - 1, segments=9, seed=0)  # one too high
@given(
    step=st.one_of(st.integers(1, 9), st.integers(1 << 20, 1 << 40)), segments=st.integers(1, 9), seed=st.integers(0, 9)
)
def test_addresses_at_the_borders_of_equal_segments(step: int, segments: int, seed: int) -> None:
    """Compared with a search, also where a division in floating point is one off; nothing is read."""
    rng = np.random.default_rng(seed)
    last = int(rng.integers(1, step + 1))
    at = RowMap.of(rng.integers(1 << 30, 1 << 32, segments).tolist(), [step] * (segments - 1) + [last])
    near = (at.starts[:, None] + np.arange(-2, 3)).reshape(-1)
    rows = near[(near >= 0) & (near < at.starts[-1])]
    found = np.zeros(rows.size, np.uint64)
    for way in (step, 0):
        found[:] = 0
        assert _find(at.bases, at.starts, way, rows, rows.size, 160, found) == GATHERED
        segment = np.searchsorted(at.starts, rows, side="right") - 1
        assert np.array_equal(found, at.bases[segment] + ((rows - at.starts[segment]) * 160).astype(np.uint64))


class Told:
    """Two readers of one gather, as two processes would be: outputs and flags of their own, of 4-row blocks."""

    def __init__(self, total: int, width: int, dtype: type) -> None:
        self.outs = [np.zeros((total, width), dtype) for _ in range(2)]
        self.flags = [np.zeros(max(1, -(-total // 4)) + 1, np.uint64) for _ in range(2)]
        self.words = np.zeros(3, np.uint64)  # heartbeat, who sleeps, pages that were gone
        beat = self.words.ctypes.data
        addresses = [
            [out.ctypes.data, flags.ctypes.data, 7 + i, beat + 8]
            for i, (out, flags) in enumerate(zip(self.outs, self.flags, strict=True))
        ]
        self.readers = Readers(np.array(addresses, np.uint64), np.array([beat, beat + 16, 0], np.uint64), 4, total)


@pytest.mark.parametrize("number", [0, 1, 4, 41])
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize(("name", "wanted"), [("fp8_e4m3", "stored"), ("fp8_e4m3", "bf16"), ("fp32", "fp16")])
def test_readers_are_told_of_every_block(number: int, padding: int, shares: int, name: str, wanted: str) -> None:
    rng = np.random.default_rng(0)
    row_format = RowFormat(name, 16, 0.5 if name == "fp8_e4m3" else None)
    segments, at = packed(rng, [5, 7], row_format.row_bytes)
    rows = rng.integers(0, 12, number)
    stored = wanted == "stored"
    told = Told(number + padding, 16, np.uint8 if stored else VALUE_DTYPES[wanted])
    gather = Gather(row_format, at.bases, at.starts, at.step, wanted)
    assert gather.run(rows, told.outs[0], shares, told.readers) == GATHERED
    raw = np.concatenate(segments).reshape(12, -1)[rows]
    with np.errstate(all="ignore"):
        expected = raw if stored else row_format.decode_reference(raw, wanted)
    for i, out in enumerate(told.outs):
        assert out[:number].tobytes() == expected.tobytes()
        assert not out[number:].any()
        assert told.flags[i].tolist() == [7 + i] * (told.flags[i].size - 1) + [0]
    assert 0 < told.words[0] < told.flags[0].size  # the heart has beaten; threads that add at once may count as one


@pytest.mark.parametrize("shares", [1, 3])
def test_no_flag_is_raised_behind_a_bad_row_or_a_page_that_was_gone(shares: int) -> None:
    _, at = packed(np.random.default_rng(0), [12], 16)
    gather = Gather(RowFormat("fp8_e4m3", 16, 1.0), at.bases, at.starts, at.step, "stored")
    told, rows = Told(41, 16, np.uint8), np.arange(41) % 12
    rows[17] = 12
    assert gather.run(rows, told.outs[0], shares, told.readers) == 17
    assert told.flags[0][4] == 0
    told, rows[17] = Told(41, 16, np.uint8), 0
    told.words[2] = 1
    assert gather.run(rows, told.outs[0], shares, told.readers) == FAULTED
    assert not told.flags[0].any()


def test_the_count_of_lost_pages_is_where_compiled_code_looks_for_it() -> None:
    word = np.ctypeslib.as_array((ctypes.c_uint64 * 1).from_address(sigbus.count_address()))
    before = sigbus.count()
    word[0] += 5
    assert sigbus.count() == before + 5
    word[0] -= 5


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
