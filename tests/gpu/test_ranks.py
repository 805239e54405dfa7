"""Two TP x two DP ranks as four processes on one GPU, and several models on one worker: right, whoever is first."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.test_routes import CONFIG, Engine, same, write
from ple_offload.worker.spawn import SpawnedWorker

pytestmark = pytest.mark.gpu


def rank(
    path: Path,
    address: str,
    route: str,
    dp_rank: int,
    tp_rank: int,
    results: multiprocessing.Queue,  # type: ignore[type-arg]
) -> None:
    """Run 30 steps; all TP ranks of a DP rank draw the same inputs, as an engine's would have them."""
    import ple_offload
    from ple_offload.connector import ConnectorConfig, PleOffloadConnector
    from ple_offload.layer import PleOffloadLayer

    table = ple_offload.open_table(path, tier="file")
    ids, starts = torch.zeros(512, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    context = torch.full((8, 2), CONFIG["eos_token_id"])
    layer = PleOffloadLayer(1, 2560)
    config = ConnectorConfig(512, 8, dp_rank=dp_rank, dp_size=2, tp_rank=tp_rank, tp_size=2, route=route)
    right = 0
    with PleOffloadConnector(
        config,
        layer,
        "cuda",
        address,
        input_ids_source=ids,
        query_start_loc_source=starts,
        ngram_context_source=context,
    ) as connector:
        rng = np.random.default_rng(dp_rank)
        for _ in range(30):
            count = int(rng.integers(1, 513))
            ids[:count] = torch.from_numpy(rng.integers(0, 1000, count))
            starts[:] = count
            starts[0] = 0
            step = connector.prepare_forward(1, count)
            found = layer(torch.empty((count, 1), device="cuda"), ids)
            torch.cuda.synchronize()
            connector.check(step)
            right += same(found, table.lookup(ids[:count], dtype="bf16"))
            connector.release_outputs()
    results.put((dp_rank, tp_rank, right))


@pytest.mark.parametrize("route", ["staged", "ipc"])
def test_two_by_two_ranks(tmp_path: Path, route: str) -> None:
    path = write(tmp_path, "F8_E4M3")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with SpawnedWorker(path, tier="ram") as worker:
        ranks = [
            spawn.Process(target=rank, args=(path, worker.address, route, dp, tp, results))
            for dp in (0, 1)
            for tp in (0, 1)
        ]
        for process in ranks:
            process.start()
        found = sorted(results.get(timeout=50) for _ in ranks)
        for process in ranks:
            process.join(20)
    assert found == [(dp, tp, 30) for dp in (0, 1) for tp in (0, 1)]


def test_models_of_every_route_on_one_worker(tmp_path: Path) -> None:
    path = write(tmp_path, "BF16")
    with SpawnedWorker(path, tier="ram") as worker:
        models = [Engine(path, route, worker) for route in ("staged-async", "staged-mirror", "ipc-async", "ipc-mirror")]
        rng = np.random.default_rng(1)
        for _ in range(20):
            for one in models:
                one.fill(rng, 300, 7)
                one.step = one.connector.prepare_forward(7, 300)
            outs = [one.forward(300) for one in models]
            torch.cuda.synchronize()
            for one, out in zip(models, outs, strict=True):
                one.connector.check(one.step)
                assert same(out, one.expected())
                one.connector.release_outputs()
        for one in models:
            one.close()
