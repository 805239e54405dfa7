"""The worker's gather alone: the rows of 8,192 tokens from a table in memory into a region; no GPU, no connector.

How much of it is the translation of addresses, and would another order of the rows save that? Varied, all in turns:

    table GB    rows are drawn from the first part of each head: so much memory is touched in all. 2.5 GB are 1,200 pages
                of 2 MiB, which is less than the second-level TLB of current servers holds
    order       `tokens`: row i is of token i // 16 and head i % 16, as a step asks for them. `heads`: all tokens of head
                0, then of head 1, and so on; a head is a sixteenth of the table. `sorted`: by row number
    region      where the rows go: on 2 MiB pages, or on 4 KiB pages
    told        `blocks`: threads take blocks of 256 rows in turns and raise a reader's flag for each, as a worker does;
                `nobody`: every thread has one long share
    threads     how many; woken just before, as a worker's are

Rows come out in the order they were asked for. Each call has rows that were last read many calls ago. Before anything is
timed, each way's rows are compared with the table's, and every flag is looked at. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from intervals import ratio, summary
from record import Record
from world import ROWS_PER_TOKEN, World

from ple_offload import config, native
from ple_offload.formats.gather import GATHERED, Gather, Readers
from ple_offload.ipc.region import WORD_WAITERS, Layout
from ple_offload.ipc.words import flag
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping, collapse

TOKENS = 8192
SHARES = (1.0, 0.5, 0.2, 0.05)  # of each head, hence of the table
ORDERS = ("tokens", "heads", "sorted")
THREADS = (8, 12, 14, 15, 16)
SHOWN_THREADS = 14  # of a worker on 16 cores
PAGES = ("2 MiB", "4 KiB")
TOLD = ("blocks", "nobody")
ROUNDS, QUICK_ROUNDS, WARM_ROUNDS = 25, 7, 1
WRITE_EVERY = 5
TIMING_S = 15.0  # rounds end then
EXPECTED_S = 40.0  # the table and compiling included
SETS = 16  # of rows, for each share: the rows of all of them do not fit into a cache
POISON = 0xA5
Rows = npt.NDArray[np.int64]


class Way(NamedTuple):
    """One thing to time."""

    region: str
    told: str
    share: float
    order: str
    threads: int


class Region:
    """What a rank shares with a worker for one step of one layer, and its reader. Closed by `close`."""

    def __init__(self, layout: Layout, row_bytes: int, *, huge: bool) -> None:
        fd = memfd.create("region", layout.num_bytes)
        try:
            self._mapping = Mapping(fd, layout.num_bytes, writable=True, what="region")
            if huge:
                collapse(self._mapping.address, layout.num_bytes)
            seen = Mapping(fd, layout.num_bytes, writable=True, what="region, as a worker maps it")
        finally:
            os.close(fd)
        total = layout.max_num_tokens * layout.rows_per_token[0]
        first, flags = layout.output(0, 0), layout.flag(0, 0, 0)
        view, at = self._mapping.view(), self._mapping.address
        self.out = view[first : first + total * row_bytes].reshape(total, row_bytes)
        self.flags = view[flags : flags + layout.blocks[0] * 8].view(np.uint64)
        self.poison()
        seen.view()[::4096].max()  # every page is there
        self.facts = {"huge_page_bytes": self._mapping.huge_bytes(), "huge_page_bytes_of_worker": seen.huge_bytes()}
        seen.close()
        self._words = np.zeros(2, np.uint64)  # heartbeat, pages that were gone
        self.readers = Readers(
            np.array([[at + first, at + flags, flag(1, 1), at + WORD_WAITERS]], np.uint64),
            np.array([self._words.ctypes.data, self._words.ctypes.data + 8, 0], np.uint64),
            layout.block_rows,
            total,
        )

    def poison(self) -> None:
        self.out[:] = POISON
        self.flags[:] = 0

    def close(self) -> None:
        self._mapping.close()


class Bench:
    """A table, regions, and rows to ask for."""

    def __init__(self, world: World, tokens: int, stack: ExitStack) -> None:
        at, spec = world.store.rows, world.spec
        self._gather = Gather(spec.format, at.bases, at.starts, at.step, "stored")
        self._raw = world.store.raw
        layout = Layout("rows", 1, tokens, 1, 0, True, (ROWS_PER_TOKEN * spec.row_bytes,), (ROWS_PER_TOKEN,))
        self.regions = {pages: Region(layout, spec.row_bytes, huge=pages == PAGES[0]) for pages in PAGES}
        for region in self.regions.values():
            stack.callback(region.close)
        rng = np.random.default_rng(11)
        self._sets = {share: [ordered(world.random_rows(rng, tokens, share)) for _ in range(SETS)] for share in SHARES}
        self._turns: dict[float, int] = defaultdict(int)

    def rows(self, way: Way) -> Rows:
        """The next ones of this share."""
        self._turns[way.share] += 1
        return self._sets[way.share][self._turns[way.share] % SETS][way.order]

    def run(self, way: Way, rows: Rows) -> float:
        """Microseconds."""
        region = self.regions[way.region]
        readers = region.readers if way.told == "blocks" else None
        native.wake(way.threads)
        with native.parallel_turn(way.threads) as shares:
            began = time.perf_counter_ns()
            done = self._gather.run(rows, region.out, shares, readers)
            took = (time.perf_counter_ns() - began) / 1e3
        if done != GATHERED or shares != way.threads:
            raise RuntimeError(f"{way}: expected all rows by {way.threads} threads, found {done} by {shares}")
        return took

    def check(self, way: Way) -> None:
        """Raise RuntimeError unless all rows are right, and their flags up."""
        region, rows = self.regions[way.region], self.rows(way)
        region.poison()
        self.run(way, rows)
        wrong = int((region.out != self._raw[rows]).any(axis=1).sum())
        told = int((region.flags == region.readers.addresses[0, 2]).sum())
        expected = region.flags.size if way.told == "blocks" else 0
        if wrong or told != expected:
            raise RuntimeError(f"{way}: {wrong} rows are wrong; expected {expected} flags, found {told}")


def ordered(rows: Rows) -> dict[str, Rows]:
    """The same row numbers [tokens, 16] in every order, flat."""
    flat = rows.reshape(-1)
    return {"tokens": flat, "heads": np.ascontiguousarray(rows.T).reshape(-1), "sorted": np.sort(flat)}


def ways(most_threads: int) -> Iterator[Way]:
    threads = [count for count in THREADS if count <= most_threads] or [most_threads]
    yield from (Way(*each) for each in itertools.product(PAGES, TOLD, SHARES, ORDERS, threads))


def run(options: argparse.Namespace, record: Record) -> None:
    """Every way, round by round."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if record.found.get("gather", {}).get("rounds", 0) >= rounds:
        print("gather: measured already")
        return
    if not options.budget.allows(EXPECTED_S, record, "gather"):
        return
    with World.make("fp8", options.rows) as world, ExitStack() as stack:
        record.put(world.describe(), "table")
        measure(record, Bench(world, TOKENS, stack), world.spec.size_bytes, config.num_threads(), rounds)


def measure(record: Record, bench: Bench, table_bytes: int, most_threads: int, rounds: int) -> None:
    """Compare, then time; the record has what was found every few rounds, and `rounds` once that is all."""
    all_ways = list(ways(most_threads))
    for way in all_ways:
        if way.threads == max(way.threads for way in all_ways):  # their number changes who does what, not what is done
            bench.check(way)
    record.put({pages: region.facts for pages, region in bench.regions.items()}, "regions")
    times: dict[Way, list[float]] = {way: [] for way in all_ways}
    rng = np.random.default_rng(13)
    began = time.monotonic()
    for turn in range(-WARM_ROUNDS, rounds):
        for way in in_turns(all_ways, rng):
            took = bench.run(way, bench.rows(way))
            if turn >= 0:
                times[way].append(took)
        late = turn >= 0 and time.monotonic() - began > TIMING_S
        if late or turn + 1 == rounds or (turn >= 0 and (turn + 1) % WRITE_EVERY == 0):
            record.put(found_of(times, table_bytes), "gather", "ways")
        if late:
            break
    record.put(rounds, "gather", "rounds")
    for name, one in record.found["gather"]["ways"].items():
        if one["threads"] == min(most_threads, SHOWN_THREADS):
            print(
                f"{name}: {one['us']['p50']:.0f} us, {one['over_tokens']['p50']:.2f} of the order of tokens", flush=True
            )


def in_turns(all_ways: list[Way], rng: np.random.Generator) -> list[Way]:
    """In a new order, but threads by threads: OpenMP ends and starts threads when their number changes."""
    threads = rng.permutation(sorted({way.threads for way in all_ways})).tolist()
    shuffled = [all_ways[i] for i in rng.permutation(len(all_ways))]
    return sorted(shuffled, key=lambda way: threads.index(way.threads))


def found_of(times: dict[Way, list[float]], table_bytes: int) -> dict[str, Any]:
    """By a readable name: the way, its times, and how many times longer than in the order of tokens (`over_tokens`) and
    than from the smallest part of the table (`over_smallest`).
    """
    found = {}
    for way, values in times.items():
        gb = float(f"{way.share * table_bytes / 1e9:.3g}")
        name = f"{way.region} region, {way.told} told, {gb:g} GB, {way.order}, {way.threads} threads"
        found[name] = {
            **way._asdict(),
            "table_gb": gb,
            "us": summary(values),
            "over_tokens": ratio(values, times[way._replace(order="tokens")]),
            "over_smallest": ratio(values, times[way._replace(share=min(SHARES))]),
        }
    return found
