"""Inside a step: how much throughput each way to get the rows leaves, beside the table in GPU memory.

A synthetic decoder (decoder.py) whose decode step takes 8 ms, and one of 2 ms; decode at 1, 64 and 256 requests with two
steps in flight, 64 also with one, and a prefill of 8,192 tokens. Contenders take turns, block by block, in an order drawn
anew each round; a block is some steps after two (before long ones: none) that do not count, and ratios are taken within
a round. Before anything is timed, the rows of each contender inside the step are compared with the reference bit for bit,
and the step's result with that of `hbm`.

    step_ms               median of the rounds, with its interval
    host_us               of a step, what the host spends in the lookup's calls outside the forward
    throughput_of_hbm     time of `hbm` / time, round by round, with its interval
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from typing import Any

import lookups
import numpy as np
import torch
from budget import UNLIMITED, Budget
from decoder import Decoder, width_for
from intervals import ratio, summary
from loop import Batch, Engine, Inputs
from on_device import page_locked
from record import Record
from tell import tell
from world import World

STEPS_MS = (8.0, 2.0)
CASES = (
    (Batch("decode", 64), 2),
    (Batch("decode", 64), 1),
    (Batch("prefill", 8192), 2),
    (Batch("decode", 256), 2),
    (Batch("decode", 1), 2),
)
SIZED_WITH = Batch("decode", 64)
BLOCK_S = 0.15
WARM_STEPS = 2
CHECKS = {"decode": 3, "prefill": 1}
MIN_ROUNDS = 8
# For the budget: about what contenders, a batch's graphs and comparisons, and the fewest rounds of a case take.
START_S, BATCH_S, MIN_CASE_S = 45.0, 5.0, 9.0
CASE_S = {8.0: 9.0, 2.0: 6.0}  # of timing, all contenders together
QUICK_S = 1.0
MAX_DISTANCE = 0.1  # between two results with the same rows, as a share of the largest element


class WrongError(Exception):
    """A step delivered something else than it must."""


def run(options: argparse.Namespace, record: Record) -> None:
    """Both decoders, every case; a contender that fails or is wrong is left out and the failure recorded."""
    device = torch.device("cuda", torch.cuda.current_device())
    tell(record, torch.cuda.get_device_properties(device).L2_cache_size, "gpu_cache_bytes")
    if not options.budget.allows(START_S + BATCH_S + MIN_CASE_S, record, "step"):
        return
    with World.make("fp8", options.rows) as world, world.worker() as worker, contextlib.ExitStack() as stack:
        tell(record, world.describe(), "table")
        with record.failing("page-locked"):
            stack.enter_context(page_locked(world, device))  # held, or each contender would register it anew
        inputs = Inputs(device)
        ways: dict[str, lookups.Lookup] = {}
        for name in lookups.NAMES:
            with record.failing("contenders", name):
                ways[name] = lookups.make(name, world, inputs, worker.address)
                stack.callback(ways[name].close)
                tell(record, ways[name].describe(), "contenders", name)
        for step_ms in STEPS_MS:
            if all(record.has(title(step_ms), f"{batch.name}, {number} in flight") for batch, number in CASES):
                continue
            decoder = Decoder(width_of(step_ms, inputs), device)
            tell(record, {"width": decoder.width, "layer_bytes": decoder.layer_bytes}, title(step_ms), "decoder")
            case_s = QUICK_S if options.quick else CASE_S[step_ms]
            measure(record, title(step_ms), decoder, ways, inputs, world, case_s, budget=options.budget)


def title(step_ms: float) -> str:
    return f"step {step_ms:g} ms"


def width_of(step_ms: float, inputs: Inputs) -> int:
    """The decoder's width with which a decode step without a table takes so long here."""
    return width_for(step_ms / 1e3, lambda width: _step_s(width, inputs))


def _step_s(width: int, inputs: Inputs) -> float:
    engine = Engine(Decoder(width, inputs.device), lookups.NoTable(), inputs)
    engine.prepare(SIZED_WITH)
    engine.steps(SIZED_WITH, 3)
    return float(np.median([engine.steps(SIZED_WITH, 5).step_s for _ in range(3)]))


def measure(
    record: Record,
    name: str,
    decoder: Decoder,
    ways: dict[str, lookups.Lookup],
    inputs: Inputs,
    world: World,
    case_s: float,
    cases: tuple[tuple[Batch, int], ...] = CASES,
    budget: Budget = UNLIMITED,
) -> None:
    """Every case with one decoder that is not in the record: capture, compare, then time."""
    for batch in dict.fromkeys(batch for batch, _ in cases):
        numbers = [number for other, number in cases if other == batch]
        if all(record.has(name, f"{batch.name}, {number} in flight") for number in numbers):
            continue
        if not budget.allows(BATCH_S + len(numbers) * max(case_s, MIN_CASE_S), record, name, batch.name):
            continue
        engines: dict[str, Engine] = {}
        for way, lookup in ways.items():
            with record.failing(name, batch.name, "rows", way):
                engine = Engine(decoder, lookup, inputs)
                check_rows(engine, batch, world)
                engines[way] = engine
                tell(record, "right", name, batch.name, "rows", way)
        with record.failing(name, batch.name, "results"):
            distances = _distances(engines, batch)
            tell(record, distances, name, batch.name, "distance from hbm")
            check_distances(distances)
        for in_flight in numbers:
            case = f"{batch.name}, {in_flight} in flight"
            with record.failing(name, case):
                for way, found in _race(engines, batch, in_flight, case_s).items():
                    tell(record, found, name, case, way)
        for engine in engines.values():
            engine.close()


def check_rows(engine: Engine, batch: Batch, world: World) -> None:
    """Prepare the batch; raise WrongError unless the rows inside a step are the reference's."""
    engine.prepare(batch)
    for _ in range(CHECKS[batch.kind]):
        _, rows = engine.look(batch)
        if rows is None:
            continue
        expected = world.reference(world.table.row_numbers(*engine.inputs.on_host(batch)))
        found = rows.view(torch.int16).cpu().numpy().view(np.uint16)
        wrong = int((found != expected).any(axis=1).sum())
        if wrong:
            raise WrongError(f"{wrong} of {batch.num_tokens} tokens have wrong rows")


def _distances(engines: dict[str, Engine], batch: Batch) -> dict[str, float]:
    """How far the results with the same ids are from those of `hbm`, as a share of the largest element."""
    engines["hbm"].inputs.fill(batch)
    hidden = {way: engine.look_again(batch)[0].float().cpu() for way, engine in engines.items()}
    base = hidden["hbm"]
    return {way: float((mine - base).abs().max() / base.abs().max()) for way, mine in hidden.items()}


def check_distances(distances: dict[str, float]) -> None:
    """With a table: the result of `hbm`. Without one: another."""
    wrong = [way for way, distance in distances.items() if (distance > MAX_DISTANCE) != (way == "none")]
    if wrong:
        raise WrongError(f"the results of {', '.join(wrong)} are not what they must be: {distances}")


def _race(engines: dict[str, Engine], batch: Batch, in_flight: int, case_s: float) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(13)
    names = list(engines)
    steps = max(1, round(BLOCK_S / engines[names[0]].steps(batch, 2, in_flight).step_s))
    step_s: dict[str, list[float]] = {name: [] for name in names}
    host_s: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < case_s or len(step_s[names[0]]) < MIN_ROUNDS:
            for name in rng.permutation(names).tolist():
                if steps > WARM_STEPS:
                    engines[name].steps(batch, WARM_STEPS, in_flight)
                times = engines[name].steps(batch, steps, in_flight)
                step_s[name].append(times.step_s)
                host_s[name].append(times.host_s)
    finally:
        gc.enable()
    return {name: _summary(batch, steps, step_s[name], host_s[name], step_s.get("hbm")) for name in names}


def _summary(
    batch: Batch, steps: int, step_s: list[float], host_s: list[float], hbm_s: list[float] | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "step_ms": summary([second * 1e3 for second in step_s]),
        "steps_per_block": steps,
        "tokens_per_s": round(batch.num_tokens / float(np.median(step_s))),
        "host_us": round(float(np.median(host_s)) * 1e6, 1),
    }
    if hbm_s is not None:
        throughput = ratio(hbm_s, step_s)
        found["throughput_of_hbm"] = throughput
        found["within_1_percent"] = throughput["low"] >= 0.99
    return found
