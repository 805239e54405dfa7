"""Gather rows from host memory and decode them, on a GPU: the formats' Triton half. The reference is formats/base.py.

Rows are read in words as wide as their alignment allows (8 bytes where every row starts at a multiple of 8): one warp then
asks for a whole row at once, and the bus sees one or two requests instead of five. Each word is split into its codes in
registers. The grid is capped: some 256 rows on their way keep the bus busy, and on every multiprocessor that waits for it
the model's own kernels cannot run.

Row -1 gathers as zeros, and a row number outside the table as NaN: nothing that was not checked becomes an address.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ple_offload.errors import UsageError
from ple_offload.formats.base import RowFormat
from ple_offload.launch import Launch

KINDS = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8_e4m3": 3}
KIND_RAW = 4  # the values are wanted as they are stored: bits are moved, nothing is computed
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers of the same width."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def nan_bits(dtype: torch.dtype) -> int:
    """The NaN that torch writes, as an integer of the dtype's width."""
    return {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}[dtype]


@lru_cache(maxsize=64)
def rounded_scale(row_format: RowFormat, dtype: torch.dtype) -> float:
    """The scale as it is when values of `dtype` are computed with it; 1 for formats that have none."""
    return 1.0 if row_format.scale is None else float(torch.tensor(row_format.scale).to(dtype))


@triton.jit
def decode(codes, scale, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unsigned codes -> float32 values, exact; `scale` (fp8 only) was rounded to the dtype the values are stored in."""
    if KIND == 0:
        values = (codes.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        values = codes.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == 2:
        values = codes.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        # exact in float32, so this rounds once, as row in OUT times scale in OUT does
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
        values = tl.where((codes.to(tl.uint8) & 0x7F) == 0x7F, float("nan"), values)  # the interpreter reads 480
    return values


@triton.jit
def bf16_bits(values):  # type: ignore[no-untyped-def]
    """float32 -> the bits of the nearest bf16 (even on a tie), as int32; Triton's interpreter would truncate."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values != values, 0x7FC0, rounded.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows", "segments", "step"], do_not_specialize_on_alignment=["rows", "size", "bad"])
def _gather(  # type: ignore[no-untyped-def]
    bases,  # (segments,) int64 addresses, as the device sees them
    starts,  # (segments + 1,) int64
    rows,  # (num_rows,) int64; given ones int32 or int64
    size,  # see Given
    bad,
    out,  # (num_rows, ROW_DIM)
    num_rows: tl.int64,
    segments: tl.int64,
    step: tl.int64,
    scale,
    ROW_BYTES: tl.constexpr,
    ROW_DIM: tl.constexpr,
    WORD: tl.constexpr,  # dtype of a word
    WORD_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    WORDS_P2: tl.constexpr,  # words of a row, up to a power of two
    SEARCH: tl.constexpr,  # 0: equal segments
    KIND: tl.constexpr,
    AS_BF16: tl.constexpr,  # out holds the bits of bf16 values
    NAN: tl.constexpr,  # bits of a NaN, for KIND 4
    ROWS: tl.constexpr,  # rows of one turn of one program
    ROWS_PER_TOKEN: tl.constexpr,  # of given rows, else 0
    PLACE_BIT: tl.constexpr,
):
    per_word: tl.constexpr = WORD_BYTES // CODE_BYTES
    words = tl.arange(0, WORDS_P2)
    inner = tl.arange(0, per_word)
    total = tl.load(starts + segments)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        place = first + tl.arange(0, ROWS)
        asked = place < num_rows
        if ROWS_PER_TOKEN > 0:
            step_word = tl.load(size)
            given = asked & (place < (step_word & 0xFFFFFFFF) * ROWS_PER_TOKEN)
            row = tl.load(rows + place, mask=given, other=-1).to(tl.int64)
            wrong = given & ((row < 0) | (row >= total))
            word = bad + (step_word >> PLACE_BIT) + tl.zeros((ROWS,), tl.int64)
            tl.atomic_min(word, place.to(tl.int64) // ROWS_PER_TOKEN, mask=wrong)
        else:
            row = tl.load(rows + place, mask=asked, other=-1)
            wrong = asked & (row != -1) & ((row < 0) | (row >= total))
        there = asked & (row >= 0) & (row < total)
        row = tl.where(there, row, 0)
        if SEARCH == 0:
            segment = (row // step).to(tl.int32)
        else:
            segment = tl.zeros((ROWS,), tl.int32)
            for i in tl.static_range(SEARCH):
                ahead = segment + (1 << (SEARCH - 1 - i))
                begin = tl.load(starts + ahead, mask=ahead < segments, other=0)
                segment = tl.where((ahead < segments) & (begin <= row), ahead, segment)
        base = tl.load(bases + segment)
        begin = tl.load(starts + segment)
        address = (base + (row - begin) * ROW_BYTES).to(tl.pointer_type(WORD))
        inside = words < ROW_BYTES // WORD_BYTES
        loaded = tl.load(address[:, None] + words[None, :], mask=there[:, None] & inside[None, :], other=0)
        codes = loaded[:, :, None] >> (inner * (8 * CODE_BYTES)).to(WORD)[None, None, :]
        if KIND == 4:
            values = tl.where(wrong[:, None, None], NAN, codes.to(tl.int32)).to(out.dtype.element_ty)
        else:
            values = tl.where(wrong[:, None, None], float("nan"), decode(codes, scale, KIND))
            if AS_BF16:
                values = bf16_bits(values)
            values = values.to(out.dtype.element_ty)
        element = words[None, :, None] * per_word + inner[None, None, :]
        target = out + place[:, None, None].to(tl.int64) * ROW_DIM + element
        tl.store(target, values, mask=asked[:, None, None] & inside[None, :, None])


def word_bytes(row_bytes: int, addresses: npt.NDArray[np.uint64], code_bytes: int) -> int:
    """The widest word that divides a row and every address; at least a code, or UsageError where codes are not aligned."""
    width = math.gcd(8, row_bytes, *(int(address) for address in addresses))
    if width < code_bytes:
        raise UsageError(
            f"rows: expected them at multiples of {code_bytes} bytes, as long as a code is, found multiples of {width}. "
            "Use tier 'ram', which packs them, or route 'staged'."
        )
    return width


@dataclass(frozen=True)
class Given:
    """Row numbers that the engine computed, as they stand on the device, with what a captured graph reads at each replay.

    Rows of tokens behind the step's gather as zeros; one outside the table as NaN, and its token is told.

    size: [1] int64: tokens of the step in its low 32 bits; from bit `place_bit` on, which word of `bad` is the step's.
    bad: int64 words, of which the step's gets the lowest position of a token with a bad row.
    """

    size: torch.Tensor
    bad: torch.Tensor
    rows_per_token: int
    place_bit: int


class GatherOnDevice:
    """Rows of one row map, gathered and decoded by a device. Safe in a CUDA graph: allocates nothing.

    bases: the addresses of the segments as the device sees them; starts, step: as of a RowMap.
    programs: the cap of the grid.
    """

    ROWS = 8

    def __init__(
        self,
        row_format: RowFormat,
        bases: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        step: int,
        device: torch.device,
        programs: int = 32,
    ) -> None:
        self._bases = torch.from_numpy(bases.view(np.int64).copy()).to(device)
        self._starts = torch.from_numpy(starts.copy()).to(device)
        self.device_bytes = self._bases.nbytes + self._starts.nbytes
        self._step = step
        self._programs = programs
        self._format = row_format
        code_bytes = row_format.stored_dtype.itemsize
        width = word_bytes(row_format.row_bytes, bases, code_bytes)
        self._constants: dict[str, Any] = {
            "ROW_BYTES": row_format.row_bytes,
            "ROW_DIM": row_format.row_dim,
            "WORD": WORDS[width],
            "WORD_BYTES": width,
            "CODE_BYTES": code_bytes,
            "WORDS_P2": triton.next_power_of_2(row_format.row_bytes // width),
            "SEARCH": 0 if step else len(bases).bit_length(),
        }
        self._launch = Launch(_gather)

    def run(self, rows: torch.Tensor, out: torch.Tensor, given: Given | None = None) -> None:
        """Fill out [rows.numel(), row_dim] of bf16, fp16 or fp32 from rows; both contiguous on the device.

        rows: int64 of this package's own kernels, or given ones, int32 or int64.
        """
        count = rows.numel()
        if not count:
            return
        raw = NAMES[out.dtype] == self._format.name
        self._launch(
            (out.dtype, rows.dtype, given is None),
            min(self._programs, triton.cdiv(count, self.ROWS)),
            self._bases,
            self._starts,
            rows,
            self._starts if given is None else given.size,
            self._starts if given is None else given.bad,
            as_integers(out) if raw or out.dtype == torch.bfloat16 else out,
            count,
            self._bases.numel(),
            self._step,
            rounded_scale(self._format, out.dtype),
            constants=lambda: {
                **self._constants,
                "KIND": KIND_RAW if raw else KINDS[self._format.name],
                "AS_BF16": out.dtype == torch.bfloat16,
                "NAN": nan_bits(out.dtype),
                "ROWS": self.ROWS,
                "ROWS_PER_TOKEN": 0 if given is None else given.rows_per_token,
                "PLACE_BIT": 0 if given is None else given.place_bit,
            },
        )
