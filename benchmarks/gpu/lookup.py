"""One lookup at a time, side by side: what `contenders.py` lists, on the same rows, in turns.

Four figures, each the median of some rounds with its 95 % interval:

    wall_us    from the call until the GPU is done, everything launched from Python, nothing overlapped
    queued_us  the GPU's own time of the same: it is kept busy until all is launched, so the host's launching is not in it,
               and whatever other processes do for the lookup is; sizes above those of decode steps are not captured
    alone_us   the same of a captured graph; what the host launches before the forward is included
    chain_us   the same of one of 8 lookups of different rows in one graph: what a lookup adds to a model's graph

`late` counts the rounds in which the GPU got there before all was launched, so that launching is in the figure; always
so where a contender waits for the GPU while it launches.

Steps follow each other at once, as an engine's do; `--pause-us` puts a pause before each (it lets a virtual machine's cores
fall asleep). `regret`: how many times longer `auto` takes than the better of `direct` and `staged` in the same race.

Before anything is timed, each contender's rows of this size are compared bit for bit with the plain reference, eager and
captured, on rows it has not seen, in memory filled with something else. Who is wrong is recorded as wrong and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from batches import MAX_REQS, Batch, Pool, random_pool, text_pool
from comparisons import comparisons
from contenders import DEVICE, Contender, Makers, factories
from file_world import FileWorld
from intervals import summary
from on_device import page_locked
from record import Record
from world import EMBED_DIM, World
from worlds import RACES, WORLDS, kind_name

from ple_offload import config

ROUNDS = {1: 40, 8: 40, 64: 40, 256: 40, 1024: 30, 4096: 25, 8192: 25}
QUICK_ROUNDS = 7
WARM_ROUNDS = 2
CHAIN = 8
BUSY_CYCLES = 2_000_000  # about a millisecond
WRITE_BUDGET_S = 45.0  # for a checkpoint
START_S, SIZE_S = 15.0, 7.0  # about what contenders take to start, and one size of them; for the budget
POISON = 0x7FC1  # the bits of a NaN that nothing here computes
POOL_TOKENS, QUICK_POOL_TOKENS = 1 << 20, 1 << 17
Timed = Callable[[str], tuple[float, bool]]  # contender -> microseconds, and whether launched too late


class WrongRowsError(Exception):
    """A contender delivered something else than the reference."""


@dataclass
class Graph:
    """A captured lookup, or several; `outs` are what it writes."""

    graph: torch.cuda.CUDAGraph
    outs: list[torch.Tensor]


class Bench:
    """One size of one kind of rows."""

    def __init__(
        self, world: World | FileWorld, pool: Pool, contenders: dict[str, Contender], tokens: int, pause_us: float = 0.0
    ) -> None:
        self.world, self.pool, self.tokens, self.pause_s = world, pool, tokens, pause_us / 1e6
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
            self._fresh(one, len(graph.outs))
            for out in graph.outs:
                out.view(torch.int16).fill_(POISON)
            one.begin(self.batches[0])
            graph.graph.replay()
            torch.cuda.synchronize()
            for out, batch in zip(graph.outs, self.batches, strict=False):
                self._compare(out, batch, "captured")
            one.finish()

    def _fresh(self, one: Contender, lookups: int = 1) -> Batch:
        """New rows into so many batches; the first one is prepared for."""
        for batch in self.batches[:lookups]:
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

    def _pause(self) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)

    def wall_us(self, name: str) -> tuple[float, bool]:
        one = self.contenders[name]
        batch = self._fresh(one)
        self._pause()
        began = time.perf_counter_ns()
        one.begin(batch)
        out = one.forward(batch)
        torch.cuda.synchronize()
        took = (time.perf_counter_ns() - began) / 1e3
        del out
        one.finish()
        return took, False

    def device_us(self, name: str, graph: Graph | None) -> tuple[float, bool]:
        """Of a forward, or of one lookup of a graph; and whether it was launched too late."""
        one, lookups = self.contenders[name], len(graph.outs) if graph else 1
        batch = self._fresh(one, lookups)
        self._pause()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        one.begin(batch)
        if graph:
            graph.graph.replay()
        else:
            one.forward(batch)
        end.record()
        late = begin.query()
        torch.cuda.synchronize()
        one.finish()
        return begin.elapsed_time(end) * 1e3 / lookups, late


def run(options: argparse.Namespace, record: Record) -> None:
    """Every world that is asked for, one after the other: only one fits into memory."""
    torch.set_num_threads(config.worker_threads())  # of whoever looks up with torch, as many as our worker has
    record.put(_settings(options), "settings")
    for label in options.worlds:
        if not any(_missing(options, record, label, race) for race in RACES):
            print(f"{label}: measured already")
            continue
        if not options.budget.allows(WORLDS[label].expected_s + START_S + SIZE_S, record, "world", label):
            continue
        began = time.monotonic()
        with record.failing("world", label), _world(options, label) as world:
            print(f"{label}: made after {time.monotonic() - began:.1f} s: {world.describe()}", flush=True)
            _run_world(options, record, label, world)
        gc.collect()
        torch.cuda.empty_cache()


def _world(options: argparse.Namespace, label: str) -> World | FileWorld:
    plan = WORLDS[label]
    if plan.on_disk:
        return FileWorld.make(options.shards, options.rows, WRITE_BUDGET_S)
    return World.make(plan.kind, options.bf16_rows if plan.kind == "bf16" else options.rows, huge=plan.huge)


def _missing(options: argparse.Namespace, record: Record, label: str, race: str) -> list[tuple[str, int]]:
    """(kind of rows, tokens) that are still to be measured."""
    plan = WORLDS[label]
    if not plan.racing(race, options.only):
        return []
    rows = ["random", "text"] if plan.text and options.text else ["random"]
    sizes = [(kind, tokens) for kind in rows for tokens in options.tokens]
    return [(kind, n) for kind, n in sizes if not record.has("lookup", label, kind_name(kind, race), str(n))]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides about threads: the same for every contender and in every process."""
    return {
        "pause_us": options.pause_us,
        "torch_threads": torch.get_num_threads(),
        "our_worker_threads": config.worker_threads(),
        **{name: os.environ.get(name, "") for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")},
    }


def _run_world(options: argparse.Namespace, record: Record, label: str, world: World | FileWorld) -> None:
    record.put(world.describe(), "tables", label)
    size = QUICK_POOL_TOKENS if options.quick else POOL_TOKENS
    pools = {"random": random_pool(world, size)}
    if WORLDS[label].text and options.text is None:
        record.put("not measured: no --text was given", "pools", label, "text")
    elif WORLDS[label].text:
        with record.failing("pool", label, "text"):
            pools["text"] = text_pool(world, options.text, size)
    for kind, pool in pools.items():
        record.put(pool.what, "pools", label, kind)
    with world.worker() as worker, contextlib.ExitStack() as stack:
        if isinstance(world, World):
            with record.failing("start", label, "page-locked"):
                stack.enter_context(page_locked(world, DEVICE))  # held, or each contender would register it anew
        makers = factories(world, worker)
        for race in RACES:
            sizes = [(kind, tokens) for kind, tokens in _missing(options, record, label, race) if kind in pools]
            if not sizes or not options.budget.allows(
                START_S + SIZE_S, record, "race", label, race or "from row numbers"
            ):
                continue
            with _started(options, record, label, race, makers) as contenders:
                for kind, tokens in sizes:
                    place = [label, kind_name(kind, race), str(tokens)]
                    if not options.budget.allows(SIZE_S, record, "lookup", *place):
                        continue
                    with record.failing("lookup", *place):
                        _measure(
                            options, record, Bench(world, pools[kind], contenders, tokens, options.pause_us), place
                        )


@contextlib.contextmanager
def _started(
    options: argparse.Namespace, record: Record, label: str, race: str, makers: Makers
) -> Iterator[dict[str, Contender]]:
    """A race's contenders, without those that failed to start."""
    contenders: dict[str, Contender] = {}
    with contextlib.ExitStack() as stack:
        for name in WORLDS[label].racing(race, options.only):
            if name not in makers:  # there is nothing to fuse
                continue
            with record.failing("start", label, name):
                began = time.monotonic()
                contenders[name] = one = makers[name](contenders)
                stack.callback(_close, one)
                seconds = round(time.monotonic() - began, 2)
                record.put({"seconds": seconds, **one.describe()}, "starts", label, name)
                print(f"{label}: {name}: ready after {seconds} s", flush=True)
        yield contenders
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


def _measure(options: argparse.Namespace, record: Record, bench: Bench, place: list[str]) -> None:
    """Everything about one size; `place` is label, kind and tokens in the record."""
    for name in list(bench.contenders):
        try:
            bench.check(name)
        except Exception as error:
            kind = "wrong" if isinstance(error, WrongRowsError) else "broken"
            record.put(f"{type(error).__name__}: {error}"[:1000], kind, *place, name)
            print(f"{kind}: {' '.join(place)} {name}: {error}", flush=True)
            _abandon(bench.contenders.pop(name))
    rounds = QUICK_ROUNDS if options.quick else ROUNDS[bench.tokens]
    choices = {name: one.choice(bench.tokens) for name, one in bench.contenders.items()}
    found: dict[str, Any] = {"chosen": {name: choice for name, choice in choices.items() if choice}}
    figures: dict[str, tuple[Iterable[str], Timed]] = {
        "wall_us": (bench.contenders, bench.wall_us),
        "queued_us": (bench.contenders, lambda name: bench.device_us(name, None)),
    }
    if bench.tokens <= MAX_REQS:
        figures["alone_us"] = (bench.alone, lambda name: bench.device_us(name, bench.alone[name]))
        figures["chain_us"] = (bench.chain, lambda name: bench.device_us(name, bench.chain[name]))
    for figure, (names, timed) in figures.items():
        racing = [name for name in names if name in bench.contenders]
        times, late = _rounds(record, bench, racing, timed, rounds, [*place, figure])
        found[figure] = {name: {**summary(values), "late": late[name]} for name, values in times.items()}
        found |= comparisons(figure.removesuffix("_us"), times)
    spec = bench.world.spec
    stored = bench.tokens * spec.rows_per_token * spec.row_bytes
    found["pcie_limit_us"] = round(stored / record.found["machine"]["pcie_h2d_gb_per_s"] / 1e3, 2)
    record.put(found, "lookup", *place)
    print(_line(place, found), flush=True)


def _rounds(
    record: Record, bench: Bench, names: list[str], timed: Timed, rounds: int, place: list[str]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Microseconds of each round, contender -> [rounds], and how many were late; one that fails is recorded and leaves."""
    rng = np.random.default_rng(3)
    times: dict[str, list[float]] = {name: [] for name in names}
    late = dict.fromkeys(names, 0)
    with _no_garbage_collection():
        for turn in range(-WARM_ROUNDS, rounds):
            for name in rng.permutation(sorted(times)).tolist():
                try:
                    took, was_late = timed(name)
                except Exception as error:
                    record.put(f"{type(error).__name__}: {error}"[:1000], "broken", *place, name)
                    _abandon(bench.contenders[name])
                    times.pop(name)
                    continue
                if turn >= 0:
                    times[name].append(took)
                    late[name] += was_late
    return times, late


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _line(place: list[str], found: dict[str, Any]) -> str:
    head = f"{' / '.join(place)} tokens (limit {found['pcie_limit_us']:.1f} us)"
    figures = [
        f"  {figure[:-3]:6s} " + "  ".join(f"{name} {times['p50']:.1f}" for name, times in found[figure].items())
        for figure in ("wall_us", "queued_us", "alone_us", "chain_us")
        if figure in found
    ]
    return "\n".join([head, *figures])
