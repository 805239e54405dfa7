"""Steps through a worker process against the same lookup in this process: latency, a busy caller, idleness, memory.

The contenders share one table file. `in process` is one thread; so is the worker, on the other core. What is timed is from
before `prepare_forward` until the values are in the caller's tensor, without the torch op of a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from calm import Calm, cpu_s
from child import pss_bytes
from ids import Ids, Stream
from random_table import LAYER, ROW_DIM, ROWS_PER_TOKEN, Made
from timing import Plan, interleave, ratio, spread

from ple_offload import Table, open_table
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.layer import PleOffloadLayer
from ple_offload.worker.spawn import SpawnedWorker

TOKENS = (1, 64, 4096)
PLANS = {1: Plan(25, 200, 20), 64: Plan(25, 60, 5), 4096: Plan(40, 8, 2)}
TOY_PLAN = Plan(rounds=2, calls=2, warm_calls=1)
BUSY_S = 0.008
SESSIONS = 8
IDLE_S = 10.0


def run(made: Made, streams: dict[str, Stream], calm: Calm, *, toy: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        table = stack.enter_context(open_table(made.folder, LAYER, "ram", threads=1))
        worker = stack.enter_context(SpawnedWorker(made.folder, tier="ram", threads=1))
        calm.ours.append(worker.pid)
        client = stack.enter_context(Client(worker.address, 4096, 1, "bench"))
        results = []
        for num_tokens in TOKENS:
            plan = TOY_PLAN if toy else PLANS[num_tokens]
            contenders = {
                "in process": partial(_in_process, table, np.empty((num_tokens, table.embed_dim), _bf16())),
                "worker": client.step,
            }
            for kind, stream in streams.items():
                ids = stream.take(num_tokens)
                assert np.array_equal(client.values(ids), table.lookup(ids).view(np.int16))
                blocks = interleave(contenders, partial(stream.take, num_tokens), plan, calm)
                results.append(
                    {
                        "ids": kind,
                        "tokens": num_tokens,
                        "us": {name: spread(times) for name, times in blocks.items()},
                        "worker / in process": ratio(blocks["worker"], blocks["in process"]),
                    }
                )
        random = streams["random"]
        return {
            "results": results,
            "busy_caller": _busy(client, random, 20 if toy else 500),
            "idle_worker_cpu_percent": _idle(worker.pid, 0.5 if toy else IDLE_S),
            "sessions": _sessions(worker, 2 if toy else SESSIONS),
        }


class Client:
    """One engine of one layer, its sources, and the step that is timed."""

    def __init__(self, address: str, max_num_tokens: int, max_num_reqs: int, session: str) -> None:
        self.ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.starts = torch.zeros(max_num_reqs + 1, dtype=torch.int64)
        self._ids, self._starts = self.ids.numpy(), self.starts.numpy()
        context = torch.full((max_num_reqs, 2), 248_044)
        self._layer = PleOffloadLayer(LAYER, ROWS_PER_TOKEN * ROW_DIM)
        self.connector = PleOffloadConnector(
            ConnectorConfig(max_num_tokens, max_num_reqs, session=session, staging="async"),
            self._layer,
            "cpu",
            address,
            input_ids_source=self.ids,
            query_start_loc_source=self.starts,
            ngram_context_source=context,
        )

    def stage(self, ids: Ids) -> int:
        self._ids[: len(ids)] = ids
        self._starts[1] = len(ids)
        return len(ids)

    def step(self, ids: Ids) -> Callable[[], object]:
        count = len(ids)

        def call() -> None:
            self.stage(ids)
            number = self.connector.prepare_forward(1, count)
            self.connector.deliver(0, count)
            self.connector.check(number)
            self.connector.release_outputs()

        return call

    def values(self, ids: Ids) -> np.ndarray:
        count = self.stage(ids)
        self.connector.prepare_forward(1, count)
        values = self.connector.deliver(0, count).view(torch.int16).numpy()
        self.connector.release_outputs()
        return values

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connector.close()


def _bf16() -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _in_process(table: Table, out: np.ndarray, ids: Ids) -> Callable[[], object]:
    return lambda: table.lookup(ids, out=out)


def _busy(client: Client, stream: Stream, steps: int) -> dict[str, Any]:
    """How long the rows of 64 tokens are still waited for when the caller computed for 8 ms after publishing them."""
    waits = []
    for _ in range(steps):
        count = client.stage(stream.take(64))
        client.connector.prepare_forward(1, count)
        until = time.perf_counter() + BUSY_S
        while time.perf_counter() < until:
            pass
        began = time.perf_counter_ns()
        client.connector.deliver(0, count)
        waits.append((time.perf_counter_ns() - began) / 1e3)
        client.connector.release_outputs()
    return {
        "busy_ms": BUSY_S * 1e3,
        "steps": steps,
        "us": spread(waits),
        "p99_us": round(float(np.percentile(waits, 99)), 1),
    }


def _idle(pid: int, seconds: float) -> float:
    """Share of a core that a worker with a connected session uses while no step is announced, in percent."""
    before = cpu_s(pid)
    time.sleep(seconds)
    return round((cpu_s(pid) - before) / seconds * 100, 3)


def _sessions(worker: SpawnedWorker, count: int) -> dict[str, Any]:
    """Memory of the worker beside the table and the sessions' own buffers, with one session and with more."""
    with ExitStack() as stack:
        before = pss_bytes(worker.pid)
        clients = [stack.enter_context(Client(worker.address, 512, 1, f"session {i}")) for i in range(count)]
        for client in clients:
            client.values(np.arange(512, dtype=np.int64))
        after = pss_bytes(worker.pid)
        buffers = sum(client.connector._transport.layout.num_bytes for client in clients)
    return {"sessions": count, "buffers_bytes": buffers, "worker_pss_growth_bytes": after - before}
