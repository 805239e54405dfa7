"""The model's wait on a GPU: a kernel with a small grid that waits for blocks of rows in host memory and decodes them.

Everything a step changes is read from `control`, at a fixed address, so a captured graph replays with every step. The wait
is bounded by the GPU's own clock, and ends at once when the flag says that the step failed or the host poisons the
connection. Rows that do not come are NaN. Rows behind the step's are zero.

control (4,) int64 on the device, written in stream order before the forward:
    expected flag word, rows of the step, slot, limit in ns
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ple_offload.formats.base import RowFormat
from ple_offload.formats.gather_triton import (
    KIND_RAW,
    KINDS,
    NAMES,
    WORDS,
    as_integers,
    bf16_bits,
    decode,
    nan_bits,
    rounded_scale,
)
from ple_offload.ipc.region import BLOCK_ROWS
from ple_offload.launch import Launch

CONTROL_WORDS = 4
# Why a step's rows did not come: the low bits of its slot's error word, below the step's number. A word of an earlier step
# in the slot says nothing of this one, so nobody has to clear it in time.
TIMED_OUT, STEP_FAILED, POISONED = 1, 2, 3
WHY_BITS = 2

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _look(flag, poison, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(*flag, *poison), each asked for by one thread, not by every one: the bus serves 60 M requests/s."""
    thread = tl.arange(0, THREADS)
    address = tl.where(thread == 0, flag, poison)
    word = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, 2; mov.u64 $0, 0; @p ld.acquire.sys.global.u64 $0, [$1]; }",
        "=&l,l,r",
        [address, thread],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    return tl.sum(tl.where(thread == 0, word, 0)), tl.sum(tl.where(thread == 1, word, 0))


@triton.jit
def _now_ns():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _wait(  # type: ignore[no-untyped-def]
    flag, expected, poison, began_ns, limit_ns, THREADS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """0 once *flag is `expected`; else why not: 1 limit_ns are over since began_ns, 2 the step failed, 3 no connection."""
    failed = expected | (1 << 47)
    if INTERPRETED:  # no clock and no other process there: one look
        word = tl.load(flag.to(tl.pointer_type(tl.int64)))
        over = tl.load(poison.to(tl.pointer_type(tl.int64)))
        late = tl.full((), 1, tl.int32)
    else:
        word, over = _look(flag, poison, THREADS)
        late = tl.full((), 0, tl.int32)
        while (word != expected) & (word != failed) & (over == 0) & (late == 0):
            word, over = _look(flag, poison, THREADS)
            late = ((_now_ns() - began_ns) > limit_ns).to(tl.int32)
    return tl.where(word == expected, 0, tl.where(word == failed, 2, tl.where(over != 0, 3, 1))).to(tl.int32)


@triton.jit(do_not_specialize=["stage", "flags", "poison", "errors", "out_rows", "slot_bytes", "blocks_per_slot"])
def _drain(  # type: ignore[no-untyped-def]
    control,  # (4,) int64, device
    stage: tl.int64,  # address of the layer's first slot, as the device sees it
    flags: tl.int64,  # address of the layer's first flag
    poison: tl.int64,  # address of the word that is not 0 once the connection is over
    errors: tl.int64,  # address of the slots' error words, int64
    out,  # (out_rows * ROW_DIM,)
    out_rows: tl.int64,
    slot_bytes: tl.int64,
    blocks_per_slot: tl.int64,
    scale,
    ROW_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    KIND: tl.constexpr,
    AS_BF16: tl.constexpr,
    NAN: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_ROWS: tl.constexpr,  # rows that one flag stands for, a multiple of BLOCK
    WORDS: tl.constexpr,  # words of one turn: enough of them on their way keep the bus busy
    THREADS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expected = tl.load(control)
    num_rows = tl.load(control + 1)
    slot = tl.load(control + 2)
    limit_ns = tl.load(control + 3)
    # once: the limit is the step's, however slowly its blocks come; the interpreter has no clock
    began_ns = limit_ns if INTERPRETED else _now_ns()
    per_word: tl.constexpr = WORD_BYTES // CODE_BYTES
    inner = tl.arange(0, per_word)
    base = stage + slot * slot_bytes
    for block in range(tl.program_id(0), tl.cdiv(out_rows, BLOCK), tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK
        why = tl.full((), 0, tl.int32)
        if first < num_rows:
            flag = flags + (slot * blocks_per_slot + first // FLAG_ROWS) * 8
            why = _wait(flag, expected, poison, began_ns, limit_ns, THREADS, INTERPRETED)
            if why != 0:
                step = expected & ((1 << 47) - 1)
                tl.store((errors + slot * 8).to(tl.pointer_type(tl.int64)), step << 2 | why.to(tl.int64))
        # rows lie one after the other there as here, so they are drained as one line of words
        end = tl.minimum(first + BLOCK, out_rows) * ROW_WORDS
        real = tl.minimum(num_rows, first + BLOCK) * ROW_WORDS
        for begin in range(first * ROW_WORDS, end, WORDS):
            word = begin + tl.arange(0, WORDS)
            address = (base + word * WORD_BYTES).to(tl.pointer_type(WORD))
            loaded = tl.load(address, mask=(word < real) & (why == 0), other=0)
            codes = loaded[:, None] >> (inner * (8 * CODE_BYTES)).to(WORD)[None, :]
            wrong = ((word < real) & (why != 0))[:, None]
            if KIND == 4:
                values = tl.where(wrong, NAN, codes.to(tl.int32)).to(out.dtype.element_ty)
            else:
                values = tl.where(wrong, float("nan"), decode(codes, scale, KIND))
                if AS_BF16:
                    values = bf16_bits(values)
                values = values.to(out.dtype.element_ty)
            target = out + word[:, None] * per_word + inner[None, :]
            tl.store(target, values, mask=(word < end)[:, None])


class Drain:
    """One layer's staged rows, waited for and decoded on the device. Safe in a CUDA graph: allocates nothing.

    stage, flags, poison, errors: device addresses (of the layer's first slot, its first flag, and the words above).
    blocks_per_slot, flag_rows: flags of a slot, and how many rows each stands for, a multiple of BLOCK_ROWS.
    programs: the grid; each takes a block of rows at a time.
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        stage: int,
        flags: int,
        poison: int,
        errors: int,
        slot_bytes: int,
        blocks_per_slot: int,
        flag_rows: int = BLOCK_ROWS,
        programs: int = 48,
        words: int = 2048,
        warps: int = 8,
    ) -> None:
        self._addresses = (stage, flags, poison, errors)
        self._sizes = (slot_bytes, blocks_per_slot)
        self._format = row_format
        self._programs = programs
        code_bytes = row_format.stored_dtype.itemsize
        width = int(np.gcd(8, row_format.row_bytes))
        self._constants: dict[str, Any] = {
            "ROW_WORDS": row_format.row_bytes // width,
            "WORD": WORDS[width],
            "WORD_BYTES": width,
            "CODE_BYTES": code_bytes,
        }
        self._last_constants: dict[str, Any] = {
            "BLOCK": BLOCK_ROWS,
            "FLAG_ROWS": flag_rows,
            "WORDS": min(words, triton.next_power_of_2(BLOCK_ROWS * row_format.row_bytes // width)),
            "THREADS": 32 * warps,
            "INTERPRETED": INTERPRETED,
        }
        self._launch = Launch(_drain, num_warps=warps)

    def run(self, control: torch.Tensor, out: torch.Tensor) -> None:
        """Fill out [rows, row_dim] of bf16, fp16 or fp32, contiguous."""
        out_rows = out.shape[0]
        if not out_rows:
            return
        raw = NAMES[out.dtype] == self._format.name
        self._launch(
            out.dtype,
            min(self._programs, triton.cdiv(out_rows, BLOCK_ROWS)),
            control,
            *self._addresses,
            as_integers(out) if raw or out.dtype == torch.bfloat16 else out,
            out_rows,
            *self._sizes,
            rounded_scale(self._format, out.dtype),
            constants=lambda: {
                **self._constants,
                "KIND": KIND_RAW if raw else KINDS[self._format.name],
                "AS_BF16": out.dtype == torch.bfloat16,
                "NAN": nan_bits(out.dtype),
                **self._last_constants,
            },
        )
