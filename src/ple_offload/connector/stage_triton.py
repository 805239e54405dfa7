"""A step's beginning on a GPU, in one kernel: inputs into the worker's memory, the step's number behind them.

One launch, because each call into the driver costs the host some microseconds before the worker can begin. What the model's
wait reads (`control`, see drain_triton.py) is written by the same kernel, so it changes in stream order.

The last of the programs to finish announces the step: each counts itself when its own part is written, and whoever finds
that all others were there before has seen their writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ple_offload.connector.drain_triton import CONTROL_WORDS, INTERPRETED
from ple_offload.launch import Launch

CHUNK = 1024  # integers of one turn
MAX_PROGRAMS = 64

# What a launch does beside copying.
COPY, TELL, ANNOUNCE = 0, 1, 2


@triton.jit
def _copy(source, target, count, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`count` int32 or int64 to int64 at an address, this program's share."""
    for first in range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < count, other=0).to(tl.int64)
        tl.store(target.to(tl.pointer_type(tl.int64)) + place, values, mask=place < count)


@triton.jit
def _store_release(address, value, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a word in the host's memory, by one thread, after everything this program wrote or saw written."""
    if INTERPRETED:
        tl.store(address.to(tl.pointer_type(tl.int64)), value)
    else:
        tl.debug_barrier()
        thread = tl.arange(0, 128)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $3, 0; mov.u32 $0, 0; @p st.release.sys.global.u64 [$1], $2; }",
            "=r,l,l,r",
            [address + tl.zeros_like(thread), value + tl.zeros_like(thread), thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(
    do_not_specialize=[
        "a_at", "a_count", "b_at", "b_count", "c_at", "c_count", "head", "announced", "flag", "slot", "limit_ns",
        "step", "num_reqs", "num_tokens", "layers",
    ],
    do_not_specialize_on_alignment=["a", "b", "c"],
)  # fmt: skip
def _begin(  # type: ignore[no-untyped-def]
    a,  # the sources, int32 or int64; where each one goes in the region, and how many integers of it
    a_at: tl.int64,
    a_count: tl.int64,
    b,
    b_at: tl.int64,
    b_count: tl.int64,
    c,
    c_at: tl.int64,
    c_count: tl.int64,
    head: tl.int64,  # address of the slot's head: step, num_reqs, num_tokens
    announced: tl.int64,  # address of the word that the worker looks at
    control,  # (layers, CONTROL_WORDS) int64
    rows_per_token,  # (layers,) int64
    layers: tl.int64,
    counter,  # (1,) int32, 0 between launches
    step: tl.int64,
    num_reqs: tl.int64,
    num_tokens: tl.int64,  # of the step; 0 for a dummy
    flag: tl.int64,
    slot: tl.int64,
    limit_ns: tl.int64,
    WHAT: tl.constexpr,  # 0 copy, 1 tell the model's wait as well, 2 announce the step to the worker as well
    CONTROL_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    _copy(a, a_at, a_count, CHUNK)
    _copy(b, b_at, b_count, CHUNK)
    _copy(c, c_at, c_count, CHUNK)
    last = tl.num_programs(0) == 1
    if not last:
        tl.debug_barrier()
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(counter, 0)
        if WHAT > 0:
            for i in range(layers):
                at = control + i * CONTROL_WORDS
                tl.store(at, flag)
                tl.store(at + 1, num_tokens * tl.load(rows_per_token + i))
                tl.store(at + 2, slot)
                tl.store(at + 3, limit_ns)
        if WHAT == 2:
            words = head.to(tl.pointer_type(tl.int64))
            tl.store(words, step)
            tl.store(words + 1, num_reqs)
            tl.store(words + 2, num_tokens)
            _store_release(announced, step, INTERPRETED)


@dataclass(frozen=True)
class Source:
    """Integers on the device, and the address in the region to which `count` of them go."""

    tensor: torch.Tensor
    at: int
    count: int


class Beginning:
    """The first thing on the stream of every step; see the module. Allocates nothing per step.

    rows_per_token: of each layer. announced: address of the region's word, as the device sees it.
    """

    def __init__(self, rows_per_token: tuple[int, ...], announced: int, limit_ns: int, device: torch.device) -> None:
        layers = len(rows_per_token)
        self.control = torch.zeros((layers, CONTROL_WORDS), dtype=torch.int64, device=device)
        self._rows_per_token = torch.tensor(rows_per_token, dtype=torch.int64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.device_bytes = self.control.nbytes + self._rows_per_token.nbytes + self._counter.nbytes
        self._nothing = Source(self._rows_per_token, announced, 0)
        self._announced, self._limit_ns = announced, limit_ns
        self._start = Launch(_begin)

    def tell(self, flag: int, slot: int, num_tokens: int) -> None:
        """What the model waits for next; the inputs are the host's affair, or it is a dummy, of 0 tokens."""
        self._launch([], TELL, 0, 0, 0, num_tokens, flag, slot)

    def stage(
        self,
        sources: list[Source],
        *,
        head: int,
        step: int,
        num_reqs: int,
        num_tokens: int,
        flag: int,
        slot: int,
    ) -> None:
        """Copy the sources, tell the model's wait, and announce the step."""
        while len(sources) > 3:  # row numbers of many layers
            self._launch(sources[:3], COPY, 0, 0, 0, 0, 0, 0)
            sources = sources[3:]
        self._launch(sources, ANNOUNCE, head, step, num_reqs, num_tokens, flag, slot)

    def _launch(
        self,
        sources: list[Source],
        what: int,
        head: int,
        step: int,
        num_reqs: int,
        num_tokens: int,
        flag: int,
        slot: int,
    ) -> None:
        a, b, c = [*sources, self._nothing, self._nothing, self._nothing][:3]
        most = max(a.count, b.count, c.count)
        self._start(
            (what, a.tensor.dtype, b.tensor.dtype, c.tensor.dtype),
            max(1, min(MAX_PROGRAMS, most // CHUNK)),
            a.tensor, a.at, a.count,
            b.tensor, b.at, b.count,
            c.tensor, c.at, c.count,
            head, self._announced,
            self.control, self._rows_per_token, len(self._rows_per_token), self._counter,
            step, num_reqs, num_tokens, flag, slot, self._limit_ns,
            constants=lambda: {
                "WHAT": what, "CONTROL_WORDS": CONTROL_WORDS, "CHUNK": CHUNK, "INTERPRETED": INTERPRETED
            },
        )  # fmt: skip
