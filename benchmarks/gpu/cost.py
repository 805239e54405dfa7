"""What serving costs in memory: of the GPU, and of the host for one, two and three engine processes on one worker.

gpu                one engine in this process, by route: what the connector says it holds (`device_bytes`), what torch
                   and the driver (cuMemGetInfo) count before and after, and a step's output of 8,192 tokens
worker             GPU memory that went while a worker served a step, and what it has open of the driver: nothing
engines            proportional shares of the worker, this process and the engines, which count shared memory once;
                   `table_copies` is the growth of the host's shared memory since before the table, over its exact size
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from typing import Any

import lookups
import torch
from decoder import HIDDEN
from engine_process import EngineProcess
from loop import Batch, Inputs
from memory_facts import change, gpu_descriptors, host, process, total
from record import Record
from tell import tell
from world import World

BATCH = Batch("prefill", 8192)
ENGINES = {"staged": 3, "direct": 2}  # processes, one more at a time

TABLE_S, ROUTE_S, ENGINE_S = 20.0, 6.0, 15.0  # about what each takes; for the budget


def run(options: argparse.Namespace, record: Record) -> None:
    """GPU first, then the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not options.budget.allows(TABLE_S + ROUTE_S, record, "gpu"):
        return
    torch.zeros(1, device=device)
    before = host()
    with World.make("fp8", options.rows) as world:
        table_bytes = world.spec.size_bytes
        tell(record, table_bytes, "table_bytes")
        tell(record, change(before, host()), "host", "table")
        free = free_bytes(device)
        with world.worker() as worker:
            tell(record, {"gpu_bytes": free - free_bytes(device)}, "worker", "started")
            for route in lookups.OURS:
                if not options.budget.allows(ROUTE_S, record, "gpu", route):
                    continue
                with record.failing("gpu", route):
                    tell(record, _gpu_cost(world, worker.address, route, device), "gpu", route)
            tell(record, {"open": gpu_descriptors(worker.pid)}, "worker", "driver")
            for route, count in ENGINES.items():
                if not options.budget.allows(count * ENGINE_S, record, "engines", route):
                    continue
                with record.failing("engines", route):
                    _engines(record, world, worker.address, worker.pid, route, before)


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def _gpu_cost(world: World, address: str, route: str, device: torch.device) -> dict[str, int]:
    """Before and after a connector, and after its first step."""
    inputs = Inputs(device)
    gc.collect()
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_allocated(device), free_bytes(device)
    lookup = lookups.make(route, world, inputs, address)
    try:
        assert isinstance(lookup, lookups.Ours)
        found = {
            "device_bytes": lookup.connector.device_bytes,
            "torch_bytes": torch.cuda.memory_allocated(device) - held,
            "driver_bytes": free - free_bytes(device),
            "output_bytes": BATCH.num_tokens * HIDDEN * 2,
        }
        hidden = torch.zeros((BATCH.num_tokens, 1), device=device)
        held = torch.cuda.memory_allocated(device)
        inputs.fill(BATCH)
        lookup.before(BATCH)
        lookup.begin(*inputs.of(BATCH))
        rows = lookup.take(hidden)
        torch.cuda.synchronize(device)
        lookup.after()
        found["torch_bytes_in_step"] = torch.cuda.memory_allocated(device) - held
        del rows, hidden
        torch.cuda.empty_cache()
        # the kernels' code and the driver's own tables for the registered memory are in this one
        found["driver_bytes_after_step"] = free - free_bytes(device)
        return found
    finally:
        lookup.close()


def _engines(record: Record, world: World, address: str, worker_pid: int, route: str, before: dict[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        engines: list[EngineProcess] = []
        for count in range(1, ENGINES[route] + 1):
            engine = EngineProcess(world, address, Batch("decode", 64), routes=[route], widths=[0])
            engines.append(stack.enter_context(engine))
            started = engine.hear()
            if started["failed"]:
                raise RuntimeError(f"engine {count}: {started['failed']}")
            parts = {
                "worker": process(worker_pid),
                "this process": process(),
                **{f"engine {i + 1}": process(engine.pid) for i, engine in enumerate(engines)},
            }
            grown = change(before, host())
            found: dict[str, Any] = {
                "processes": parts,
                "together": total(parts.values()),
                "host": grown,
                "table_copies": round(grown["Shmem"] / world.spec.size_bytes, 4),
            }
            tell(record, found, "engines", route, str(count))
