"""Which route is faster for how many tokens, measured before an engine's first step: on its device, worker and table.

Eager steps with random ids, from ids on the device to rows on the device, each route in turn, by the device's clock and
behind other work of the device: what a route costs the host is hidden in an engine that launches ahead, or replays a graph.
They run on a connection of their own, so that no step of the engine is counted. What they cost is bounded, once the kernels
are compiled.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ple_offload.connector.base import PortSpec, Route
from ple_offload.connector.choose import EVERY_SIZE, Timing
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.direct import DirectRoute, TablesOnDevice
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.sources import Sources
from ple_offload.connector.staged import StagedRoute

SIZES = (1, 16, 64, 256, 1024, 4096)
REPEATS = 7
BUDGET_S = 0.5
BUSY_CYCLES = 1_000_000  # of the device, some 0.6 ms: longer than a step's launches take
Step = Callable[[int], float]  # one step of so many tokens -> seconds


def border(timings: Sequence[Timing]) -> int:
    """The largest number of tokens up to which `direct` is no slower; EVERY_SIZE where it never was.

    Between two sizes the times are taken to be straight lines; behind the first size where `direct` lost it goes on losing.
    """
    before: Timing | None = None
    for now in timings:
        lead = now.staged_us - now.direct_us
        if lead < 0:
            if before is None:
                return 0
            lead_before = before.staged_us - before.direct_us
            share = lead_before / (lead_before - lead)
            return before.num_tokens + int(share * (now.num_tokens - before.num_tokens))
        before = now
    return EVERY_SIZE if timings else 0


def time_both(
    direct: Step, staged: Step, sizes: Sequence[int], clock: Callable[[], float] = time.monotonic
) -> tuple[tuple[Timing, ...], float]:
    """Median times by size, smallest first, and the seconds it took; sizes for which no time is left are left out."""
    for size in sizes:  # compiles kernels and maps pages
        direct(size)
        staged(size)
    began = clock()
    timings: list[Timing] = []
    for size in sizes:
        times: list[tuple[float, float]] = []
        while len(times) < REPEATS and (not times or clock() - began < BUDGET_S):
            times.append((direct(size), staged(size)))
        direct_us, staged_us = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
        timings.append(Timing(size, direct_us, staged_us))
        if clock() - began >= BUDGET_S:
            break
    return tuple(timings), clock() - began


def measure(
    config: ConnectorConfig, ports: Sequence[PortSpec], address: str, on_device: TablesOnDevice, device: torch.device
) -> tuple[tuple[Timing, ...], float]:
    """`time_both` of this engine's layers. Raises StepError when rows did not come, and as connecting and routes do."""
    most = min(config.max_num_tokens, SIZES[-1])
    trial = replace(
        config,
        max_num_tokens=most,
        max_num_reqs=1,
        session=f"{config.session[:150]} measures {uuid.uuid4().hex[:12]}",
        dp_rank=0,
        dp_size=1,
        tp_rank=0,
        tp_size=1,
        worker_id=0,
        max_concurrent_batches=1,
    )
    draw = _Draw(trial, ports, on_device, device)
    transport = RemoteTransport(trial, ports, address)
    routes: list[Route] = []
    try:
        routes.append(DirectRoute(trial, ports, on_device, draw.sources, device))
        routes.append(StagedRoute(trial, ports, transport, draw.sources, device))
        direct, staged = routes
        step = transport.counted
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        def run(route: Route, size: int) -> float:
            draw.fill(size)
            torch.cuda.synchronize(device)
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            began.record()
            if route.asks_worker(step, size):
                route.stage(step, 1, size, draw.sources)
            route.begin(step, 1, size, dummy=False)
            for index in range(len(ports)):
                route.start(index, draw.ids[:size], draw.starts, draw.context)
                route.finish(index, size)
            ended.record()
            torch.cuda.synchronize(device)
            error = route.error(step)
            if error is not None:
                raise error
            route.release(step)
            return float(began.elapsed_time(ended)) / 1e3

        def run_staged(size: int) -> float:
            nonlocal step
            step += 1
            return run(staged, size)

        sizes = sorted({size for size in SIZES if size <= most} | {most})
        with on_device.cuda.current():
            return time_both(lambda size: run(direct, size), run_staged, sizes)
    finally:
        for route in routes:
            route.close()
        transport.close()


class _Draw:
    """Sources of a step of one request, filled with random ids or rows each time: rows read before come from caches."""

    def __init__(
        self, config: ConnectorConfig, ports: Sequence[PortSpec], on_device: TablesOnDevice, device: torch.device
    ) -> None:
        family = on_device.tables[ports[0].layer].spec.family
        self._vocab_size, self._layers = family.vocab_size, {port.layer: on_device.layers[port.layer] for port in ports}
        self.ids = torch.zeros(config.max_num_tokens, dtype=torch.int64, device=device)
        self.starts = torch.zeros(2, dtype=torch.int64, device=device)
        self.context = torch.full((1, family.context_len), family.filler, dtype=torch.int64, device=device)
        self._rows = {
            layer: torch.zeros((config.max_num_tokens, table.rows_per_token), dtype=torch.int64, device=device)
            for layer, table in self._layers.items()
        }
        self.sources = (
            Sources(row_numbers=self._rows)
            if config.request == "rows"
            else Sources(self.ids, self.starts, self.context)
        )

    def fill(self, num_tokens: int) -> None:
        self.ids[:num_tokens].random_(0, self._vocab_size)
        self.starts[1] = num_tokens
        for layer, rows in self._rows.items():
            rows[:num_tokens].random_(0, self._layers[layer].num_rows)
