"""Ids in, bf16 values out: `table.lookup` against `torch.index_select` on the same bytes and the same decode.

The baselines are given their row numbers for nothing: their times hold no hash, ours do. They read either our own mapped
memory (sealed, 2 MiB pages) or an ordinary torch allocation filled with the same bytes; for the `file` tier, the very page
cache that ours reads, the shards mapped one behind the other. Two decoders: torch's own (fp8 to bf16, times the scale), and
a table of 256 values indexed by the bytes. All have the same number of threads and write to buffers made beforehand.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from calm import Calm
from ids import Ids, Stream
from random_table import HEADER_BYTES, LAYER, ROW_DIM, ROWS_PER_TOKEN, SCALE, Made
from timing import Contender, Plan, interleave, ratio, spread

from ple_offload import open_table

TOKENS = (1, 64, 4096)
PLANS = {1: Plan(rounds=25, calls=200, warm_calls=20), 64: Plan(25, 40, 5), 4096: Plan(25, 4, 1)}
TOY_PLAN = Plan(rounds=2, calls=1, warm_calls=0)
# Call after call suits every library's spinning threads; a serving engine comes back after a while.
PAUSE_S = 0.002
PAUSED_CALLS = {1: 15, 64: 15, 4096: 3}
RAM_BASELINES = ("torch, our memory", "torch lut, our memory", "torch, own memory", "torch lut, own memory")
FILE_BASELINES = ("torch, mapped file", "torch lut, mapped file")
Decoder = Callable[[torch.Tensor, torch.Tensor], object]


def run(made: Made, streams: dict[str, Stream], calm: Calm, *, threads: int, toy: bool) -> dict[str, Any]:
    torch.set_num_threads(threads)
    results = []
    with ExitStack() as stack:
        ram = stack.enter_context(open_table(made.folder, LAYER, "ram", threads=threads))
        file = stack.enter_context(open_table(made.folder, LAYER, "file", threads=threads))
        mapped_files = _map_shards(made)
        # cloning reads the files in, in order, after loading `ram` has dropped them from the page cache
        sources = {"our memory": _segment(ram, 0), "own memory": mapped_files.clone(), "mapped file": mapped_files}
        for mapped in (sources["mapped file"], *(_segment(file, i) for i in range(len(file.store.rows.bases)))):
            mapped[:: 4096 // ROW_DIM].sum()  # every page is mapped before anything is timed
        facts = {"ram": ram.describe(), "file": file.describe(), "torch_threads": torch.get_num_threads()}
        for num_tokens in TOKENS:
            contenders = dict(_contenders(ram, file, sources, num_tokens))
            _check_equal(contenders, num_tokens)
            prepares = {name: prepare for name, (prepare, _) in contenders.items()}
            for kind, stream in streams.items():
                for rhythm, plan in _plans(num_tokens, toy).items():
                    blocks = interleave(prepares, partial(stream.take, num_tokens), plan, calm)
                    results.append({"ids": kind, "tokens": num_tokens, "rhythm": rhythm, **_summary(blocks)})
    return {"ids": {kind: stream.what for kind, stream in streams.items()}, **facts, "results": results}


def _plans(num_tokens: int, toy: bool) -> dict[str, Plan]:
    plan = TOY_PLAN if toy else PLANS[num_tokens]
    paused = plan if toy else Plan(plan.rounds, PAUSED_CALLS[num_tokens], 1, call_pause_s=PAUSE_S)
    return {"call after call": plan, f"{PAUSE_S * 1e3:.0f} ms between calls": paused}


def _summary(blocks: dict[str, list[float]]) -> dict[str, Any]:
    """Times of all, and how many times longer each baseline takes than ours of its tier."""
    ratios = {}
    for tier, baselines in (("ram", RAM_BASELINES), ("file", FILE_BASELINES)):
        ours = blocks[f"ours, {tier}"]
        ratios |= {f"{tier}: {name}": ratio(blocks[name], ours) for name in baselines}
        best = list(np.min([blocks[name] for name in baselines], axis=0))
        ratios[f"{tier}: best of them"] = ratio(best, ours)
        if tier == "ram":
            ratios["ram: best of them / our NumPy"] = ratio(best, blocks["ours, ram, NumPy"])
    ratios["our file / our ram"] = ratio(blocks["ours, file"], blocks["ours, ram"])
    return {"us": {name: spread(times) for name, times in blocks.items()}, "times_longer": ratios}


def _contenders(
    ram: Any, file: Any, sources: dict[str, torch.Tensor], num_tokens: int
) -> Iterator[tuple[str, tuple[Contender[Ids], torch.Tensor]]]:
    """(name, (contender, the buffer its values land in))."""
    yield "ours, ram", _ours(ram, num_tokens)
    yield "ours, ram, NumPy", _ours_numpy(ram, num_tokens)
    yield "ours, file", _ours(file, num_tokens)
    for where, source in sources.items():
        for name, decoder in (("torch", _decode_cast()), ("torch lut", _decode_lut(num_tokens * ROWS_PER_TOKEN))):
            yield f"{name}, {where}", _torch(ram, source, decoder, num_tokens)


def _ours(table: Any, num_tokens: int) -> tuple[Contender[Ids], torch.Tensor]:
    out = torch.zeros((num_tokens, table.embed_dim), dtype=torch.bfloat16)

    def prepare(ids: Ids) -> Callable[[], object]:
        tensor = torch.from_numpy(ids)
        return lambda: table.lookup(tensor, out=out)

    return prepare, out


def _ours_numpy(table: Any, num_tokens: int) -> tuple[Contender[Ids], torch.Tensor]:
    out = np.zeros((num_tokens, table.embed_dim), ml_dtypes.bfloat16)

    def prepare(ids: Ids) -> Callable[[], object]:
        return lambda: table.lookup(ids, out=out)

    return prepare, torch.from_numpy(out.view(np.uint16)).view(torch.bfloat16)


def _torch(table: Any, source: torch.Tensor, decode: Decoder, num_tokens: int) -> tuple[Contender[Ids], torch.Tensor]:
    raw = torch.zeros((num_tokens * ROWS_PER_TOKEN, ROW_DIM), dtype=torch.uint8)
    out = torch.zeros(raw.shape, dtype=torch.bfloat16)

    def prepare(ids: Ids) -> Callable[[], object]:
        rows = torch.from_numpy(table.row_numbers(ids).reshape(-1))

        def call() -> None:
            torch.index_select(source, 0, rows, out=raw)
            decode(raw, out)

        return call

    return prepare, out


def _decode_cast() -> Decoder:
    scale = torch.tensor(SCALE, dtype=torch.bfloat16)

    def decode(raw: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(raw.view(torch.float8_e4m3fn))
        out.mul_(scale)

    return decode


def _decode_lut(count: int) -> Decoder:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    lut = codes.to(torch.bfloat16) * torch.tensor(SCALE, dtype=torch.bfloat16)
    numbers = torch.zeros((count, ROW_DIM), dtype=torch.int32)

    def decode(raw: torch.Tensor, out: torch.Tensor) -> None:
        numbers.copy_(raw)
        torch.index_select(lut, 0, numbers.view(-1), out=out.view(-1))

    return decode


def _check_equal(contenders: dict[str, tuple[Contender[Ids], torch.Tensor]], num_tokens: int) -> None:
    """All give the same values for the same ids, or there is nothing to time."""
    ids = np.arange(1, num_tokens + 1, dtype=np.int64)
    first = None
    for name, (prepare, out) in contenders.items():
        prepare(ids)()
        values = out.reshape(-1)
        first = values.clone() if first is None else first
        wrong = int(((values != first) & ~(values.isnan() & first.isnan())).sum())
        if wrong:
            raise SystemExit(f"{name}: {wrong} of {values.numel()} values differ from ours; nothing was timed")


def _segment(table: Any, i: int) -> torch.Tensor:
    """A segment of an open table's mapped rows, [rows, ROW_DIM] uint8; nothing is copied."""
    at = table.store.rows
    return _tensor_at(int(at.bases[i]), int(at.starts[i + 1] - at.starts[i]))


def _map_shards(made: Made) -> torch.Tensor:
    """All shards' rows as one tensor [rows, ROW_DIM] uint8 over the page cache: mapped one behind the other, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 2, ctypes.c_int64]
    first = libc.mmap(None, made.table_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for i, path in enumerate(made.files):
        start = i * made.shard_rows * ROW_DIM
        num_bytes = min(made.shard_rows * ROW_DIM, made.table_bytes - start)
        with path.open("rb") as file:
            fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED
            if libc.mmap(first + start, num_bytes, mmap.PROT_READ, fixed, file.fileno(), HEADER_BYTES) != first + start:
                raise OSError(ctypes.get_errno(), "mmap", str(path))
    return _tensor_at(first, made.num_rows)


def _tensor_at(address: int, num_rows: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (num_rows * ROW_DIM)).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(num_rows, ROW_DIM)
