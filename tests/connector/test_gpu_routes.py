"""What decides how rows reach a GPU, on fakes: refusals, the measured border, what ranks agree on, a worker that goes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from connector.rig import Made, make
from fake_driver import FakeDriver
from ple_offload import cuda, open_table
from ple_offload.connector import ConnectorConfig, choose
from ple_offload.connector.base import PortSpec
from ple_offload.connector.choose import EVERY_SIZE, RouteReport, Timing, require_triton, why_not_direct
from ple_offload.connector.config import Limits
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.sources import Sources
from ple_offload.errors import ConnectionLostError, CudaError, PleOffloadError, ProtocolError, UsageError
from ple_offload.memory.limits import MemoryReport
from ple_offload.metrics import ConnectorCounters
from ple_offload.worker.spawn import SpawnedWorker
from worker.test_serving import served, worker_thread

pytest.importorskip("triton", reason="GPU routes need triton (extra `cuda`)")

from ple_offload.connector import routes
from ple_offload.connector.auto import AutoRoute
from ple_offload.connector.direct import TablesOnDevice
from ple_offload.connector.measure import border, time_both

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
CONFIG = ConnectorConfig(64, 8)
READ_ONLY, HOST_TABLES = cuda.ATTRIBUTES["read_only_host_register"], cuda.ATTRIBUTES["uses_host_page_tables"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver of version 580 that registers for reading, and whose device sees memory where the host does."""
    fake = FakeDriver(shift=0)
    fake.attributes[READ_ONLY] = 1
    before = cuda.set_driver(fake)
    monkeypatch.setattr(choose, "kernel_driver_version", lambda: (580, 0))
    monkeypatch.setattr(cuda, "_said", set())
    yield fake
    cuda.set_driver(before)


@pytest.fixture
def gpu(driver: FakeDriver) -> cuda.Cuda:
    return cuda.Cuda(GPU, driver.activate)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("it"), "BF16")


@pytest.fixture(scope="module")
def workers(made: Made) -> Iterator[dict[str, SpawnedWorker]]:
    with (
        SpawnedWorker(made.path, tier="ram", threads=1) as ram,
        SpawnedWorker(made.path, tier="file", threads=1) as file,
    ):
        yield {"ram": ram, "file": file}


# ---- refusals ----------------------------------------------------------------------------------------------------------


def why(gpu: cuda.Cuda, made: Made, tier: str = "file", *, on_cpu: bool = False, **options: Any) -> str | None:
    with open_table(made.path, tier=tier, threads=1) as table:
        return why_not_direct(gpu, replace(CONFIG, **options), {1: table}, on_cpu)


def test_nothing_stands_against_it(gpu: cuda.Cuda, made: Made) -> None:
    assert [why(gpu, made, tier) for tier in ("ram", "file")] == [None, None]
    assert why(gpu, made, request="rows") is None


def test_no_read_only_registration(driver: FakeDriver, gpu: cuda.Cuda, made: Made) -> None:
    driver.attributes[READ_ONLY] = 0
    assert [str(why(gpu, made, tier)) for tier in ("ram", "file")] == [
        "cuda:0 cannot register host memory for reading only."
    ] * 2


def test_an_old_driver_registers_no_files(gpu: cuda.Cuda, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "kernel_driver_version", lambda: (565, 57))
    assert why(gpu, made, "ram") is None
    assert "driver 565.57 marks every page" in str(why(gpu, made, "file"))
    monkeypatch.setattr(choose, "kernel_driver_version", lambda: None)
    assert why(gpu, made, "file") is None


def test_page_cache_that_does_not_fit_is_not_page_locked(
    gpu: cuda.Cuda, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = made.spec.tables[0].size_bytes
    monkeypatch.setattr(choose, "available_memory", lambda: MemoryReport(size - 1, "cgroup /x", 0, 0, None, None))
    monkeypatch.setattr("ple_offload.stores.file.FileStore.absent_bytes", lambda self: size)
    assert why(gpu, made, "ram") is None
    assert "page cache would be page-locked" in str(why(gpu, made, "file"))
    assert "PLE_OFFLOAD_SKIP_MEMORY_CHECK=1" in str(why(gpu, made, "file"))
    monkeypatch.setenv("PLE_OFFLOAD_SKIP_MEMORY_CHECK", "1")
    assert why(gpu, made, "file") is None
    assert why(gpu, made, "file", skip_memory_check=False) is not None  # an argument wins
    monkeypatch.delenv("PLE_OFFLOAD_SKIP_MEMORY_CHECK")
    assert why(gpu, made, "file", skip_memory_check=True) is None
    # what is in memory already may be page-locked by another engine, and is not needed twice
    monkeypatch.setattr("ple_offload.stores.file.FileStore.absent_bytes", lambda self: 0)
    assert why(gpu, made, "file") is None


def test_host_page_tables_need_no_registration(
    driver: FakeDriver, gpu: cuda.Cuda, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    driver.attributes = {HOST_TABLES: 1}
    for tier in ("ram", "file"):
        assert why(gpu, made, tier) is None
        with open_table(made.path, tier=tier, threads=1) as table:
            TablesOnDevice(gpu, CONFIG, {1: table}, sources_on_cpu=False, device=CPU).close()
    assert not [call for call in driver.calls if call[0].startswith("cuMem")]
    assert caplog.text.count("untested") == 1


def test_row_numbers_must_be_on_the_device(gpu: cuda.Cuda, made: Made) -> None:
    assert "these are on the CPU" in str(why(gpu, made, on_cpu=True, request="rows"))
    assert why(gpu, made, on_cpu=True) is None


def test_a_family_without_a_kernel(gpu: cuda.Cuda, made: Made) -> None:
    class Other:
        name = "other"

    with open_table(made.path, tier="file", threads=1) as table:
        table.spec = replace(table.spec, family=Other())  # type: ignore[arg-type]
        assert "family 'other' has no GPU kernel" in str(why_not_direct(gpu, CONFIG, {1: table}, False))
        assert why_not_direct(gpu, replace(CONFIG, request="rows"), {1: table}, False) is None


def test_a_refused_registration_leaves_nothing(driver: FakeDriver, gpu: cuda.Cuda, made: Made) -> None:
    driver.refused["cuMemHostRegister"] = 1
    with open_table(made.path, tier="ram", threads=1) as table:
        with pytest.raises(CudaError, match="cuMemHostRegister"):
            TablesOnDevice(gpu, CONFIG, {1: table}, sources_on_cpu=False, device=CPU)
        assert not driver.registered


def test_without_triton_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UsageError, match=r"pip install 'ple-offload\[cuda\]'"):
        require_triton()


# ---- tables on a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_lent_tables_are_registered_for_reading_and_gather_the_same_rows(
    driver: FakeDriver, gpu: cuda.Cuda, made: Made, workers: dict[str, SpawnedWorker], tier: str
) -> None:
    from ple_offload.connector.borrow import Borrowed

    borrowed = Borrowed(workers[tier].address, CONFIG, [1])
    on_device = TablesOnDevice(gpu, CONFIG, borrowed.tables, sources_on_cpu=False, device=CPU)
    assert driver.registered
    assert {flags for _, flags in driver.registered.values()} == {0x1 | 0x2 | 0x8}
    with open_table(made.path, tier="file", threads=1) as table:
        out = torch.zeros((table.num_rows, table.row_dim), dtype=torch.bfloat16)
        on_device.layers[1].gather.run(torch.arange(table.num_rows), out)
        expected = table.gather(np.arange(table.num_rows), dtype="bf16")
        assert out.view(torch.uint8).numpy().tobytes() == expected.tobytes()
    on_device.close()
    assert not driver.registered
    borrowed.close()


def test_the_end_of_the_worker_is_logged_once_and_raises_nothing(
    gpu: cuda.Cuda, made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "TablesOnDevice", lambda *args, **options: TablesOnDevice(*args, **options, device=CPU))
    with SpawnedWorker(made.path, tier="ram", threads=1) as worker:
        lent = routes.LentTables(worker.address, CONFIG, [1], gpu, sources_on_cpu=False)
        assert not lent.gone()
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not lent.gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lent.gone()
        assert lent.gone()
        assert caplog.text.count("steps go on by route 'direct'") == 1
        out = torch.zeros((120, 16), dtype=torch.bfloat16)
        lent.on_device.layers[1].gather.run(torch.arange(120), out)
        assert out.view(torch.uint8).numpy().tobytes() == made.raw[1]
        lent.close()


# ---- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0),
        ([(1, 5, 4)], 0),
        ([(1, 4, 5)], EVERY_SIZE),
        ([(1, 5, 5), (16, 5, 5)], EVERY_SIZE),
        ([(1, 5, 10), (101, 15, 10)], 51),
        ([(1, 5, 10), (11, 11, 10)], 9),
        ([(1, 5, 10), (16, 12, 10), (64, 5, 10)], 11),
        ([(1, 5, 5), (16, 6, 5)], 1),
    ],
)
def test_the_border(times: list[tuple[int, float, float]], expected: int) -> None:
    assert border([Timing(*time) for time in times]) == expected


def test_each_size_is_measured_within_the_budget_and_the_median_counts() -> None:
    now, calls = 0.0, []

    def route(name: str, seconds: list[float]) -> Callable[[int], float]:
        def step(size: int) -> float:
            nonlocal now
            took = seconds[min(calls.count((name, size)), len(seconds) - 1)]
            calls.append((name, size))
            now += took
            return took

        return step

    slow_at_first = route("direct", [9, 1e-3, 7e-3, 3e-3, 2e-3]), route("staged", [9, 4e-3])
    timings, seconds = time_both(*slow_at_first, [1, 8], lambda: now)
    assert calls[:4] == [("direct", 1), ("staged", 1), ("direct", 8), ("staged", 8)]  # the first ones compile
    assert [(t.num_tokens, round(t.direct_us), round(t.staged_us)) for t in timings] == [
        (1, 2000, 4000),
        (8, 2000, 4000),
    ]
    assert seconds == pytest.approx(now - 36)
    now, calls = 0.0, []
    timings, seconds = time_both(route("direct", [0.3]), route("staged", [0.3]), [1, 8, 64], lambda: now)
    assert [timing.num_tokens for timing in timings] == [1]
    assert timings[0].direct_us == pytest.approx(300_000)
    assert seconds == pytest.approx(0.6)


def test_the_report_is_one_line() -> None:
    report = RouteReport("auto", "because", 5, (Timing(1, 10.4, 20.6), Timing(8, 11, 12)), 0.25)
    assert str(report) == (
        "route auto: because; us by number of tokens, direct / staged: 1: 10 / 21, 8: 11 / 12; measured in 0.25 s"
    )
    assert str(RouteReport("host", "the device is the CPU")) == "route host: the device is the CPU"


# ---- both routes at once -----------------------------------------------------------------------------------------------


class FakeRoute:
    """Writes down its calls; delivers a tensor that names it."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls
        self.failed: PleOffloadError | None = None

    def asks_worker(self, step: int, num_tokens: int) -> bool:
        raise AssertionError("AutoRoute decides")

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        self.calls.append((self.name, "finish", index))
        return torch.full((num_rows, 1), float(self.name == "staged"))

    def error(self, step: int) -> PleOffloadError | None:
        return self.failed

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **_: self.calls.append((self.name, name, *arguments))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Both:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []
            self.direct, self.staged = FakeRoute("direct", self.calls), FakeRoute("staged", self.calls)
            self.lost = False
            self.capturing = False
            self.route = AutoRoute(self.direct, self.staged, 10, lambda: self.lost)
            self.step = 0

        def run(self, num_tokens: int, *, dummy: bool = False, captured: bool = False) -> tuple[bool, str]:
            """(whether the worker was asked, whose rows came)"""
            self.step += 1
            asked = not dummy and self.route.asks_worker(self.step, num_tokens)
            self.route.begin(self.step, 1, num_tokens, dummy)
            self.capturing = captured
            self.route.start(0, torch.zeros(num_tokens), None, None)
            rows = self.route.finish(0, num_tokens)
            self.route.release(self.step)
            return asked, "staged" if rows.any() else "direct"

        def names(self, call: str) -> list[str]:
            return [name for name, what, *_ in self.calls if what == call]

    made = Both()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def test_small_steps_go_direct_and_large_ones_staged(both: Any) -> None:
    assert [both.run(count) for count in (1, 10, 11, 5, 64)] == [
        (False, "direct"),
        (False, "direct"),
        (True, "staged"),
        (False, "direct"),
        (True, "staged"),
    ]
    assert both.names("begin") == ["direct"] * 3 + ["staged"] + ["direct"] * 2 + ["staged"]
    assert both.names("release") == ["staged"] * 5  # the worker is told of every step
    assert both.names("finish") == ["direct", "direct", "staged", "direct", "staged"]


def test_capture_is_always_direct(both: Any) -> None:
    assert both.run(64, captured=True) == (True, "direct")
    assert both.run(64, dummy=True, captured=True) == (False, "direct")


def test_a_dummy_runs_both_and_delivers_zeros_of_staged(both: Any) -> None:
    assert both.run(5, dummy=True) == (False, "staged")
    assert both.names("finish") == ["direct", "staged"]
    assert ("staged", "begin", 1, 1, 5, True) in both.calls


def test_when_the_worker_is_gone_everything_goes_direct(both: Any) -> None:
    assert both.run(64) == (True, "staged")
    both.lost = True
    assert both.run(64) == (False, "direct")
    both.lost = False
    assert both.run(64) == (False, "direct")


def test_errors_of_either_route_are_told(both: Any) -> None:
    assert both.route.error(1) is None
    both.staged.failed = PleOffloadError("s")
    assert both.route.error(1) is both.staged.failed
    both.direct.failed = PleOffloadError("d")
    assert both.route.error(1) is both.direct.failed


# ---- ranks agree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wishes", "agreed"), [((12, EVERY_SIZE), 12), ((12, 0), 0), ((EVERY_SIZE, 3), 3)])
def test_all_ranks_of_a_group_go_direct_up_to_the_lowest_wish(
    made: Made, workers: dict[str, SpawnedWorker], wishes: tuple[int, int], agreed: int, request: pytest.FixtureRequest
) -> None:
    table = made.spec.tables[0]
    ports = [PortSpec(table.layer, "bf16", table.embed_dim)]
    found: dict[int, RemoteTransport] = {}

    def connect(tp_rank: int) -> None:
        config = ConnectorConfig(8, 1, session=request.node.name, tp_rank=tp_rank, tp_size=2)
        found[tp_rank] = RemoteTransport(config, ports, workers["ram"].address, direct_tokens=wishes[tp_rank])

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[rank].direct_tokens for rank in (0, 1)] == [agreed, agreed]
    for transport in found.values():
        transport.close()


# ---- opening -----------------------------------------------------------------------------------------------------------


class Opening:
    """`GpuRoutes` whose GPU parts are fakes: what is lent, what is measured, and the two routes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str, gpu: cuda.Cuda) -> None:
        self.address, self.calls, self.measured = address, [], [Timing(1, 5, 10), Timing(101, 15, 10)]
        self.open_tables = 0
        monkeypatch.setattr(routes, "Cuda", lambda device: gpu)
        monkeypatch.setattr(routes, "TablesOnDevice", self.tables_on_device)
        monkeypatch.setattr(routes, "measure", self.measure)
        monkeypatch.setattr(routes, "StagedRoute", lambda *_: FakeRoute("staged", self.calls))
        monkeypatch.setattr(routes, "IpcRoute", lambda *_: FakeRoute("ipc", self.calls))
        monkeypatch.setattr(routes, "DirectRoute", lambda *_, **__: FakeRoute("direct", self.calls))
        self.count = 0

    def tables_on_device(self, *arguments: Any, **options: Any) -> TablesOnDevice:
        made = TablesOnDevice(*arguments, **options, device=CPU)
        self.open_tables += 1
        close = made.close

        def closed() -> None:
            self.open_tables -= 1
            close()

        made.close = closed  # type: ignore[method-assign]
        return made

    def measure(self, *arguments: Any) -> tuple[tuple[Timing, ...], float]:
        self.count += 1
        return tuple(self.measured), 0.5

    def open(self, made: Made, *, on_cpu: bool = False, tables: Any = None, **options: Any) -> tuple[Any, Any, Any]:
        table = made.spec.tables[0]
        config = ConnectorConfig(64, 8, session=f"{id(self)}", limits=Limits(connect_s=0.1, ready_s=5), **options)
        ids = torch.zeros(64, dtype=torch.int64, device="cpu" if on_cpu else "meta")
        ports = [PortSpec(table.layer, "bf16", table.embed_dim)]
        self.routes = routes.GpuRoutes(config, ports, Sources(ids, ids, ids), GPU)
        transport, route = self.routes.open(self.address, tables or {}, 0, ConnectorCounters())
        return self.routes, transport, route


@pytest.fixture
def opening(
    monkeypatch: pytest.MonkeyPatch, gpu: cuda.Cuda, workers: dict[str, SpawnedWorker], caplog: pytest.LogCaptureFixture
) -> Opening:
    caplog.set_level("INFO", "ple_offload")
    return Opening(monkeypatch, workers["file"].address, gpu)


def test_auto_holds_both_and_says_what_it_measured(
    opening: Opening, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    found, transport, route = opening.open(made)
    assert route.name == "auto"
    assert (found.report.route, found.report.direct_tokens, transport.direct_tokens) == ("auto", 51, 51)
    assert caplog.text.count("steps of up to 51 tokens go direct, larger ones staged; us by number of tokens") == 1
    assert (route.asks_worker(1, 51), route.asks_worker(2, 52)) == (False, True)
    transport.close()
    found.close()
    assert opening.open_tables == 0
    _, transport = found, found.open(opening.address, {}, 0, ConnectorCounters())[0]  # `reconnect`
    assert opening.count == 1
    assert transport.direct_tokens == 51
    assert caplog.text.count("us by number of tokens") == 1
    transport.close()
    found.close()


def test_auto_goes_staged_where_that_is_faster(opening: Opening, made: Made) -> None:
    opening.measured = [Timing(1, 5, 4)]
    found, transport, route = opening.open(made)
    assert (route.name, found.report.route, found.report.timings) == ("staged", "staged", (Timing(1, 5, 4),))
    assert (transport.direct_tokens, opening.open_tables) == (0, 0)
    transport.close()


REFUSALS: dict[str, Callable[[FakeDriver, pytest.MonkeyPatch], object]] = {
    "cannot register host memory for reading only": lambda fake, _: fake.attributes.update({READ_ONLY: 0}),
    "marks every page": lambda _, patch: patch.setattr(choose, "kernel_driver_version", lambda: (560, 1)),
    "cuMemHostRegister": lambda fake, _: fake.refused.update(cuMemHostRegister=1),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_refuses_direct_is_said_once_by_auto_and_raised_by_an_explicit_request(
    opening: Opening,
    made: Made,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    REFUSALS[reason](driver, monkeypatch)
    found, transport, route = opening.open(made)
    assert (route.name, found.report.route) == ("staged", "staged")
    assert [r.levelname for r in caplog.records if reason in r.getMessage()] == ["WARNING"]
    assert not driver.registered
    transport.close()
    with pytest.raises(CudaError, match=reason):
        opening.open(made, route="direct")
    with open_table(made.path, tier="file", threads=1) as table:
        opening.address = "inline"
        with pytest.raises(UsageError, match=f"(?s){reason}.*worker 'spawn'"):
            opening.open(made, tables={1: table})
        with pytest.raises(CudaError, match=reason):
            opening.open(made, tables={1: table}, route="direct")
    assert opening.open_tables == 0


def test_host_sources_go_staged_unless_direct_is_asked_for(
    opening: Opening, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    found, transport, route = opening.open(made, on_cpu=True)
    assert route.name == "staged"
    assert "with sources on the CPU" in caplog.text
    transport.close()
    found, transport, route = opening.open(made, on_cpu=True, route="direct")
    assert (route.name, found.report.route, opening.open_tables) == ("direct", "direct", 1)
    found.close()


def test_tables_open_here_go_direct_and_nothing_else(opening: Opening, made: Made) -> None:
    opening.address = "inline"
    with open_table(made.path, tier="ram", threads=1) as table:
        found, _, route = opening.open(made, tables={1: table})
        assert (route.name, found.report.route) == ("direct", "direct")
        found.close()
        with pytest.raises(UsageError, match="expected 'direct' with worker address 'inline'"):
            opening.open(made, tables={1: table}, route="staged")
        with pytest.raises(UsageError, match="route 'ipc': expected 'direct' with worker address 'inline'"):
            opening.open(made, tables={1: table}, route="ipc")


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuIpcGetMemHandle"])
def test_what_refuses_ipc_is_raised_before_the_worker_is_asked(
    opening: Opening, made: Made, driver: FakeDriver, name: str
) -> None:
    driver.refused[name] = 1
    opening.address = "unix:@ple-offload-nobody"
    with pytest.raises(CudaError, match=rf"route 'ipc': {name}\(.*CUDA_ERROR_FAKE.*use route 'staged'"):
        opening.open(made, route="ipc")
    assert driver.in_use() == []


def test_ipc_is_opened_when_asked_for_and_only_then(
    driver: FakeDriver, gpu: cuda.Cuda, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is a thread, so that it has the same fake driver; each connection has memory of its own."""
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(worker_thread(served(made, stack)))
        opening = Opening(monkeypatch, address, gpu)
        for _ in range(2):
            found, transport, route = opening.open(made, route="ipc")
            assert (route.name, found.report.route) == ("ipc", "ipc")
            assert list(driver.allocated) == driver.opened == [transport.memory.address]
            transport.close()
            found.close()
            assert driver.in_use() == []
        found, transport, route = opening.open(made)
        assert (route.name, transport.memory, driver.allocated) == ("auto", None, {})
        transport.close()
        found.close()


def test_nobody_there_is_no_reason_to_go_another_way(opening: Opening, made: Made) -> None:
    opening.address = "unix:@ple-offload-nobody"
    with pytest.raises(ConnectionLostError, match="connecting failed"):
        opening.open(made)


def test_another_table_than_expected_is_refused_by_every_route(opening: Opening, made: Made) -> None:
    for route in ("auto", "direct", "staged", "ipc"):
        with pytest.raises(ProtocolError, match="fingerprint"):
            opening.open(made, route=route, fingerprints={1: "0000"})


def test_a_worker_without_a_sign_of_life_is_said(
    opening: Opening, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    found, transport, route = opening.open(made)
    assert route.asks_worker(1, 60)
    transport.alive = lambda: False
    assert not route.asks_worker(2, 60)
    assert not route.asks_worker(3, 60)
    assert caplog.text.count("gives no sign of life") == 1
    transport.close()
    found.close()


def test_a_rank_that_gives_the_worker_up_takes_its_group_with_it(opening: Opening, made: Made) -> None:
    """Else the others would wait for large steps that nobody publishes, for ever: a worker that was stopped may wake up."""
    table = made.spec.tables[0]
    other: list[RemoteTransport] = []

    def connect() -> None:
        config = ConnectorConfig(64, 8, session=f"{id(opening)}", tp_rank=1, tp_size=2)
        ports = [PortSpec(table.layer, "bf16", table.embed_dim)]
        other.append(RemoteTransport(config, ports, opening.address, direct_tokens=EVERY_SIZE))

    thread = threading.Thread(target=connect)
    thread.start()
    found, transport, route = opening.open(made, tp_size=2)
    thread.join(20)
    assert other[0].alive()
    transport.alive = lambda: False
    assert not route.asks_worker(1, 60)
    deadline = time.monotonic() + 5
    while other[0].alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not other[0].alive()
    for one in (transport, other[0], found):
        one.close()
