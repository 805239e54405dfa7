"""The Triton kernels against the plain reference: on a GPU where there is one, else under Triton's interpreter.

What the interpreter shows is the arithmetic: masks, tails, alignments, searches. What only a GPU shows (waiting for another
process, graphs) is in tests/gpu.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton kernels need triton (extra `cuda`)")

from ple_offload.connector.drain_triton import CONTROL_WORDS, POISONED, STEP_FAILED, TIMED_OUT, WHY_BITS, Drain  # noqa: E402
from ple_offload.connector.stage_triton import Beginning, Source  # noqa: E402
from ple_offload.families.qwen_ple import QwenPle  # noqa: E402
from ple_offload.families.qwen_ple_triton import NO_BAD_ID, PLACE_BIT, QwenPleOnDevice  # noqa: E402
from ple_offload.formats.base import VALUE_DTYPES, RowFormat  # noqa: E402
from ple_offload.formats.gather_triton import GatherOnDevice, Given, word_bytes  # noqa: E402
from ple_offload.ipc import words  # noqa: E402
from ple_offload.ipc.region import BLOCK_ROWS  # noqa: E402
from ple_offload.stores.base import RowMap  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EOS = 7
FIRST = torch.zeros(1, dtype=torch.int64, device=DEVICE)  # of the words that tell of bad ids, the first is the step's
FORMATS = ["bf16", "fp16", "fp32", "fp8_e4m3"]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def rule(n: int, h: int, vocab_size: int = 50, base: int = 100) -> QwenPle:
    config = {"vocab_size": vocab_size, "eos_token_id": EOS, "ngram_vocab_size_base": base}
    return QwenPle.from_text_config({**config, "ngram_size": n, "heads_per_ngram": h}, 0)


def on_device(*arrays: np.ndarray, dtype: torch.dtype = torch.int32) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(DEVICE, dtype) for array in arrays]


def random_rows(rng: np.random.Generator, row_format: RowFormat, count: int) -> np.ndarray:
    """[count, row_bytes] uint8: every code for fp8, ordinary numbers for the others."""
    if row_format.name == "fp8_e4m3":
        return rng.integers(0, 256, (count, row_format.row_bytes), dtype=np.uint8)
    values = rng.standard_normal((count, row_format.row_dim)).astype(row_format.stored_dtype)
    return values.view(np.uint8).reshape(count, row_format.row_bytes)


class Pinned:
    """Bytes that the device can read, at an address that is `shift` off a multiple of 16."""

    def __init__(self, data: np.ndarray, shift: int = 0) -> None:
        flat = data.reshape(-1).view(np.uint8)
        self.memory = torch.zeros(flat.size + 32, dtype=torch.uint8, pin_memory=ON_GPU)
        start = -self.memory.data_ptr() % 16 + shift
        self.bytes = self.memory.numpy()[start : start + flat.size]
        self.bytes[:] = flat
        self.address = self.memory.data_ptr() + start


def same(found: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(found.float().cpu().numpy(), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(("n", "h"), [(3, 8), (2, 3), (4, 5), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_numbers(n: int, h: int, dtype: torch.dtype) -> None:
    family, rng = rule(n, h), np.random.default_rng(n * 10 + h)
    kernel = QwenPleOnDevice(family, DEVICE)
    for num_tokens, num_reqs in ((1, 1), (40, 5), (33, 1), (50, 20), (3, 9)):
        cuts = np.sort(rng.integers(0, num_tokens + 1, num_reqs - 1))
        starts = np.concatenate([[0], cuts, [num_tokens]])
        ids = np.where(rng.random(num_tokens) < 0.2, EOS, rng.integers(0, 50, num_tokens))
        context = rng.integers(0, 50, (num_reqs, n - 1))
        padded = np.concatenate([ids, [-1, 10**6, -5]])  # lanes behind the last request
        out = torch.full((num_tokens + 3, family.rows_per_token), -7, device=DEVICE)
        bad = torch.full((1,), NO_BAD_ID, device=DEVICE)
        kernel.row_numbers(*on_device(padded, starts, context, dtype=dtype), out, bad, FIRST)
        assert np.array_equal(out[:num_tokens].cpu().numpy(), family.row_numbers_reference(ids, starts, context))
        assert (out[num_tokens:] == -1).all()
        assert bad.item() == NO_BAD_ID


def test_released_sizes_do_not_overflow() -> None:
    family = rule(3, 8, vocab_size=248_320, base=20_000_000)
    ids = np.array([248_319, 0, 248_044, 1, 248_319, 248_319])
    starts, context = np.array([0, 6]), np.array([[248_319, 248_318]])
    out = torch.zeros((6, 16), dtype=torch.int64, device=DEVICE)
    bad = torch.full((1,), NO_BAD_ID, device=DEVICE)
    QwenPleOnDevice(family, DEVICE).row_numbers(*on_device(ids, starts, context), out, bad, FIRST)
    assert np.array_equal(out.cpu().numpy(), family.row_numbers_reference(ids, starts, context))


@pytest.mark.parametrize(("place", "value"), [(0, -1), (4, 50), (20, 2**30)])
def test_a_bad_id_is_reported_and_gets_no_row(place: int, value: int) -> None:
    family = rule(3, 2)
    ids, starts, context = np.arange(30) % 40, np.array([0, 30]), np.array([[1, 2]])
    ids[place] = value
    out = torch.zeros((30, family.rows_per_token), dtype=torch.int64, device=DEVICE)
    bad = torch.full((3,), NO_BAD_ID, device=DEVICE)
    step = torch.tensor([2 << PLACE_BIT | 5 << 32 | 7], device=DEVICE)
    QwenPleOnDevice(family, DEVICE).row_numbers(*on_device(ids, starts, context), out, bad, step)
    assert bad.tolist() == [NO_BAD_ID, NO_BAD_ID, place]
    assert (out[place] == -2).all()
    assert (out[: place if place else 0] >= 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_numbers_that_are_given(dtype: torch.dtype) -> None:
    """Those behind the step's tokens are not looked at and gather as zeros; the first token with a bad one is told."""
    row_format = RowFormat("fp8_e4m3", 16, 0.5)
    shard = Pinned(random_rows(np.random.default_rng(1), row_format, 100))
    at = RowMap.of([shard.address], [100])
    gather = GatherOnDevice(row_format, at.bases, at.starts, at.step, DEVICE, programs=3)
    numbers = np.random.default_rng(0).integers(0, 100, (40, 12))
    numbers[30:] = 10**6
    size = torch.tensor([1 << PLACE_BIT | 7 << 32 | 30], device=DEVICE)
    for place, value in ((None, 0), (3, -1), (29, 100)):
        rows = numbers.copy()
        if place is not None:
            rows[place, 5] = value
            rows[29, 11] = -2
        bad = torch.full((2,), NO_BAD_ID, device=DEVICE)
        out = torch.full((40 * 12, 16), 3.0, dtype=torch.bfloat16, device=DEVICE)
        (source,) = on_device(rows, dtype=dtype)
        gather.run(source.view(-1), out, Given(size, bad, 12, PLACE_BIT))
        found, asked = out.view(40, 12, 16), rows[:30]
        right = (asked >= 0) & (asked < 100)
        expected = row_format.decode_reference(shard.bytes.reshape(100, 16)[asked[right]], "bf16")
        assert same(found[:30][torch.from_numpy(right).to(DEVICE)], expected)
        assert found[:30][torch.from_numpy(~right).to(DEVICE)].isnan().all()
        assert (found[30:] == 0).all()
        assert bad.tolist() == [NO_BAD_ID, NO_BAD_ID if place is None else place]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "row_dim", "counts"),
    [("bf16", 160, [40]), ("fp16", 16, [10, 10, 7]), ("fp32", 5, [3, 20, 9]), ("bf16", 96, [7, 1])],
)
def test_gather(name: str, dtype: str, row_dim: int, counts: list[int]) -> None:
    rng = np.random.default_rng(row_dim)
    row_format = RowFormat(name, row_dim, 0.3 if name == "fp8_e4m3" else None)
    size = row_format.stored_dtype.itemsize
    shards = [Pinned(random_rows(rng, row_format, count), shift=size * i) for i, count in enumerate(counts)]
    table = np.concatenate([shard.bytes.reshape(-1, row_format.row_bytes) for shard in shards])
    at = RowMap.of([shard.address for shard in shards], counts)
    gather = GatherOnDevice(row_format, at.bases, at.starts, at.step, DEVICE, programs=3)
    rows = rng.integers(0, len(table), 13)
    asked = torch.from_numpy(np.concatenate([rows, [-1, len(table), -7]])).to(DEVICE)
    out = torch.full((16, row_dim), 3.0, dtype=TORCH[dtype], device=DEVICE)
    gather.run(asked, out)
    assert same(out[:13], row_format.decode_reference(table[rows], dtype))
    assert (out[13] == 0).all()
    assert out[14:].isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_stored_bits_pass_unchanged(name: str) -> None:
    """NaN payloads, infinities, subnormals: all 65,536 codes of a 16-bit format."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    shard = Pinned(codes)
    at = RowMap.of([shard.address], [256])
    out = torch.zeros((256, 256), dtype=TORCH[name], device=DEVICE)
    GatherOnDevice(RowFormat(name, 256), at.bases, at.starts, at.step, DEVICE).run(
        torch.arange(256, device=DEVICE), out
    )
    assert np.array_equal(out.view(torch.int16).cpu().numpy().reshape(-1).view(np.uint16), codes)


def test_memory_held_on_the_device_is_counted() -> None:
    """Three addresses and four starts of a gather; three multipliers, 16 sizes and 16 offsets of a rule; 8 bytes each."""
    bases = np.array([0, 1600, 3200], np.uint64)
    starts = np.array([0, 10, 20, 30], np.int64)
    gather = GatherOnDevice(RowFormat("fp8_e4m3", 160, 0.5), bases, starts, 10, DEVICE)
    assert gather.device_bytes == 7 * 8
    assert QwenPleOnDevice(rule(3, 8), DEVICE).device_bytes == 35 * 8


def test_every_fp8_code_in_every_dtype() -> None:
    shard = Pinned(np.arange(256, dtype=np.uint8))
    at = RowMap.of([shard.address], [1])
    for scale in (0.000199, -3.7, 1.0):
        row_format = RowFormat("fp8_e4m3", 256, scale)
        for dtype, kind in TORCH.items():
            out = torch.zeros((1, 256), dtype=kind, device=DEVICE)
            GatherOnDevice(row_format, at.bases, at.starts, at.step, DEVICE).run(
                torch.zeros(1, dtype=torch.int64, device=DEVICE), out
            )
            assert same(out[0], row_format.decode_reference(shard.bytes, dtype)), (scale, dtype)


def test_words_are_as_wide_as_the_alignment_allows() -> None:
    assert word_bytes(160, np.array([2656, 8], np.uint64), 1) == 8
    assert word_bytes(160, np.array([2656, 12], np.uint64), 1) == 4
    assert word_bytes(5, np.array([1], np.uint64), 1) == 1
    with pytest.raises(ValueError, match=r"at multiples of 2 bytes.*found multiples of 1\."):
        word_bytes(320, np.array([3], np.uint64), 2)


class Stage:
    """Two slots of one layer's staged rows, their flags, and the words around them, in memory the device can see."""

    def __init__(self, row_format: RowFormat, max_rows: int) -> None:
        rng = np.random.default_rng(1)
        self.row_format, self.max_rows = row_format, max_rows
        self.rows = Pinned(random_rows(rng, row_format, 2 * max_rows))
        self.blocks = -(-max_rows // BLOCK_ROWS)
        self.flags = Pinned(np.zeros(2 * self.blocks, np.int64))
        self.words = Pinned(np.zeros(3, np.int64))  # poison, errors of two slots
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=DEVICE)
        self.drain = Drain(
            row_format,
            stage=self.rows.address,
            flags=self.flags.address,
            poison=self.words.address,
            errors=self.words.address + 8,
            slot_bytes=max_rows * row_format.row_bytes,
            blocks_per_slot=self.blocks,
            programs=3,
        )

    def set_flags(self, slot: int, value: int) -> None:
        self.flags.bytes.view(np.int64)[slot * self.blocks : (slot + 1) * self.blocks] = value

    @property
    def errors(self) -> list[int]:
        return self.words.bytes.view(np.int64)[1:].tolist()

    def run(self, expected: int, num_rows: int, slot: int, out_rows: int, limit_ns: int = 10**7) -> torch.Tensor:
        self.control.copy_(torch.tensor([expected, num_rows, slot, limit_ns]))
        out = torch.full((out_rows, self.row_format.row_dim), 9.0, dtype=torch.bfloat16, device=DEVICE)
        self.drain.run(self.control, out)
        if ON_GPU:
            torch.cuda.synchronize()
        return out

    def expected(self, slot: int, num_rows: int) -> np.ndarray:
        rows = self.rows.bytes.reshape(2, self.max_rows, -1)[slot, :num_rows]
        return self.row_format.decode_reference(rows, "bf16")


@pytest.mark.parametrize("name", FORMATS)
def test_drain_delivers_what_is_there_and_zeros_behind_it(name: str) -> None:
    stage = Stage(RowFormat(name, 16, 0.3 if name == "fp8_e4m3" else None), 5000)
    word = words.flag(1, 5)
    stage.set_flags(1, word)
    for num_rows in (1, 257, 4097):
        out = stage.run(word, num_rows, 1, num_rows + 70)
        assert same(out[:num_rows], stage.expected(1, num_rows))
        assert (out[num_rows:] == 0).all()
    assert stage.errors == [0, 0]
    assert (stage.run(word, 0, 1, 50) == 0).all()


@pytest.mark.parametrize(
    ("flag", "poison", "why"),
    [
        (words.flag(1, 4), 0, TIMED_OUT),  # an earlier step's
        (words.flag(2, 5), 0, TIMED_OUT),  # another connection's
        (0, 0, TIMED_OUT),
        (words.flag(1, 5) | words.FAILED, 0, STEP_FAILED),
        (0, 1, POISONED),
    ],
)
def test_drain_gives_nan_and_the_reason_where_rows_do_not_come(flag: int, poison: int, why: int) -> None:
    stage = Stage(RowFormat("fp8_e4m3", 16, 0.3), 600)
    stage.set_flags(0, flag)
    stage.words.bytes.view(np.int64)[0] = poison
    out = stage.run(words.flag(1, 5), 600, 0, 640)
    assert out[:600].isnan().all()
    assert (out[600:] == 0).all()
    assert stage.errors == [5 << WHY_BITS | why, 0]  # of step 5


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter has no clock")
def test_the_limit_is_the_steps_and_not_each_blocks() -> None:
    stage = Stage(RowFormat("fp8_e4m3", 16, 0.3), 60 * BLOCK_ROWS)
    stage.run(words.flag(1, 5), 1, 0, 1, limit_ns=1)  # compiles
    began = time.monotonic()
    assert stage.run(words.flag(1, 5), 60 * BLOCK_ROWS, 0, 60 * BLOCK_ROWS, limit_ns=10**8).isnan().all()
    assert 0.09 < time.monotonic() - began < 0.5  # 20 blocks for each program
    assert stage.errors == [5 << WHY_BITS | TIMED_OUT, 0]


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter has no clock")
def test_the_limit_is_the_steps_however_slowly_its_blocks_come() -> None:
    stage, word = Stage(RowFormat("fp8_e4m3", 16, 0.3), 60 * BLOCK_ROWS), words.flag(1, 5)
    stage.run(word, 1, 0, 1, limit_ns=1)  # compiles
    flags, ended = stage.flags.bytes.view(np.int64), threading.Event()

    def raise_them() -> None:
        for first in range(0, 60, 3):  # one for each program, in less than the limit
            flags[first : first + 3] = word
            if ended.wait(0.05):
                return

    raiser = threading.Thread(target=raise_them)
    raiser.start()
    out = stage.run(word, 60 * BLOCK_ROWS, 0, 60 * BLOCK_ROWS, limit_ns=2 * 10**8)
    ended.set()
    raiser.join()
    assert same(out[:BLOCK_ROWS], stage.expected(0, BLOCK_ROWS))
    assert out[-BLOCK_ROWS:].isnan().all()
    assert stage.errors == [5 << WHY_BITS | TIMED_OUT, 0]


def test_a_zeroed_table_fails_the_comparison() -> None:
    stage = Stage(RowFormat("fp8_e4m3", 16, 0.3), 100)
    word = words.flag(1, 5)
    stage.set_flags(0, word)
    expected = stage.expected(0, 100).copy()
    stage.rows.bytes[:] = 0
    assert not same(stage.run(word, 100, 0, 100), expected)


def test_the_reference_dtypes_are_torchs() -> None:
    assert {name: str(kind).removeprefix("torch.") for name, kind in TORCH.items()} == {
        name: dtype.name for name, dtype in VALUE_DTYPES.items()
    }


def test_drain_gives_nan_for_the_one_block_that_does_not_come() -> None:
    stage = Stage(RowFormat("fp8_e4m3", 16, 0.3), 1000)
    word = words.flag(1, 5)
    stage.set_flags(0, word)
    stage.flags.bytes.view(np.int64)[1] = words.flag(1, 4)
    out = stage.run(word, 1000, 0, 1000)
    lost = slice(BLOCK_ROWS, 2 * BLOCK_ROWS)
    assert out[lost].isnan().all()
    expected = stage.expected(0, 1000)
    assert same(out[: lost.start], expected[: lost.start])
    assert same(out[lost.stop :], expected[lost.stop :])
    assert stage.errors == [5 << WHY_BITS | TIMED_OUT, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [(0, 1, 0), (5, 3, 4), (5000, 17, 2), (70_000, 300, 600)])
def test_a_step_is_staged_announced_and_told(dtype: torch.dtype, counts: tuple[int, int, int]) -> None:
    """Every integer, whatever programs share them, nothing beside them; then head and announcement."""
    region = Pinned(np.full(8 * 80_000, 0xAA, np.uint8))
    at = region.bytes.view(np.int64)
    device_at = region.address
    beginning = Beginning((16, 4), device_at, 77, DEVICE)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-(2**31), 2**31, count + 5) for count in counts]
    places = np.cumsum([16, counts[0] + 3, counts[1] + 3])
    for step in (3, 4):  # the second time finds the counter as the first one left it
        sources = [
            Source(torch.from_numpy(array).to(DEVICE, dtype), device_at + 8 * int(place), count)
            for array, place, count in zip(arrays, places, counts, strict=True)
        ]
        beginning.stage(sources, head=device_at + 64, step=step, num_reqs=2, num_tokens=9, flag=55, slot=1)
        if ON_GPU:
            torch.cuda.synchronize()
        for array, place, count in zip(arrays, places, counts, strict=True):
            assert np.array_equal(at[place : place + count], array[:count])
            assert at[place + count] == np.int64(-0x5555555555555556)
        assert at[0] == step
        assert at[8:11].tolist() == [step, 2, 9]
        assert beginning.control.tolist() == [[55, 9 * 16, 1, 77], [55, 9 * 4, 1, 77]]
        at[:16] = -1


def test_what_the_host_announced_is_only_told() -> None:
    region = Pinned(np.full(1024, 0xAA, np.uint8))
    beginning = Beginning((16,), region.address, 77, DEVICE)
    beginning.tell(5, 1, 0)
    assert beginning.control.tolist() == [[5, 0, 1, 77]]
    beginning.tell(6, 0, 3)
    assert beginning.control.tolist() == [[6, 48, 0, 77]]
    assert (region.bytes == 0xAA).all()


def test_row_numbers_of_many_layers_are_staged_in_turn() -> None:
    region = Pinned(np.zeros(8 * 100, np.uint8))
    beginning = Beginning((1,) * 7, region.address, 77, DEVICE)
    tensors = [torch.tensor([10 + i, 20 + i], device=DEVICE) for i in range(7)]
    sources = [Source(tensor, region.address + 8 * (20 + 2 * i), 2) for i, tensor in enumerate(tensors)]
    beginning.stage(sources, head=region.address + 64, step=1, num_reqs=0, num_tokens=2, flag=5, slot=0)
    if ON_GPU:
        torch.cuda.synchronize()
    assert region.bytes.view(np.int64)[20:34].tolist() == [n for i in range(7) for n in (10 + i, 20 + i)]
    assert region.bytes.view(np.int64)[0] == 1
