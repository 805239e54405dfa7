"""Row numbers that the engine computed, checked on the device and brought to int64: for `direct` with request "rows".

The number of tokens is read from memory, so that a captured graph replays with other steps. Rows of tokens behind it are
-1, which gathers as zeros; one outside the table becomes -2, which gathers as NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["source", "out"])
def _take(  # type: ignore[no-untyped-def]
    source,  # (>= num_tokens, HEADS) int32 or int64
    size,  # (1,) int64: tokens of the step in its low half
    out,  # (num_tokens, HEADS) int64
    bad,  # (1,) int64: position of a token with a bad row, a lower one wins
    num_tokens: tl.int64,
    num_rows: tl.int64,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (t < num_tokens) & (t < (tl.load(size) & 0xFFFFFFFF))
    heads = tl.arange(0, HEADS_P2)
    place = t[:, None].to(tl.int64) * HEADS + heads[None, :]
    wanted = live[:, None] & (heads < HEADS)[None, :]
    row = tl.load(source + place, mask=wanted, other=0).to(tl.int64)
    wrong = wanted & ((row < 0) | (row >= num_rows))
    row = tl.where(wrong, -2, tl.where(live[:, None], row, -1))
    tl.store(out + place, row, mask=(t < num_tokens)[:, None] & (heads < HEADS)[None, :])
    tl.atomic_min(bad + tl.zeros((BLOCK,), tl.int32), t.to(tl.int64), mask=tl.max(wrong.to(tl.int32), axis=1) > 0)


BLOCK = 16


def take_rows(source: torch.Tensor, size: torch.Tensor, out: torch.Tensor, bad: torch.Tensor, num_rows: int) -> None:
    """Fill out [num_tokens, rows_per_token] int64 from the first rows of `source`, contiguous, int32 or int64.

    size [1] int64: how many tokens the step has, in its low 32 bits. bad [1] int64: gets the first position that is bad.
    """
    num_tokens, heads = out.shape
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        sizes = {"HEADS": heads, "HEADS_P2": triton.next_power_of_2(heads), "BLOCK": BLOCK}
        _take[grid](source, size, out, bad, num_tokens, num_rows, **sizes)
