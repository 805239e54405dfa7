"""Two engine processes on one worker, one that decodes and one that prefills: how much each is slowed by the other.

On a machine with two GPUs each engine has its own. On one GPU the two take turns on it, whatever their tables do: `none`,
the same two engines without a table, shows how much that is. Three ways in turns within a round: decode alone, prefill
alone, both at once; ratios are taken within a round.

    decoder 2 ms      engines whose decode step takes 2 ms
    lookup alone      engines that do nothing else, as fast as they can

    slowed            time of a step beside the other engine / alone, round by round
    host_gb_per_s     bytes of rows a second that both read from host memory together, while both ran
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from engine_process import EngineProcess
from intervals import ratio, summary
from loop import Batch, Inputs
from record import Record
from step import width_of
from tell import tell
from world import World

DECODE, PREFILL = Batch("decode", 64), Batch("prefill", 8192)
ROUTES = ("none", "staged", "auto")
STEP_MS = 2.0
WINDOW_S, ROUNDS = 0.5, 6
QUICK_ROUNDS = 2
LEAD_S = 0.02  # from the word to the start: both have heard it by then

START_S = 50.0  # about what the table and both engines take; for the budget


def run(options: argparse.Namespace, record: Record) -> None:
    """Every route, with a decoder and without."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    case_s = 3 * rounds * (WINDOW_S + LEAD_S) + 1
    if not options.budget.allows(START_S + case_s, record, "engines"):
        return
    gpus = torch.cuda.device_count()
    tell(record, gpus, "gpus")
    width = width_of(STEP_MS, Inputs(torch.device("cuda", 0)))
    torch.cuda.empty_cache()
    with (
        World.make("fp8", options.rows) as world,
        world.worker() as worker,
        engines(world, worker.address, ROUTES, (width, 0), gpus) as pair,
    ):
        for load, wide in ((f"decoder {STEP_MS:g} ms", width), ("lookup alone", 0)):
            for route in ROUTES:
                if (wide or route != "none") and options.budget.allows(case_s, record, load, route):
                    with record.failing(load, route):
                        found = measure(pair, world, route, wide, rounds)
                        tell(record, found, load, route)


@contextlib.contextmanager
def engines(
    world: World,
    address: str,
    routes: Sequence[str],
    widths: Sequence[int],
    gpus: int,
    batches: tuple[Batch, Batch] = (DECODE, PREFILL),
) -> Iterator[dict[Batch, EngineProcess]]:
    """Two engines that are ready, each on a GPU of its own where there are two."""
    with contextlib.ExitStack() as stack:
        pair = {
            batch: stack.enter_context(
                EngineProcess(world, address, batch, routes=routes, widths=widths, device=i % max(1, gpus))
            )
            for i, batch in enumerate(batches)
        }
        for engine in pair.values():
            print(engine.name, engine.hear(), flush=True)
        yield pair


def measure(
    pair: dict[Batch, EngineProcess],
    world: World,
    route: str,
    width: int,
    rounds: int,
    window_s: float = WINDOW_S,
) -> dict[str, Any]:
    """One route's two engines: alone, and together."""
    alone_ms: dict[Batch, list[float]] = {batch: [] for batch in pair}
    together_ms: dict[Batch, list[float]] = {batch: [] for batch in pair}
    for _ in range(rounds):
        for batch in pair:
            alone_ms[batch].append(_run({batch: pair[batch]}, route, width, window_s)[batch])
        for batch, step_ms in _run(pair, route, width, window_s).items():
            together_ms[batch].append(step_ms)
    found: dict[str, Any] = {}
    gb_per_s = 0.0
    for batch in pair:
        slowed = ratio(together_ms[batch], alone_ms[batch])
        found[batch.name] = {
            "alone_ms": summary(alone_ms[batch]),
            "together_ms": summary(together_ms[batch]),
            "slowed": slowed,
            "within_10_percent": slowed["p50"] <= 1.1,
        }
        rows = batch.num_tokens * world.spec.rows_per_token
        gb_per_s += rows * world.spec.row_bytes / float(np.median(together_ms[batch])) / 1e6
    if route != "none":
        found["host_gb_per_s"] = round(gb_per_s, 2)
    return found


def _run(running: dict[Batch, EngineProcess], route: str, width: int, window_s: float) -> dict[Batch, float]:
    """Milliseconds of a step of each engine, all running in the same window."""
    begin_s = time.monotonic() + LEAD_S
    for engine in running.values():
        engine.tell("run", route, width, begin_s, begin_s + window_s)
    return {batch: float(engine.hear()["step_ms"]) for batch, engine in running.items()}
