"""Rows on a GPU by every route, eager, captured and compiled, against the plain reference; and a worker that dies.

Run with `make test-gpu` on a machine with an NVIDIA GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ple_offload
from checkpoint import tiny
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.connector.config import Limits
from ple_offload.errors import ConnectionLostError, PleOffloadError, StepError
from ple_offload.layer import PleOffloadLayer
from ple_offload.worker.spawn import SpawnedWorker

pytestmark = pytest.mark.gpu

MAX_TOKENS, MAX_REQS = 8192, 256
# 16 heads of about 2,000 rows: rows as wide as the released model's
CONFIG = {
    **tiny.CONFIG,
    "ple_embed_dim": 2560,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 2000,
    "make_ngram_vocab_size_divisible_by": 128,
}
FORMATS = ["BF16", "F16", "F32", "F8_E4M3"]
WORKER_ROUTES = ["staged-mirror", "staged-async", "ipc-mirror", "ipc-async"]
ROUTES = ["direct-ram", "direct-file", *WORKER_ROUTES]
EOS = CONFIG["eos_token_id"]


def write(folder: Path, dtype: str, seed: int = 0) -> Path:
    """A checkpoint of ordinary numbers in 3 shards."""
    from ple_offload.families.qwen_ple import QwenPle
    from support import write_safetensors

    rule = QwenPle.from_text_config(CONFIG, 0)
    rng = np.random.default_rng(seed)
    stored = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(dtype)
    row_dim = 2560 // 16
    if stored is None:
        rows = rng.integers(0, 0x7F, (rule.num_rows, row_dim), dtype=np.uint8)
    else:
        from ple_offload.formats import VALUE_DTYPES

        rows = rng.standard_normal((rule.num_rows, row_dim), dtype=np.float32).astype(VALUE_DTYPES[stored])
    name = "model.layers.1.ple.ple_embedding.ngram_embedding"
    edges = [0, 5000, 11_000, rule.num_rows]
    tensors: dict[str, Any] = {
        f"{name}.shard_{i}.weight": (dtype, rows[edges[i] : edges[i + 1]], (edges[i + 1] - edges[i], row_dim))
        for i in range(3)
    }
    if stored is None:
        import ml_dtypes

        tensors[f"{name}.weight_scale"] = ("BF16", np.array([0.02], ml_dtypes.bfloat16), (1,))
    folder.mkdir(parents=True, exist_ok=True)
    import json

    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


class Engine:
    """A model of one PLE layer on the GPU, its sources, and the plain table to compare with.

    route: "direct-<tier>" of tables open here; "staged-", "ipc-", "lent-" (direct) and "auto-" of a worker, with
    "mirror" (sources on the CPU) or "async".
    """

    def __init__(
        self,
        path: Path,
        route: str,
        worker: SpawnedWorker | None,
        *,
        slots: int = 2,
        limits: Limits | None = None,
        values: torch.dtype = torch.bfloat16,
    ) -> None:
        self.values = values
        kind, detail = route.split("-")
        self.on_device = detail != "mirror"
        place = "cuda" if self.on_device else "cpu"
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=place)
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32, device=place)
        self.context = torch.full((MAX_REQS, 2), EOS, dtype=torch.int32, device=place)
        self.reference = ple_offload.open_table(path, tier="ram")
        self.table = ple_offload.open_table(path, tier=detail) if kind == "direct" else None
        self.layer = PleOffloadLayer(1, 2560, values)
        self.connector = PleOffloadConnector(
            ConnectorConfig(
                MAX_TOKENS,
                MAX_REQS,
                session=f"{route}-{id(self)}",
                max_concurrent_batches=slots,
                staging="async",
                route="direct" if kind == "lent" else kind,
                limits=limits or Limits(),
            ),
            torch.nn.ModuleList([self.layer]),
            "cuda",
            "inline" if worker is None else worker.address,
            input_ids_source=self.ids,
            query_start_loc_source=self.starts,
            ngram_context_source=self.context,
            tables=None if self.table is None else {1: self.table},
        )

    def fill(self, rng: np.random.Generator, num_tokens: int, num_reqs: int) -> None:
        """Random ids, cuts and contexts; lanes behind the tokens hold -1."""
        cuts = np.sort(rng.integers(0, num_tokens + 1, num_reqs - 1))
        self.np_starts = np.concatenate([[0], cuts, [num_tokens]])
        self.np_ids = np.where(rng.random(num_tokens) < 0.1, EOS, rng.integers(0, 1000, num_tokens))
        self.np_context = rng.integers(0, 1000, (num_reqs, 2))
        padded = np.full(MAX_REQS + 1, num_tokens)
        padded[: num_reqs + 1] = self.np_starts
        self.ids.fill_(-1)
        self.ids[:num_tokens].copy_(torch.from_numpy(self.np_ids))
        self.starts.copy_(torch.from_numpy(padded))
        self.context.fill_(EOS)
        self.context[:num_reqs].copy_(torch.from_numpy(self.np_context))

    def expected(self) -> torch.Tensor:
        inputs = (torch.from_numpy(x) for x in (self.np_ids, self.np_starts, self.np_context))
        return self.reference.lookup(*inputs, dtype=self.values)

    def forward(self, padded: int) -> torch.Tensor:
        hidden = torch.empty((padded, 1), device="cuda")
        ids = self.ids[:padded] if self.on_device else hidden
        if self.on_device:
            return self.layer(hidden, ids, self.starts, self.context)
        return self.layer(hidden, ids)

    def close(self) -> None:
        self.connector.close()
        for table in (self.reference, self.table):
            if table is not None:
                table.close()


def capture(one: Engine, padded: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one forward, captured with a dummy, and what it writes."""
    one.fill(np.random.default_rng(0), padded, 1)
    one.connector.signal_dummy_outputs(padded)
    one.forward(padded)  # compile before capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one.forward(padded)
    return graph, out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {dtype: write(tmp_path_factory.mktemp(dtype), dtype) for dtype in FORMATS}


@pytest.fixture(scope="module")
def workers(checkpoints: dict[str, Path]) -> Iterator[dict[str, SpawnedWorker]]:
    made = {dtype: SpawnedWorker(path, tier="ram") for dtype, path in checkpoints.items()}
    yield made
    for worker in made.values():
        worker.close()


@pytest.fixture
def engine(checkpoints: dict[str, Path], workers: dict[str, SpawnedWorker]) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(route: str, dtype: str, **options: Any) -> Engine:
        worker = workers[dtype] if route in WORKER_ROUTES else None
        made.append(Engine(checkpoints[dtype], route, options.pop("worker", worker), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, and zeros behind it."""
    count = expected.shape[0]
    behind = found[count:]
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found[:count].cpu().view(bits), expected.view(bits)) and not behind.any()


SIZES = [
    (1, 1, 1),
    (1, 1, 8),
    (5, 3, 16),
    (64, 64, 64),
    (255, 9, 256),
    (257, 2, 300),
    (1024, 256, 1024),
    (8192, 17, 8192),
]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("route", ROUTES)
def test_eager_equals_the_reference(engine: Callable[..., Engine], route: str, dtype: str) -> None:
    one, rng = engine(route, dtype), np.random.default_rng(1)
    for num_tokens, num_reqs, padded in SIZES:
        one.fill(rng, num_tokens, num_reqs)
        step = one.connector.prepare_forward(num_reqs, num_tokens if not one.on_device else padded)
        found = one.forward(padded)
        torch.cuda.synchronize()
        one.connector.check(step)
        assert same(found, one.expected()), (num_tokens, num_reqs, padded)
        one.connector.release_outputs()


@pytest.mark.parametrize("wanted", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("route", ["direct-ram", "staged-async", "ipc-async"])
def test_values_of_other_dtypes(engine: Callable[..., Engine], route: str, dtype: str, wanted: torch.dtype) -> None:
    one, rng = engine(route, dtype, values=wanted), np.random.default_rng(9)
    for num_tokens, num_reqs, padded in ((1, 1, 8), (300, 7, 301)):
        one.fill(rng, num_tokens, num_reqs)
        step = one.connector.prepare_forward(num_reqs, padded)
        found = one.forward(padded)
        torch.cuda.synchronize()
        one.connector.check(step)
        assert found.dtype == wanted
        assert same(found, one.expected())
        one.connector.release_outputs()


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_compiles_or_loads_after_warm_up(
    engine: Callable[..., Engine], route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward and a dummy are the warm-up; then come steps of every size, odd and even, one and many."""
    from triton.compiler import CompiledKernel  # not above: this file is read on machines without Triton
    from triton.runtime.jit import JITFunction

    one, rng = engine(route, "F8_E4M3"), np.random.default_rng(10)

    def step(num_tokens: int, num_reqs: int, padded: int) -> torch.Tensor:
        one.fill(rng, num_tokens, num_reqs)
        number = one.connector.prepare_forward(num_reqs, padded if one.on_device else num_tokens)
        found = one.forward(padded)
        torch.cuda.synchronize()
        one.connector.check(number)
        one.connector.release_outputs()
        return found

    one.fill(rng, 3, 1)
    one.connector.signal_dummy_outputs(3)
    one.forward(3)
    step(3, 1, 3)

    def compiled(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a kernel was compiled")

    init = CompiledKernel._init_handles

    def loaded(kernel: CompiledKernel) -> None:
        assert kernel.module is not None, "a kernel was loaded"
        init(kernel)

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(CompiledKernel, "_init_handles", loaded)
    for size in SIZES:
        assert same(step(*size), one.expected())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("route", ROUTES)
def test_graphs_replay_with_other_steps(engine: Callable[..., Engine], route: str, dtype: str) -> None:
    """Captured with dummies at several sizes; each replay delivers its own step's rows, never the capture's or the last."""
    one, rng = engine(route, dtype), np.random.default_rng(2)
    graphs = {padded: capture(one, padded) for padded in (1, 8, 64, 256)}
    for _ in range(60):
        padded = int(rng.choice(list(graphs)))
        num_tokens = int(rng.integers(1, padded + 1))
        num_reqs = int(rng.integers(1, min(num_tokens, MAX_REQS) + 1))
        one.fill(rng, num_tokens, num_reqs)
        graph, out = graphs[padded]
        out.fill_(7.0)  # poison
        step = one.connector.prepare_forward(num_reqs, num_tokens if not one.on_device else padded)
        graph.replay()
        torch.cuda.synchronize()
        one.connector.check(step)
        assert same(out, one.expected()), (num_tokens, padded)
        one.connector.release_outputs()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("route", ROUTES)
def test_compiled_whole_graphs(engine: Callable[..., Engine], route: str) -> None:
    one, rng = engine(route, "F8_E4M3"), np.random.default_rng(3)

    def model(hidden: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rows = one.layer(hidden + 1, ids, starts, context)
        return rows * 2 + rows

    compiled = torch.compile(model, fullgraph=True)
    for num_tokens in (8, 8, 64):
        one.fill(rng, num_tokens, 2)
        step = one.connector.prepare_forward(2, num_tokens)
        hidden = torch.zeros((num_tokens, 1), device="cuda")
        ids, starts, context = (x.cuda() for x in (one.ids[:num_tokens], one.starts, one.context))
        found = compiled(hidden, ids, starts, context)
        torch.cuda.synchronize()
        one.connector.check(step)
        rows = one.expected().cuda()
        assert torch.equal(found, rows * 2 + rows)
        one.connector.release_outputs()


@pytest.mark.parametrize("route", ["direct-ram", "staged-async"])
def test_gpu_memory_between_steps_is_what_is_reported(
    checkpoints: dict[str, Path], workers: dict[str, SpawnedWorker], route: str
) -> None:
    """What a step leaves behind, without its output, is what the connector reports, up to the allocator's rounding."""

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = held()
    one = Engine(checkpoints["F8_E4M3"], route, workers["F8_E4M3"] if route.startswith("staged") else None)
    try:
        one.fill(np.random.default_rng(7), 500, 3)
        step = one.connector.prepare_forward(3, 500)
        one.forward(500)
        torch.cuda.synchronize()
        one.connector.check(step)
        one.connector.release_outputs()
        sources = one.ids.nbytes + one.starts.nbytes + one.context.nbytes
        reported = one.connector.device_bytes
        assert reported > 0
        assert reported + sources <= held() - before <= reported + sources + 16 * 512
    finally:
        one.close()


@pytest.mark.parametrize("route", WORKER_ROUTES)
def test_two_batches_in_flight(engine: Callable[..., Engine], route: str) -> None:
    one, rng = engine(route, "F8_E4M3", slots=2), np.random.default_rng(4)
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(40):
        one.fill(rng, 200, 5)
        one.connector.prepare_forward(5, 200)
        wanted.append((one.forward(200), one.expected()))
        if i % 2:
            one.connector.release_outputs()
            one.connector.release_outputs()
    torch.cuda.synchronize()
    one.connector.check()
    for i, (found, expected) in enumerate(wanted):
        assert same(found, expected), i


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_id_gives_nan_and_an_error_then_the_next_step_is_right(engine: Callable[..., Engine], route: str) -> None:
    one, rng = engine(route, "F8_E4M3"), np.random.default_rng(5)
    one.fill(rng, 100, 3)
    one.ids[50] = 12345
    step = one.connector.prepare_forward(3, 100)
    found = one.forward(100)
    torch.cuda.synchronize()
    assert found[50].isnan().all()
    with pytest.raises(StepError, match="id"):
        one.connector.check(step)
    one.connector.release_outputs()
    one.fill(rng, 100, 3)
    step = one.connector.prepare_forward(3, 100)
    found = one.forward(100)
    torch.cuda.synchronize()
    one.connector.check(step)
    assert same(found, one.expected())


@pytest.mark.parametrize("route", WORKER_ROUTES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
def test_a_worker_lost_in_mid_step_drains_the_stream(
    engine: Callable[..., Engine], checkpoints: dict[str, Path], route: str, how: int, captured: bool
) -> None:
    path = checkpoints["F8_E4M3"]
    worker = SpawnedWorker(path, tier="ram")
    another = SpawnedWorker(path, tier="ram")
    try:
        one = engine(route, "F8_E4M3", worker=worker, limits=Limits(no_progress_s=1, hard_cap_s=20))
        rng = np.random.default_rng(6)
        one.fill(rng, 64, 2)
        one.connector.signal_dummy_outputs(64)
        one.forward(64)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = one.forward(64)
        os.kill(worker.pid, signal.SIGSTOP)
        began = time.monotonic()
        step = one.connector.prepare_forward(2, 64)
        if captured:
            graph.replay()
        else:
            out = one.forward(64)
        if how == signal.SIGKILL:
            threading.Timer(0.3, lambda: os.kill(worker.pid, signal.SIGKILL)).start()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 8
        assert out.isnan().all()
        with pytest.raises((StepError, ConnectionLostError)):
            one.connector.check(step)
        with pytest.raises(PleOffloadError):
            one.connector.prepare_forward(2, 64)
        one.connector.reconnect(another.address)
        one.fill(rng, 64, 2)
        step = one.connector.prepare_forward(2, 64)
        found = one.forward(64)
        torch.cuda.synchronize()
        one.connector.check(step)
        assert same(found, one.expected())
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        worker.close()
        another.close()


def test_a_zeroed_table_fails_the_comparison(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    one = Engine(checkpoints["F8_E4M3"], "direct-ram", None)
    other = write(tmp_path, "F8_E4M3", seed=9)
    try:
        one.fill(np.random.default_rng(7), 64, 2)
        found = one.forward(64)
        one.reference.close()
        one.reference = ple_offload.open_table(other, tier="ram")
        torch.cuda.synchronize()
        assert not same(found, one.expected())
    finally:
        one.close()


def test_closing_returns_gpu_memory_and_leaves_no_dirty_page_cache(engine: Callable[..., Engine]) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    dirty = _dirty_kib()
    one = engine("direct-file", "BF16")
    one.fill(np.random.default_rng(8), 512, 4)
    one.forward(512)
    one.close()
    del one.ids, one.starts, one.context
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert _dirty_kib() <= dirty + 2048


def _dirty_kib() -> int:
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("Dirty:"))
    return int(line.split()[1])
