"""One lookup at a time, side by side: what `contenders.py` lists, on the same rows, in turns.

Three figures, each the median of some rounds with its 95 % interval:

    wall_us    from the call until the GPU is done, everything launched from Python, nothing overlapped, 2 ms after the last
    alone_us   the GPU's own time of one lookup in a captured graph, what the host stages before it included; the GPU is
               kept busy until all is launched, so the host's launching is not in it; sizes of decode steps
    chain_us   the same, of one of 8 lookups of different rows in one graph: what a lookup adds to a model's graph

Before anything is timed, each contender's rows of this size are compared bit for bit with the plain reference, eager and
captured, on rows it has not seen, in memory filled with something else. Who is wrong is recorded as wrong and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from batches import MAX_REQS, Batch, Pool, random_pool, text_pool
from contenders import DEVICE, Contender, factories
from intervals import fastest, ratio, summary
from record import Record
from world import EMBED_DIM, World

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192)
ROUNDS = {1: 40, 8: 40, 64: 40, 256: 40, 1024: 30, 4096: 25, 8192: 25}
QUICK_ROUNDS = 7
WARM_ROUNDS = 2
CHAIN = 8
PAUSE_S = 0.002
BUSY_CYCLES = 1_000_000  # about half a millisecond
POISON = 0x7FC1  # the bits of a NaN that nothing here computes
POOL_TOKENS, QUICK_POOL_TOKENS = 1 << 20, 1 << 17
UVA, HBM = ("uva", "uva fused"), ("hbm", "hbm fused")
OURS = ("direct", "staged", "auto")


@dataclass(frozen=True)
class Plan:
    """One table and what is measured of it."""

    kind: str
    huge: bool = True
    text: bool = False  # rows of real text beside random ones
    contenders: tuple[str, ...] = ()  # none: all


WORLDS = {
    "fp8": Plan("fp8", text=True),
    "bf16": Plan("bf16"),
    "fp8-small-pages": Plan("fp8", huge=False, contenders=("uva", "uva fused", "transformers", *OURS)),
}


class WrongRowsError(Exception):
    """A contender delivered something else than the reference."""


@dataclass
class Graph:
    """A captured lookup, or several; `outs` are what it writes."""

    graph: torch.cuda.CUDAGraph
    outs: list[torch.Tensor]


class Bench:
    """One size of one kind of rows."""

    def __init__(self, world: World, pool: Pool, contenders: dict[str, Contender], tokens: int) -> None:
        self.world, self.pool, self.tokens = world, pool, tokens
        self.contenders = dict(contenders)  # those that are still in the race
        self.batches = [Batch.empty(tokens) for _ in range(CHAIN)]
        self.alone: dict[str, Graph] = {}
        self.chain: dict[str, Graph] = {}

    # ---- is it right? ---------------------------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Raise unless eager and captured rows are the reference's."""
        one = self.contenders[name]
        for _ in range(2):
            batch = self._fresh(one)
            self._poison_free_memory()
            one.begin(batch)
            out = one.forward(batch)
            torch.cuda.synchronize()
            self._compare(out, batch, "eager")
            one.finish()
        if self.tokens > MAX_REQS or not one.captured:
            return
        self.alone[name] = self._capture(one, 1)
        if one.chained:
            self.chain[name] = self._capture(one, CHAIN)
        for graph in (self.alone[name], self.chain.get(name)):
            if graph is None:
                continue
            self._fresh(one)
            for out in graph.outs:
                out.view(torch.int16).fill_(POISON)
            one.begin(self.batches[0])
            graph.graph.replay()
            torch.cuda.synchronize()
            for out, batch in zip(graph.outs, self.batches, strict=False):
                self._compare(out, batch, "captured")
            one.finish()

    def _fresh(self, one: Contender) -> Batch:
        """New rows into all batches; the first one is prepared for."""
        for batch in self.batches:
            self.pool.fill(batch)
        one.prepare(self.batches[0])
        torch.cuda.synchronize()
        return self.batches[0]

    def _poison_free_memory(self) -> None:
        """What the allocator hands out next holds neither zeros nor rows."""
        spare = [torch.empty((self.tokens, EMBED_DIM), dtype=torch.int16, device=DEVICE) for _ in range(3)]
        for tensor in spare:
            tensor.fill_(POISON)

    def _compare(self, out: torch.Tensor, batch: Batch, how: str) -> None:
        found = out.view(torch.int16).cpu().numpy().view(np.uint16)
        expected = self.world.reference(batch.numpy_rows())
        if found.shape != expected.shape:
            raise WrongRowsError(f"{how}: expected shape {expected.shape}, found {found.shape}")
        bad = np.flatnonzero((found != expected).any(axis=1))
        if bad.size:
            column = int(np.flatnonzero(found[bad[0]] != expected[bad[0]])[0])
            raise WrongRowsError(
                f"{how}: {bad.size} of {self.tokens} tokens differ; token {bad[0]} column {column}: expected bits "
                f"{expected[bad[0], column]:#06x}, found {found[bad[0], column]:#06x}"
            )

    def _capture(self, one: Contender, lookups: int) -> Graph:
        one.before_capture(self.tokens)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs = [one.forward(batch) for batch in self.batches[:lookups]]
        torch.cuda.synchronize()
        return Graph(graph, outs)

    # ---- how long does it take? -----------------------------------------------------------------------------------

    def wall_us(self, name: str) -> float:
        one = self.contenders[name]
        batch = self._fresh(one)
        time.sleep(PAUSE_S)
        began = time.perf_counter_ns()
        one.begin(batch)
        out = one.forward(batch)
        torch.cuda.synchronize()
        took = (time.perf_counter_ns() - began) / 1e3
        del out
        one.finish()
        return took

    def device_us(self, name: str, graphs: dict[str, Graph]) -> float:
        one, graph = self.contenders[name], graphs[name]
        self._fresh(one)
        time.sleep(PAUSE_S)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        one.begin(self.batches[0])
        graph.graph.replay()
        end.record()
        torch.cuda.synchronize()
        one.finish()
        return begin.elapsed_time(end) * 1e3 / len(graph.outs)


def run(options: argparse.Namespace, record: Record) -> None:
    """Every world that is asked for, one after the other: only one fits into memory."""
    for label in options.worlds:
        plan = WORLDS[label]
        kinds = ["random", "text"] if plan.text and options.text else ["random"]
        rows = options.bf16_rows if plan.kind == "bf16" else options.rows
        if all(record.has("lookup", label, kind, str(tokens)) for kind in kinds for tokens in options.tokens):
            print(f"{label}: measured already")
            continue
        began = time.monotonic()
        with record.failing("world", label), World.make(plan.kind, rows, huge=plan.huge) as world:
            print(f"{label}: filled after {time.monotonic() - began:.1f} s: {world.describe()}", flush=True)
            _run_world(options, record, label, world)
        gc.collect()
        torch.cuda.empty_cache()


def _run_world(options: argparse.Namespace, record: Record, label: str, world: World) -> None:
    record.put(world.describe(), "tables", label)
    size = QUICK_POOL_TOKENS if options.quick else POOL_TOKENS
    pools = {"random": random_pool(world, size)}
    plan = WORLDS[label]
    if plan.text and options.text is None:
        record.put("not measured: no --text was given", "pools", label, "text")
    elif plan.text:
        with record.failing("pool", label, "text"):
            pools["text"] = text_pool(world, options.text, size)
    for kind, pool in pools.items():
        record.put(pool.what, "pools", label, kind)
    with world.worker() as worker, contextlib.ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name, make in factories(world, worker).items():
            if name not in (options.only or plan.contenders or [name]):
                continue
            with record.failing("start", label, name):
                began = time.monotonic()
                contenders[name] = one = make(contenders)
                stack.callback(_close, one)
                seconds = round(time.monotonic() - began, 2)
                record.put({"seconds": seconds, "note": one.note}, "starts", label, name)
                print(f"{label}: {name}: ready after {seconds} s", flush=True)
        limit_gb = record.found["machine"]["pcie_h2d_gb_per_s"]
        for kind, pool in pools.items():
            for tokens in options.tokens:
                if record.has("lookup", label, kind, str(tokens)):
                    continue
                with record.failing("lookup", label, kind, str(tokens)):
                    bench = Bench(world, pool, contenders, tokens)
                    found = _measure(options, record, bench, [label, kind, str(tokens)])
                    stored = tokens * world.spec.rows_per_token * world.spec.row_bytes
                    found["pcie_limit_us"] = round(stored / limit_gb / 1e3, 2)
                    record.put(found, "lookup", label, kind, str(tokens))
                    print(_line(label, kind, tokens, found), flush=True)
        contenders.clear()


def _abandon(one: Contender) -> None:
    """End a lookup that went wrong somewhere, so that the next size finds the contender ready."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
        one.finish()


def _close(one: Contender) -> None:
    """A contender that cannot close must not keep the others from closing."""
    with contextlib.suppress(Exception):
        one.close()


def _measure(options: argparse.Namespace, record: Record, bench: Bench, place: list[str]) -> dict[str, Any]:
    for name in list(bench.contenders):
        try:
            bench.check(name)
        except Exception as error:
            kind = "wrong" if isinstance(error, WrongRowsError) else "broken"
            record.put(f"{type(error).__name__}: {error}"[:1000], kind, *place, name)
            print(f"{kind}: {' '.join(place)} {name}: {error}", flush=True)
            _abandon(bench.contenders.pop(name))
    rounds = QUICK_ROUNDS if options.quick else ROUNDS[bench.tokens]
    found: dict[str, Any] = {}
    kinds: dict[str, dict[str, Graph] | None] = {"wall_us": None}
    if bench.tokens <= MAX_REQS:
        kinds |= {"alone_us": bench.alone, "chain_us": bench.chain}
    for figure, graphs in kinds.items():
        times = _rounds(record, bench, graphs, rounds, [*place, figure])
        found[figure] = {name: summary(values) for name, values in times.items()}
        base = fastest(times, UVA)
        if base is not None:
            found[figure.replace("_us", "_over_uva")] = {
                "uva": base,
                **{name: ratio(values, times[base]) for name, values in times.items() if name != base},
            }
    return found


def _rounds(
    record: Record, bench: Bench, graphs: dict[str, Graph] | None, rounds: int, place: list[str]
) -> dict[str, list[float]]:
    """Microseconds of each round, contender -> [rounds]; one that fails is recorded and leaves the race."""
    rng = np.random.default_rng(3)
    racing = {name for name in bench.contenders if graphs is None or name in graphs}
    times: dict[str, list[float]] = {name: [] for name in bench.contenders if name in racing}
    with _no_garbage_collection():
        for turn in range(-WARM_ROUNDS, rounds):
            for name in rng.permutation(sorted(racing)).tolist():
                try:
                    took = bench.wall_us(name) if graphs is None else bench.device_us(name, graphs)
                except Exception as error:
                    record.put(f"{type(error).__name__}: {error}"[:1000], "broken", *place, name)
                    _abandon(bench.contenders[name])
                    racing.discard(name)
                    times.pop(name)
                    continue
                if turn >= 0:
                    times[name].append(took)
    return times


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _line(label: str, kind: str, tokens: int, found: dict[str, Any]) -> str:
    head = f"{label} {kind} {tokens:5d} tokens (limit {found['pcie_limit_us']:.1f} us)"
    figures = [
        f"  {figure[:-3]:5s} " + "  ".join(f"{name} {times['p50']:.1f}" for name, times in found[figure].items())
        for figure in ("wall_us", "alone_us", "chain_us")
        if figure in found
    ]
    return "\n".join([head, *figures])
