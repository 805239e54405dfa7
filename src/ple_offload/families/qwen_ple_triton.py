"""Qwen4Exp row numbers on a GPU: the rule of qwen_ple.py, one Triton kernel over ragged inputs.

Every size that a step changes is read from memory, so that a captured graph replays with other steps: a graph is captured
for `num_tokens` tokens and `num_reqs` requests, and a smaller step has trailing empty requests (query_start_loc repeats its
last value). Tokens from query_start_loc[num_reqs] on get row -1, which gathers as zeros; a token whose n-gram holds an id
outside the vocabulary gets row -2, which gathers as NaN. Its position goes to the step's own word, since several steps may
be in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ple_offload.families.qwen_ple import QwenPle
from ple_offload.launch import Launch

# What `bad` holds while every id so far was in the vocabulary.
NO_BAD_ID = (1 << 62) - 1
# Where in a step's word on the device (connector/direct.py) its place among the words of `bad` begins.
PLACE_BIT = 56


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "search", "vocab_size", "eos"],
    do_not_specialize_on_alignment=["input_ids", "query_start_loc", "ngram_context", "out", "bad", "step"],
)
def _row_numbers(  # type: ignore[no-untyped-def]
    input_ids,  # (num_tokens,) int32 or int64
    query_start_loc,  # (num_reqs + 1,) int32 or int64
    ngram_context,  # (num_reqs, N - 1) int32 or int64
    constants,  # (N + 2 * HEADS,) int64: multipliers, sizes, offsets
    out,  # (num_tokens, HEADS) int64
    bad,  # (places,) int64: position of a bad id, a lower one wins
    step,  # (1,) int64: from bit PLACE_BIT on, which of them is the step's
    num_tokens: tl.int64,
    num_reqs: tl.int64,
    search: tl.int64,  # steps of the binary search: 2**search > num_reqs
    vocab_size: tl.int64,
    eos: tl.int64,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE_BIT: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(query_start_loc + num_reqs).to(tl.int64)
    live = (t < num_tokens) & (t < used)
    # the last request that starts at or before t; empty requests share their start with the next one
    request = tl.zeros((BLOCK,), tl.int64)
    for i in range(search):
        ahead = request + (1 << (search - 1 - i))
        inside = ahead < num_reqs
        start_ahead = tl.load(query_start_loc + ahead, mask=live & inside, other=0).to(tl.int64)
        request = tl.where(inside & (start_ahead <= t), ahead, request)
    start = tl.load(query_start_loc + request, mask=live, other=0).to(tl.int64)

    token = tl.load(input_ids + t, mask=live, other=0).to(tl.int64)
    wrong = live & ((token < 0) | (token >= vocab_size))
    mix = token * tl.load(constants)
    cut = t < 0
    heads = tl.arange(0, HEADS_P2)
    order_of_head = heads // (HEADS // (N - 1)) + 2
    size = tl.load(constants + N + heads, mask=heads < HEADS, other=1)
    offset = tl.load(constants + N + HEADS + heads, mask=heads < HEADS, other=0)
    rows = tl.zeros((BLOCK, HEADS_P2), tl.int64)
    for s in tl.static_range(1, N):
        inside = t - s >= start
        earlier = tl.load(input_ids + t - s, mask=live & inside, other=0).to(tl.int64)
        column = N - 1 + t - s - start
        older = tl.load(ngram_context + request * (N - 1) + column, mask=live & (inside == 0), other=0).to(tl.int64)
        token = tl.where(inside, earlier, older)
        wrong = wrong | (live & (cut == 0) & ((token < 0) | (token >= vocab_size)))
        token = tl.where(cut, eos, token)
        cut = cut | (token == eos)
        mix = mix ^ (token * tl.load(constants + s))
        row = mix[:, None] % size[None, :]
        row = tl.where(row < 0, row + size[None, :], row)  # the floor modulus, also where the product wrapped
        rows = tl.where(order_of_head[None, :] == s + 1, row + offset[None, :], rows)
    rows = tl.where(wrong[:, None], -2, tl.where(live[:, None], rows, -1))
    place = out + t[:, None].to(tl.int64) * HEADS + heads[None, :]
    tl.store(place, rows, mask=(t < num_tokens)[:, None] & (heads < HEADS)[None, :])
    tl.atomic_min(bad + (tl.load(step) >> PLACE_BIT) + tl.zeros((BLOCK,), tl.int64), t.to(tl.int64), mask=wrong)


class QwenPleOnDevice:
    """The constants of one table on a device, and the launch. Safe in a CUDA graph: allocates nothing."""

    BLOCK = 16

    def __init__(self, family: QwenPle, device: torch.device) -> None:
        self._family = family
        values = [*family.multipliers, *family.head_sizes, *family.head_offsets]
        self._constants = torch.tensor(values, dtype=torch.int64, device=device)
        self._launch = Launch(_row_numbers)
        self.device_bytes = self._constants.nbytes

    def row_numbers(
        self,
        input_ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        ngram_context: torch.Tensor,
        out: torch.Tensor,
        bad: torch.Tensor,
        step: torch.Tensor,
    ) -> None:
        """Fill out [num_tokens, rows_per_token] int64; a word of `bad` int64 gets the position of the first bad id, if any.

        step [1] int64: which word that is, from bit PLACE_BIT on. A position is of the token whose n-gram holds the bad id.
        All tensors are contiguous on one device.
        """
        num_tokens, heads = out.shape
        num_reqs = query_start_loc.shape[0] - 1
        if num_tokens:
            self._launch(
                (input_ids.dtype, query_start_loc.dtype, ngram_context.dtype),
                triton.cdiv(num_tokens, self.BLOCK),
                input_ids,
                query_start_loc,
                ngram_context,
                self._constants,
                out,
                bad,
                step,
                num_tokens,
                num_reqs,
                max(1, num_reqs).bit_length(),
                self._family.vocab_size,
                self._family.eos_token_id,
                constants=lambda: {
                    "N": self._family.ngram_size,
                    "HEADS": heads,
                    "HEADS_P2": triton.next_power_of_2(heads),
                    "BLOCK": self.BLOCK,
                    "PLACE_BIT": PLACE_BIT,
                },
            )
