"""The plain GPU gather that engines have: one program for each row, as many programs as rows, nothing else thought of.

Works on any address the GPU can read: its own memory, or page-locked memory of the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(table, rows, out, words: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < words
    row = table.to(tl.pointer_type(tl.int64)) + tl.load(rows + place) * words
    tl.store(out + place * words + column, tl.load(row + column, mask=inside, other=0), mask=inside)


@triton.jit
def _copy_and_decode(table, rows, out, scale, row_dim: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < row_dim
    row = table.to(tl.pointer_type(tl.uint8)) + tl.load(rows + place) * row_dim
    codes = tl.load(row + column, mask=inside, other=0)
    # exact in float32, rounded once
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out + place * row_dim + column, values.to(tl.bfloat16), mask=inside)


def copy(address: int, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, words] int64 from rows [n] of a table of so many words a row."""
    words = out.shape[1]
    _copy[(rows.numel(),)](address, rows, out, words=words, block=triton.next_power_of_2(words), num_warps=1)


def copy_and_decode(address: int, rows: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """out [n, row_dim] bf16 from rows [n] of an FP8 table; `scale` was rounded to bf16."""
    row_dim = out.shape[1]
    block = triton.next_power_of_2(row_dim)
    _copy_and_decode[(rows.numel(),)](address, rows, out, scale, row_dim=row_dim, block=block, num_warps=1)
