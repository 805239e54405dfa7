"""Many random steps on a GPU: sizes, routes, eager and captured, one or two in flight; every row checked, nothing grows.

PLE_SOAK_STEPS sets the number (default 20,000; `make soak-gpu` runs 100,000).
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.test_routes import ROUTES, WORKER_ROUTES, Engine, capture, same, write
from ple_offload.worker.spawn import SpawnedWorker

pytestmark = pytest.mark.gpu

STEPS = int(os.environ.get("PLE_SOAK_STEPS", "20000"))
PADDED = (1, 8, 64, 256)


def resident_kib() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("route", ROUTES)
def test_not_one_wrong_row_and_no_growth(tmp_path: Path, route: str) -> None:
    path = write(tmp_path, "F8_E4M3")
    worker = SpawnedWorker(path, tier="ram") if route in WORKER_ROUTES else None
    one = Engine(path, route, worker)
    rng = np.random.default_rng(int(os.environ.get("PLE_SOAK_SEED", "0")))
    try:
        graphs = {padded: capture(one, padded) for padded in PADDED}
        start: tuple[int, int, int] | None = None
        steps = STEPS // len(ROUTES)
        waiting: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        for i in range(steps):
            padded = int(rng.choice(PADDED))
            num_tokens = int(rng.integers(1, padded + 1))
            num_reqs = int(rng.integers(1, min(num_tokens, 16) + 1))
            one.fill(rng, num_tokens, num_reqs)
            if i % 50 == 49:  # a dummy between
                one.connector.prepare_forward(num_reqs, num_tokens, dummy_run=True)
                out = one.forward(padded)
                assert one.table is not None or not out.any(), i
                one.connector.release_outputs()
            step = one.connector.prepare_forward(num_reqs, padded if one.on_device else num_tokens)
            if rng.random() < 0.5:
                graph, held = graphs[padded]
                held.fill_(float("inf"))
                graph.replay()
                out = held.clone()
            else:
                out = one.forward(padded)
            waiting.append((out, one.expected(), step))
            if len(waiting) == 2 or rng.random() < 0.5:
                torch.cuda.synchronize()
                while waiting:
                    found, expected, number = waiting.popleft()
                    one.connector.check(number)
                    assert same(found, expected), (route, i, number)
                    one.connector.release_outputs()
            if i == steps // 4:
                torch.cuda.synchronize()
                start = resident_kib(), torch.cuda.memory_allocated(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        torch.cuda.synchronize()
        assert start is not None
        assert resident_kib() < start[0] + 64 * 1024
        assert torch.cuda.memory_allocated() <= start[1] + (4 << 20)
        assert len(os.listdir("/proc/self/fd")) <= start[2] + 2  # noqa: PTH208
    finally:
        one.close()
        if worker is not None:
            worker.close()
