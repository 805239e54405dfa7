"""Row numbers that the engine computed, checked on the device and brought to int64: for `direct` with request "rows".

The number of tokens is read from memory, so that a captured graph replays with other steps. Rows of tokens behind it are
-1, which gathers as zeros; one outside the table becomes -2, which gathers as NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ple_offload.families.qwen_ple_triton import PLACE_BIT


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["source", "out", "size", "bad"]
)
def _take(  # type: ignore[no-untyped-def]
    source,  # (>= num_tokens, HEADS) int32 or int64
    size,  # (1,) int64: tokens of the step in its low half; from bit PLACE_BIT on, which word of `bad` is the step's
    out,  # (num_tokens, HEADS) int64
    bad,  # (places,) int64: position of a token with a bad row, a lower one wins
    num_tokens: tl.int64,
    num_rows: tl.int64,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE_BIT: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(size)
    live = (t < num_tokens) & (t < (step & 0xFFFFFFFF))
    heads = tl.arange(0, HEADS_P2)
    place = t[:, None].to(tl.int64) * HEADS + heads[None, :]
    wanted = live[:, None] & (heads < HEADS)[None, :]
    row = tl.load(source + place, mask=wanted, other=0).to(tl.int64)
    wrong = wanted & ((row < 0) | (row >= num_rows))
    row = tl.where(wrong, -2, tl.where(live[:, None], row, -1))
    tl.store(out + place, row, mask=(t < num_tokens)[:, None] & (heads < HEADS)[None, :])
    word = bad + (step >> PLACE_BIT) + tl.zeros((BLOCK,), tl.int64)
    tl.atomic_min(word, t.to(tl.int64), mask=tl.max(wrong.to(tl.int32), axis=1) > 0)


BLOCK = 16


def take_rows(source: torch.Tensor, size: torch.Tensor, out: torch.Tensor, bad: torch.Tensor, num_rows: int) -> None:
    """Fill out [num_tokens, rows_per_token] int64 from the first rows of `source`, contiguous, int32 or int64.

    size [1] int64: how many tokens the step has, in its low 32 bits, and from bit PLACE_BIT on, which word of `bad` int64
    gets the first position that is bad.
    """
    num_tokens, heads = out.shape
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        sizes = {"HEADS": heads, "HEADS_P2": triton.next_power_of_2(heads), "BLOCK": BLOCK, "PLACE_BIT": PLACE_BIT}
        _take[grid](source, size, out, bad, num_tokens, num_rows, **sizes)
