"""Rows lent by a worker, and both routes at once: bytes, graphs, a worker that dies, ranks that agree, what is measured.

Run with `make test-gpu` on a machine with an NVIDIA GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ple_offload
from gpu.test_routes import CONFIG, MAX_REQS, MAX_TOKENS, SIZES, Engine, capture, same, write
from ple_offload.cli import gpu
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.connector.choose import EVERY_SIZE
from ple_offload.errors import StepError
from ple_offload.layer import PleOffloadLayer
from ple_offload.worker.spawn import SpawnedWorker

pytest.importorskip("triton", reason="GPU routes need triton (extra `cuda`)")

from ple_offload.connector import routes

pytestmark = pytest.mark.gpu

TIERS = ["ram", "file"]
BORDER = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("it"), "F8_E4M3")


@pytest.fixture
def engine(path: Path) -> Iterator[Callable[..., Engine]]:
    """engine("lent", "ram"): with a worker of its own, `engine.worker`."""
    made: list[Any] = []

    def make(kind: str, tier: str, **options: Any) -> Engine:
        worker = SpawnedWorker(path, tier=tier)
        made.append(worker)
        one = Engine(path, f"{kind}-{tier}", worker, **options)
        one.worker = worker  # type: ignore[attr-defined]
        made.append(one)
        return one

    yield make
    for item in reversed(made):
        item.close()


@pytest.fixture
def border(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured, steps of up to BORDER tokens go direct."""
    monkeypatch.setattr(routes, "border", lambda timings: BORDER)


def run(one: Engine, rng: np.random.Generator, num_tokens: int, num_reqs: int, padded: int) -> torch.Tensor:
    """A whole eager step."""
    one.fill(rng, num_tokens, num_reqs)
    step = one.connector.prepare_forward(num_reqs, padded)
    found = one.forward(padded)
    torch.cuda.synchronize()
    one.connector.check(step)
    one.connector.release_outputs()
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_direct_from_a_worker(engine: Callable[..., Engine], tier: str) -> None:
    one, rng = engine("lent", tier), np.random.default_rng(1)
    assert one.connector.route_report.route == "direct"
    for num_tokens, num_reqs, padded in SIZES:
        assert same(run(one, rng, num_tokens, num_reqs, padded), one.expected()), num_tokens
    graph, out = capture(one, 64)
    for num_tokens in (1, 40, 64):
        one.fill(rng, num_tokens, 1)
        step = one.connector.prepare_forward(1, 64)
        graph.replay()
        torch.cuda.synchronize()
        one.connector.check(step)
        one.connector.release_outputs()
        assert same(out, one.expected()), num_tokens


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", ["lent", "auto"])
@pytest.mark.usefixtures("border")
def test_steps_go_on_when_the_worker_is_killed_which_is_logged_once(
    engine: Callable[..., Engine], kind: str, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, rng = engine(kind, tier), np.random.default_rng(2)
    assert same(run(one, rng, 300, 7, 300), one.expected())
    os.kill(one.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    time.sleep(0.5)
    for num_tokens in (8, 300, 1, 8192):
        assert same(run(one, rng, num_tokens, 1, num_tokens), one.expected()), num_tokens
    assert caplog.text.count("steps go on by route 'direct'") == 1


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.usefixtures("border")
def test_auto_is_right_on_both_sides_of_the_border_eager_and_captured(engine: Callable[..., Engine], tier: str) -> None:
    """Mixed at random, two in flight, with dummies between; a replay is right at any size, published or not."""
    one, rng = engine("auto", tier, slots=2), np.random.default_rng(3)
    assert one.connector.route_report.direct_tokens == BORDER
    for num_tokens, num_reqs, padded in SIZES:
        assert same(run(one, rng, num_tokens, num_reqs, padded), one.expected()), num_tokens
    graphs = {padded: capture(one, padded) for padded in (1, 8, 64, 256, 1024)}
    waiting: list[tuple[torch.Tensor, torch.Tensor, int, Any]] = []
    for i in range(400):
        padded = int(rng.choice(list(graphs)))
        num_tokens = int(rng.integers(1, padded + 1))
        num_reqs = int(rng.integers(1, min(num_tokens, MAX_REQS) + 1))
        if i % 40 == 39:
            one.connector.prepare_forward(1, 8, dummy_run=True)
            assert not one.forward(8).any()
            one.connector.release_outputs()
        one.fill(rng, num_tokens, num_reqs)
        step = one.connector.prepare_forward(num_reqs, padded)
        captured = bool(rng.random() < 0.5)
        if captured:
            graph, held = graphs[padded]
            held.fill_(float("inf"))
            graph.replay()
            out = held.clone()
        else:
            out = one.forward(padded)
        waiting.append((out, one.expected(), step, (i, num_tokens, padded, captured)))
        if len(waiting) == 2 or i % 40 == 38:
            torch.cuda.synchronize()
            for found, expected, number, what in waiting:
                one.connector.check(number)
                assert same(found, expected), what
                one.connector.release_outputs()
            waiting.clear()


@pytest.mark.usefixtures("border")
def test_a_forward_that_brings_only_ids_is_served_from_the_sources(engine: Callable[..., Engine]) -> None:
    one, rng = engine("auto", "ram"), np.random.default_rng(4)
    for num_tokens, num_reqs, padded in SIZES:
        one.fill(rng, num_tokens, num_reqs)
        one.starts[num_reqs + 1 :] = 5  # behind the step anything may stand
        step = one.connector.prepare_forward(num_reqs, padded)
        found = one.layer(torch.empty((padded, 1), device="cuda"), one.ids[:padded])
        torch.cuda.synchronize()
        one.connector.check(step)
        assert same(found, one.expected()), num_tokens
        one.connector.release_outputs()


@pytest.mark.parametrize("route", ["direct", "auto"])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.usefixtures("border")
def test_row_numbers_that_the_engine_gives(path: Path, route: str, width: torch.dtype) -> None:
    layer, rng = PleOffloadLayer(1, 2560), np.random.default_rng(5)
    with SpawnedWorker(path, tier="ram") as worker, ple_offload.open_table(path, tier="ram") as table:
        rows = torch.full((1024, 16), -9, dtype=width, device="cuda")
        config = ConnectorConfig(1024, 8, request="rows", route=route)
        with PleOffloadConnector(config, layer, "cuda", worker.address, row_numbers_source={1: rows}) as connector:

            def forward(padded: int) -> torch.Tensor:
                return layer(torch.empty((padded, 1), device="cuda"), torch.empty(padded, dtype=width, device="cuda"))

            connector.signal_dummy_outputs(64)
            forward(64)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held = forward(64)
            for count, captured in ((1, False), (50, True), (64, True), (64, False), (1000, False), (3, True)):
                numbers = rng.integers(0, table.num_rows, (count, 16))
                rows.fill_(0)  # row 0 behind the step: not to be delivered
                rows[:count].copy_(torch.from_numpy(numbers))
                step = connector.prepare_forward(1, count)
                if captured:
                    graph.replay()
                    found = held
                else:
                    found = forward(count + 4)
                torch.cuda.synchronize()
                connector.check(step)
                assert same(found, table.gather(torch.from_numpy(numbers), dtype="bf16").reshape(count, -1)), count
                connector.release_outputs()
            rows[2, 7] = table.num_rows
            step = connector.prepare_forward(1, 5)
            found = forward(5)
            torch.cuda.synchronize()
            assert found[2].isnan().any()
            assert not found[[0, 1, 3, 4]].isnan().any()
            with pytest.raises(StepError, match=r"row_numbers\[1\]\[2\]"):
                connector.check(step)
            connector.release_outputs()


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_measured_is_told_and_took_less_than_a_second(engine: Callable[..., Engine], tier: str) -> None:
    report = engine("auto", tier).connector.route_report
    assert [timing.num_tokens for timing in report.timings][:2] == [1, 16]
    assert all(timing.direct_us > 0 and timing.staged_us > 0 for timing in report.timings)
    assert 0 < report.seconds < 1
    assert report.route == ("auto" if report.direct_tokens else "staged")
    print(report)


def test_reconnecting_measures_nothing_and_agrees_again(engine: Callable[..., Engine], path: Path) -> None:
    one, rng = engine("auto", "ram"), np.random.default_rng(6)
    before = one.connector.route_report
    with SpawnedWorker(path, tier="file") as another:
        one.connector.reconnect(another.address)
        assert one.connector.route_report == before
        for num_tokens in (1, 1000):
            assert same(run(one, rng, num_tokens, 1, num_tokens), one.expected())
        one.close()


def test_what_is_borrowed_is_given_back(engine: Callable[..., Engine]) -> None:
    def life() -> int:
        """Open descriptors after an engine has come and gone."""
        one = engine("auto", "file")
        assert (
            "model.safetensors" in Path("/proc/self/maps").read_text() or one.connector.route_report.route == "staged"
        )
        one.close()
        one.worker.close()  # type: ignore[attr-defined]
        assert "model.safetensors" not in Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    first = life()  # the driver opens some for good
    assert life() <= first


def rank(path: Path, address: str, tp_rank: int, results: Any) -> None:
    """Steps of sizes on both sides of the border; both TP ranks draw the same inputs."""
    table = ple_offload.open_table(path, tier="file")
    ids = torch.zeros(MAX_TOKENS, dtype=torch.int64, device="cuda")
    starts = torch.zeros(2, dtype=torch.int64, device="cuda")
    context = torch.full((1, 2), CONFIG["eos_token_id"], device="cuda")
    layer = PleOffloadLayer(1, 2560)
    config = ConnectorConfig(MAX_TOKENS, 1, tp_rank=tp_rank, tp_size=2)
    sources = {"input_ids_source": ids, "query_start_loc_source": starts, "ngram_context_source": context}
    right = 0
    with PleOffloadConnector(config, layer, "cuda", address, **sources) as connector:  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        for count in [1, 5, 60, 300, 2000, 8192] * 3:
            numbers = torch.from_numpy(rng.integers(0, 1000, count))
            ids[:count].copy_(numbers)
            starts[1] = count
            step = connector.prepare_forward(1, count)
            found = layer(torch.empty((count, 1), device="cuda"), ids[:count], starts, context)
            torch.cuda.synchronize()
            connector.check(step)
            right += same(found, table.lookup(numbers, dtype="bf16"))
            connector.release_outputs()
        results.put((tp_rank, right, connector.route_report.direct_tokens, len(connector.route_report.timings)))


def test_tp_ranks_agree_on_the_border(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with SpawnedWorker(path, tier="ram") as worker:
        ranks = [spawn.Process(target=rank, args=(path, worker.address, tp, results)) for tp in (0, 1)]
        for process in ranks:
            process.start()
        found = sorted(results.get(timeout=55) for _ in ranks)
        for process in ranks:
            process.join(20)
    assert [(tp, right) for tp, right, *_ in found] == [(0, 18), (1, 18)]
    assert found[0][2] == found[1][2] <= EVERY_SIZE
    assert found[0][3] > 1
    assert found[1][3] == 0  # only the first one measures


def test_doctor_measures_its_own_table() -> None:
    advice: list[str] = []
    found = gpu.sections(advice)
    assert found["GPU 0"]["staged"] == "can work"
    assert "direct" in found["routes measured"]["1 token"]
    assert not advice
