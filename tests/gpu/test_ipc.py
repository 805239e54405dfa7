"""What route `ipc` alone does on a GPU: memory shared between processes, given back, and refused."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.test_routes import Engine, same, write
from ple_offload import CpuGpuSemaphore
from ple_offload.cuda import Context, Cuda
from ple_offload.errors import CudaError, ProtocolError
from ple_offload.worker.spawn import SpawnedWorker

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ipc"), "F8_E4M3")


@pytest.fixture
def worker(path: Path) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(path, tier="ram") as started:
        yield started


def is_right(one: Engine, num_tokens: int = 300) -> bool:
    one.fill(np.random.default_rng(1), num_tokens, 4)
    step = one.connector.prepare_forward(4, num_tokens)
    found = one.forward(num_tokens)
    torch.cuda.synchronize()
    one.connector.check(step)
    one.connector.release_outputs()
    return same(found, one.expected())


def free_bytes() -> int:
    """Of the whole GPU, other processes' use counted."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def until(true: Callable[[], bool], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.05)


def test_the_last_rank_leaves_no_memory_behind(path: Path, worker: SpawnedWorker) -> None:
    """Neither the outputs nor the worker's context."""
    one = Engine(path, "staged-mirror", worker)
    assert is_right(one)  # kernels are loaded
    one.close()
    before = free_bytes()
    for _ in range(3):
        one = Engine(path, "ipc-mirror", worker)
        assert is_right(one)
        assert before - free_bytes() > 100 * MIB, "no context was made"
        one.close()
        until(lambda: free_bytes() > before - 32 * MIB)


def serve_until_killed(path: Path, address: str, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    from ple_offload.connector import ConnectorConfig, PleOffloadConnector
    from ple_offload.layer import PleOffloadLayer

    ids, starts = torch.zeros(512, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    starts[1] = 512
    layer = PleOffloadLayer(1, 2560)
    with PleOffloadConnector(
        ConnectorConfig(512, 1, session="killed", route="ipc"),
        layer,
        "cuda",
        address,
        input_ids_source=ids,
        query_start_loc_source=starts,
        ngram_context_source=torch.zeros((1, 2), dtype=torch.int64),
    ) as connector:
        for i in range(1 << 30):
            connector.prepare_forward(1, 512)
            layer(torch.empty((512, 1), device="cuda"), ids)
            torch.cuda.synchronize()
            connector.release_outputs()
            if i == 20:
                results.put(os.getpid())


def test_an_engine_that_is_killed_disturbs_nobody(path: Path, worker: SpawnedWorker) -> None:
    spawn = multiprocessing.get_context("spawn")
    one = Engine(path, "ipc-async", worker)
    try:
        assert is_right(one)
        for _ in range(2):
            results = spawn.Queue()
            engine = spawn.Process(target=serve_until_killed, args=(path, worker.address, results))
            engine.start()
            pid = results.get(timeout=50)
            assert is_right(one)
            os.kill(pid, signal.SIGKILL)
            engine.join(20)
            assert all(is_right(one) for _ in range(20))
    finally:
        one.close()


def test_a_handle_of_nothing_is_refused_and_the_worker_serves_on(
    path: Path, worker: SpawnedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Cuda, "share", lambda self, address: bytes(64))
        with pytest.raises(ProtocolError, match=r"refused: cuIpcOpenMemHandle\(.*use route 'staged'"):
            Engine(path, "ipc-mirror", worker)
    one = Engine(path, "ipc-mirror", worker)
    assert is_right(one)
    one.close()


def test_a_device_is_found_by_the_uuid_that_torch_gives() -> None:
    gpu = Cuda(torch.device("cuda", 0))
    assert gpu.uuid() == str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
    context = Context(gpu.uuid())
    address = context.allocate(4096)
    assert context.num_bytes_from(address) >= 4096
    context.free(address)
    context.close()
    with pytest.raises(CudaError, match=r"expected one of the GPUs that this process sees"):
        Context("00000000-0000-0000-0000-000000000000")


def test_a_semaphore_orders_two_streams() -> None:
    gpu = Cuda(torch.device("cuda", 0))
    address = gpu.allocate(4096)
    waiting, signalling = gpu.make_stream(), gpu.make_stream()
    try:
        gpu.fill(signalling, address, 0, 4096)
        assert gpu.wait_for(signalling, 5)
        semaphore = CpuGpuSemaphore(gpu, address)
        semaphore.wait(waiting, 7)
        semaphore.signal(signalling, 6)
        assert gpu.wait_for(signalling, 5)
        assert not gpu.wait_for(waiting, 0.1)
        semaphore.signal(signalling, 7)
        assert gpu.wait_for(waiting, 5)
    finally:
        gpu.write_value(signalling, address, 7)
        assert gpu.wait_for(waiting, 5)
        for stream in (waiting, signalling):
            gpu.end_stream(stream)
        gpu.free(address)
