"""Routes of the adapters' tables: what is tried, what is told, and what `auto` falls back to where no GPU route works."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip(
    "transformers.models.qwen4_exp.modeling_qwen4_exp", reason="the adapter needs a transformers that has Qwen4Exp"
)

import ple_offload  # noqa: E402
from ple_offload.connector.config import Limits  # noqa: E402
from ple_offload.engines import tables as module  # noqa: E402
from ple_offload.engines import transformers as engine  # noqa: E402
from ple_offload.engines.remote import RemoteTables  # noqa: E402
from ple_offload.engines.tables import ModelTables, check_route  # noqa: E402
from ple_offload.errors import ConnectionLostError, CudaError, ForkError, StoreError, UsageError  # noqa: E402
from ple_offload.memory import sigbus  # noqa: E402
from ple_offload.worker.spawn import SpawnedWorker  # noqa: E402
from support import forked  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IDS = torch.tensor([[5, 6, 7, 8]])
CONTEXT = torch.tensor([[7, 7]])


class GpuClients:
    """Takes the place of a client's constructor: on a GPU refuses with `reason`, elsewhere makes the real one."""

    def __init__(self) -> None:
        self.reason: Exception | None = None
        self.routes: list[tuple[torch.device, str]] = []

    def __call__(self, spec: Any, address: str, dtype: Any, device: Any, config: Any, tables: Any) -> Any:
        self.routes.append((device, config.route))
        if device.type == "cuda" and self.reason is not None:
            raise self.reason
        return CLIENT(spec, address, dtype, device, config, tables)


CLIENT = module._Client


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuClients:
    """A GPU that torch sees, and clients that say what was asked of them."""
    clients = GpuClients()
    monkeypatch.setattr(module, "_Client", clients)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return clients


@pytest.fixture
def inline(checkpoint: Path) -> Iterator[Callable[..., ModelTables]]:
    spec = ple_offload.inspect(checkpoint)
    with ple_offload.open_table(checkpoint, tier="file") as table:
        yield lambda **options: ModelTables(spec, "inline", tables={1: table}, **options)


@pytest.fixture(scope="module")
def worker(make_checkpoint: Callable[..., Path]) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(make_checkpoint(), tier="file") as spawned:
        yield spawned


@pytest.mark.parametrize(
    "reason", [CudaError("cuMemHostRegister: no."), UsageError("GPU routes need triton.")], ids=str
)
def test_auto_takes_the_host_where_no_gpu_route_works_and_says_why_once(
    gpu: GpuClients, inline: Callable[..., ModelTables], reason: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.reason = reason
    tables = inline()
    with caplog.at_level(logging.WARNING):
        for dtype in (BF16, BF16, FP32):
            tables.connect(dtype, GPU)
    assert gpu.routes == [(GPU, "auto")] * 2  # a dtype that was refused is not tried again
    (record,) = caplog.records
    assert str(reason) in record.getMessage()
    assert "cuda:0" in record.getMessage()
    assert not tables.connectors
    assert tables.lookup(1, IDS, CONTEXT, BF16).shape == (1, 4, 64)


def test_auto_with_a_worker_asks_it_from_the_host(
    gpu: GpuClients, worker: SpawnedWorker, checkpoint: Path, inline: Callable[..., ModelTables]
) -> None:
    gpu.reason = CudaError("cuMemHostRegister: no.")
    tables = RemoteTables(ple_offload.inspect(checkpoint), worker.address)
    tables.connect(BF16, GPU)
    assert gpu.routes == [(GPU, "auto"), (CPU, "host")]
    (connector,) = tables.connectors
    assert connector.device == CPU
    rows = tables.lookup(1, IDS, CONTEXT, BF16)
    assert torch.equal(rows, inline().lookup(1, IDS, CONTEXT, BF16))
    tables.close()
    with pytest.raises(StoreError, match="was closed"):
        tables.lookup(1, IDS, CONTEXT, BF16)


@pytest.mark.parametrize("reason", [ConnectionLostError("gone"), StoreError("closed"), RuntimeError("bug")], ids=str)
def test_auto_hides_no_other_error(gpu: GpuClients, inline: Callable[..., ModelTables], reason: Exception) -> None:
    gpu.reason = reason
    with pytest.raises(type(reason), match=str(reason)):
        inline().connect(BF16, GPU)


@pytest.mark.parametrize("reason", [CudaError("refused"), UsageError("impossible")], ids=str)
def test_an_explicit_route_that_cannot_work_is_an_error(
    gpu: GpuClients, inline: Callable[..., ModelTables], reason: Exception
) -> None:
    gpu.reason = reason
    tables = inline(route="direct")
    for device in (GPU, CPU):  # a model on the CPU is yet to be moved
        with pytest.raises(type(reason), match=str(reason)):
            tables.connect(BF16, device)
    assert gpu.routes == [(GPU, "direct")] * 2
    with pytest.raises(UsageError, match="route 'direct': expected ids on a GPU, found them on cpu"):
        tables.lookup(1, IDS, CONTEXT, BF16)


def test_route_host_asks_no_gpu(gpu: GpuClients, inline: Callable[..., ModelTables]) -> None:
    gpu.reason = CudaError("refused")
    tables = inline(route="host")
    tables.connect(BF16, GPU)
    assert not gpu.routes
    assert tables.lookup(1, IDS, CONTEXT, BF16).shape == (1, 4, 64)


@pytest.mark.parametrize("skip", [None, True, False])
def test_the_connector_is_told_whether_to_check_memory(
    gpu: GpuClients, inline: Callable[..., ModelTables], monkeypatch: pytest.MonkeyPatch, skip: bool | None
) -> None:
    told: list[bool | None] = []
    monkeypatch.setattr(
        module, "_Client", lambda spec, address, dtype, device, config, tables: told.append(config.skip_memory_check)
    )
    inline(route="direct", skip_memory_check=skip)._connected(BF16, GPU, "direct")
    assert told == [skip]


def test_a_changed_file_is_found_without_a_lookup(tmp_path: Path, checkpoint: Path) -> None:
    """Readers that do without the table's own lookup ask it first: `Table.check`."""
    folder = tmp_path / "copied"
    shutil.copytree(checkpoint, folder)
    with ple_offload.open_table(folder, tier="file") as table:
        table.check()
        for segment in table.spec.segments:
            os.utime(segment.path, ns=(1, 1))
        table._next_check_s = 0.0
        with pytest.raises(StoreError, match="changed while its table"):
            table.check()


def test_buffers_outlive_inference_mode(worker: SpawnedWorker, checkpoint: Path) -> None:
    """A client that is made inside inference mode serves lookups outside, and with another default device."""
    tables = RemoteTables(ple_offload.inspect(checkpoint), worker.address)
    with torch.inference_mode(), torch.device("meta"):
        first = tables.lookup(1, IDS, CONTEXT, BF16)
    assert torch.equal(first, tables.lookup(1, IDS, CONTEXT, BF16))
    tables.close()


@pytest.mark.parametrize("place", ["release", "append", "popleft", "release_outputs"])
def test_an_interrupted_lookup_leaves_the_next_one_whole(worker: SpawnedWorker, checkpoint: Path, place: str) -> None:
    """As by Ctrl-C, between the lines that count a step and those that give it back."""

    def once(owner: Any, name: str, before: bool) -> None:
        right = getattr(owner, name)

        def interrupted(*arguments: Any) -> None:
            if owner is not flight:
                setattr(owner, name, right)
            if not before:
                right(*arguments)
            raise KeyboardInterrupt

        setattr(owner, name, interrupted)

    class Flight(deque[Any]):
        """Takes attributes, which a deque does not."""

    ids, context = torch.tensor([[1, 2, 3]]), torch.full((1, 2), 7)
    tables = RemoteTables(ple_offload.inspect(checkpoint), worker.address, limits=Limits(hard_cap_s=5))
    expected = tables.lookup(1, ids, context, torch.bfloat16)
    connector = tables.connectors[0]
    flight = Flight()
    if place in ("append", "popleft"):
        connector._flight = flight
        once(flight, place, before=False)
    else:
        once(connector._transport if place == "release" else connector, place, before=True)
    with pytest.raises(KeyboardInterrupt):
        tables.lookup(1, ids, context, torch.bfloat16)
    if place in ("append", "popleft"):
        connector._flight = deque(flight)
    for _ in range(3):
        assert torch.equal(tables.lookup(1, ids, context, torch.bfloat16), expected)
    tables.close()


def test_a_signal_handler_that_closes_in_the_middle_of_a_lookup_is_told(
    worker: SpawnedWorker, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = RemoteTables(ple_offload.inspect(checkpoint), worker.address)
    expected = tables.lookup(1, IDS, CONTEXT, BF16)

    def interrupted(*arguments: Any) -> None:
        tables.close()

    with monkeypatch.context() as patch:
        patch.setattr(CLIENT, "lookup", interrupted)
        for _ in range(2):
            with pytest.raises(UsageError, match="used in the middle of a lookup of the same thread"):
                tables.lookup(1, IDS, CONTEXT, BF16)
    assert torch.equal(tables.lookup(1, IDS, CONTEXT, BF16), expected)
    tables.close()


def test_a_forked_child_gives_up_what_a_thread_of_its_parent_uses(worker: SpawnedWorker, checkpoint: Path) -> None:
    tables = RemoteTables(ple_offload.inspect(checkpoint), worker.address)
    expected = tables.lookup(1, IDS, CONTEXT, BF16)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tables._turn(), sigbus._lock:
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)

    def child() -> None:
        with pytest.raises(ForkError):
            tables.lookup(1, IDS, CONTEXT, BF16)
        tables.close()
        ple_offload.open_table(checkpoint, tier="file", threads=1).close()

    ended = forked(child)
    done.set()
    holder.join()
    assert ended
    assert torch.equal(tables.lookup(1, IDS, CONTEXT, BF16), expected)
    tables.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu(checkpoint: Path) -> None:
    check_route("auto")
    check_route("host")
    for route in ("direct", "staged", "ipc"):
        with pytest.raises(UsageError, match=f"route '{route}': expected a GPU, but torch sees none"):
            engine.from_pretrained(checkpoint, route=route)
    with pytest.raises(UsageError, match="route: expected one of"):
        engine.from_pretrained(checkpoint, route="fast")
