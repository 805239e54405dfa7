"""The shared memory of one rank: a memfd that the client makes, sealed in size, mapped by both sides.

Everything about it follows from the client's Hello, so both sides compute the same `Layout`. All words are uint64; each
array starts at a multiple of 64 bytes, each output at a page.

    words   announced   client   the last step it has published (a dummy step is none)
            coming      client   the last step whose inputs a device is about to write, and then to announce itself
            expected    client   the tokens of that step, about: worker threads are woken for many
            released    client   every step up to this one has been consumed; its slot may be written again
            waited      client   ns it has waited for flags since it connected; for the worker's figures only
            waiters     client   1 while it sleeps on a flag of this region
    flags   [layers][slots][blocks]                     worker   see ipc/words.py; one per block of rows
    inputs  [slots] (TP rank 0 only)                    client
            head    step, num_reqs, num_tokens
            tokens: input_ids [max_num_tokens], query_start_loc [max_num_reqs + 1],
                    ngram_context [max_num_reqs, context_len], all int64
            rows:   row_numbers [layers][max_num_tokens, rows_per_token] int64
    outputs [layers][slots][max_num_tokens, bytes per token]    worker

Step s lives in slot s % slots: at most `slots` steps are in flight and they are released in order. A block is BLOCK_ROWS
rows, so a reader can work on the first block while the writer gathers the second.

A rank whose rows go to a GPU (Hello.device) shares memory of that GPU as well, laid out as a region without inputs and with
blocks of DEVICE_BLOCK_ROWS: the worker copies outputs there and raises flags there. Nobody uses the words there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ple_offload.ipc.messages import Hello

BLOCK_ROWS = 256
DEVICE_BLOCK_ROWS = 1 << 14  # of memory on a GPU: each block is a copy of its own, which costs some microseconds
PAGE = 4096
WORD_ANNOUNCED, WORD_RELEASED, WORD_WAITERS = 0, 8 * 8, 16 * 8  # byte offsets: a cache line each
WORD_WAITED = 9 * 8  # written together with `released`
WORD_COMING, WORD_EXPECTED = 1 * 8, 2 * 8  # beside `announced`, which follows them
WORDS_BYTES = 24 * 8
HEAD_WORDS = 8

MAX_REGION_BYTES = 1 << 40


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class Layout:
    """Byte offsets into a region. `token_bytes` and `rows_per_token` have one entry per layer of the Hello."""

    request: str
    slots: int
    max_num_tokens: int
    max_num_reqs: int
    context_len: int
    has_inputs: bool
    token_bytes: tuple[int, ...]  # output bytes of one token, per layer
    rows_per_token: tuple[int, ...]
    block_rows: int = BLOCK_ROWS

    @classmethod
    def of(cls, hello: Hello, token_bytes: tuple[int, ...], rows_per_token: tuple[int, ...]) -> Layout:
        return cls(
            hello.request,
            hello.slots,
            hello.max_num_tokens,
            hello.max_num_reqs,
            hello.context_len,
            hello.tp_rank == 0,
            token_bytes,
            rows_per_token,
        )

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of a full step, per layer."""
        return tuple(-(-self.max_num_tokens * rows // self.block_rows) for rows in self.rows_per_token)

    @cached_property
    def _flags(self) -> tuple[int, ...]:
        """Offset of each layer's flags, then of what follows them."""
        offsets = [WORDS_BYTES]
        for blocks in self.blocks:
            offsets.append(_up(offsets[-1] + self.slots * blocks * 8, 64))
        return tuple(offsets)

    @cached_property
    def input_bytes(self) -> int:
        """One input slot."""
        if not self.has_inputs:
            return 0
        if self.request == "rows":
            numbers = self.max_num_tokens * sum(self.rows_per_token)
        else:
            numbers = self.max_num_tokens + self.max_num_reqs + 1 + self.max_num_reqs * self.context_len
        return _up((HEAD_WORDS + numbers) * 8, 64)

    @cached_property
    def _outputs(self) -> tuple[int, ...]:
        offsets = [_up(self._flags[-1] + self.slots * self.input_bytes, PAGE)]
        for token_bytes in self.token_bytes:
            offsets.append(offsets[-1] + self.slots * _up(self.max_num_tokens * token_bytes, PAGE))
        return tuple(offsets)

    @property
    def on_device(self) -> Layout:
        """Of the memory on a GPU: no inputs, the same outputs, a flag for each of its larger blocks."""
        return replace(self, has_inputs=False, block_rows=DEVICE_BLOCK_ROWS)

    @property
    def num_bytes(self) -> int:
        return max(self._outputs[-1], PAGE)

    def flag(self, layer: int, slot: int, block: int) -> int:
        return self._flags[layer] + (slot * self.blocks[layer] + block) * 8

    def input(self, slot: int) -> int:
        return self._flags[-1] + slot * self.input_bytes

    def output(self, layer: int, slot: int) -> int:
        return self._outputs[layer] + slot * _up(self.max_num_tokens * self.token_bytes[layer], PAGE)
