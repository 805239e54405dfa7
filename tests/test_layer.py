"""The layer's two ops: eager and compiled, in order, once per forward, whatever else the compiler moves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from connector.rig import Inputs, Rank, all_nan, make, random_inputs
from ple_offload import layer as layer_module
from ple_offload import open_table
from ple_offload.connector import registry
from ple_offload.errors import StepError, UsageError
from ple_offload.layer import PleOffloadLayer

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.skipif(
                not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler"
            ),
            pytest.mark.timeout(300),  # the first compilation of a process reads all of torch's headers
        ],
    ),
]
Rows = list[torch.Tensor]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """Two layers, rows from tables of this process."""
    made = make(tmp_path / "checkpoint", num_layers=2)
    opened = {table.layer: open_table(made.path, table.layer, "file", threads=1) for table in made.spec.tables}
    with Rank.of(made, "inline", opened=opened) as one:
        yield one
    for table in opened.values():
        table.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every run of an op, in order: (op, number of the layer). The ops find their connector in the registry, once each."""
    seen: list[tuple[str, int]] = []
    find = registry.find

    def recording_find(number: int) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if caller in ("_start", "_finish"):
            seen.append((caller[1:], number))
        return find(number)

    monkeypatch.setattr(registry, "find", recording_find)
    return seen


class Model(torch.nn.Module):
    """Work before, between and behind two PLE layers, some of it free to move."""

    def __init__(self, layers: list[PleOffloadLayer]) -> None:
        super().__init__()
        self.first, self.second = layers
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = ids.float().mul(3).sin()
        one = self.first(hidden, ids)
        hidden = self.mix(hidden.relu()) * scaled.sum() + one.float().sum() * 0
        two = self.second(hidden, ids)
        return one, two, hidden + two.float().sum() * 0, scaled


def compiled(model: torch.nn.Module, backend: str, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, **options)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=1):  # no pool of processes for three small kernels
        yield
    torch._dynamo.reset()


def forward(model: Callable[..., Any], rank: Rank, inputs: Inputs) -> Rows:
    with torch.no_grad():
        return list(model(torch.ones(inputs.padded, 8), rank.ids[: inputs.padded])[:2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_layers_run_both_ops_once_in_order_and_deliver_the_rows(
    rank: Rank, calls: list[tuple[str, int]], backend: str, dynamic: bool | None
) -> None:
    numbers = [layer.number for layer in rank.layers]
    model = compiled(Model(rank.layers), backend, dynamic=dynamic)
    rng = np.random.default_rng(0)
    for _ in range(3):
        inputs = random_inputs(rng, 20, 3, padded=24)
        step = rank.prepare(inputs)
        calls.clear()
        found = forward(model, rank, inputs)
        rank.connector.check(step)
        rank.connector.release_outputs()
        assert rank.right(found, inputs)
        for number in numbers:
            assert [op for op, of in calls if of == number] == ["start", "finish"]
        assert len(calls) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_one_graph_serves_every_size(rank: Rank, backend: str) -> None:
    model = compiled(Model(rank.layers), backend)
    graphs = torch._dynamo.utils.counters["stats"]
    rng = np.random.default_rng(1)
    made: list[int] = []
    for padded in (16, 24, 2, 64, 33, 7):
        inputs = random_inputs(rng, min(padded, 20), 3, padded=padded)
        rank.prepare(inputs)
        hidden, ids = torch.ones(padded, 8), rank.ids[:padded].clone()
        for tensor in (hidden, ids):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            found = model(hidden, ids)[:2]
        made.append(graphs["unique_graphs"])
        assert rank.right(found, inputs)
        rank.connector.release_outputs()
    assert len(set(made)) == 1, "it was compiled again"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_failed_step_is_nan_in_a_graph_and_check_raises(rank: Rank, backend: str) -> None:
    model = compiled(Model(rank.layers), backend)
    rng = np.random.default_rng(2)
    good = random_inputs(rng, 20, 3)
    for _ in range(2):
        rank.load(good)
        rank.ids[3] = -1
        step = rank.connector.prepare_forward(3, 20)
        assert all_nan(forward(model, rank, good))  # the graph itself cannot raise
        for _ in range(2):
            with pytest.raises(StepError, match=rf"step {step} layer 1: input_ids\[3\] = -1"):
                rank.connector.check(step)
        rank.connector.release_outputs()
        rank.prepare(good)
        assert rank.right(forward(model, rank, good), good)
        rank.connector.release_outputs()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_token_is_the_order(rank: Rank, backend: str, calls: list[tuple[str, int]]) -> None:
    """`start` comes first although nothing but the token ties it to `finish`, with pure work between them to move."""
    start, finish = layer_module.start, layer_module.finish
    number = rank.layers[0].number

    def between(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = start(ids, None, None, number)
        moved = hidden.sin().matmul(hidden.cos().T).relu()
        return finish(token, hidden, number, 64, torch.bfloat16), moved

    run = compiled(between, backend)  # type: ignore[arg-type]
    inputs = random_inputs(np.random.default_rng(3), 20, 3)
    for _ in range(3):
        rank.prepare(inputs)
        calls.clear()
        rows, moved = run(torch.ones(20, 8), rank.ids[:20])
        assert [op for op, _ in calls] == ["start", "finish"]
        assert moved.shape == (20, 20)
        assert rank.right([rows, rank.layers[1](torch.ones(20, 8), rank.ids)], inputs)
        rank.connector.release_outputs()


def test_ops_in_a_graph_are_what_the_module_says() -> None:
    """The fakes give the shapes and dtypes of the real ops: torch's own check of both."""
    ids, hidden = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 8)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_ids, fake_hidden = mode.from_tensor(ids), mode.from_tensor(hidden)
        token = layer_module.start(fake_ids, None, None, 1)
        rows = layer_module.finish(token, fake_hidden, 1, 64, torch.float16)
    assert (tuple(token.shape), token.dtype) == ((1,), torch.int64)
    assert (tuple(rows.shape), rows.dtype) == ((5, 64), torch.float16)
    meta = layer_module.finish(torch.empty(1, device="meta"), hidden.to("meta"), 1, 64, torch.float32)
    assert (tuple(meta.shape), meta.device.type) == ((5, 64), "meta")


def test_a_layer_has_no_parameters_and_nothing_to_save() -> None:
    layer = PleOffloadLayer(1, 64)
    assert not layer.state_dict()
    assert not list(layer.parameters())
    assert not list(layer.buffers())
    layer.load_state_dict({})
    assert (layer.get_offload_output_dtype(), layer.get_offload_output_dim()) == (torch.bfloat16, 64)
    assert layer.to("meta").to(torch.float16).half() is layer


def test_every_layer_of_a_process_has_a_number_of_its_own() -> None:
    numbers = [PleOffloadLayer(1, 64).number for _ in range(5)]
    assert len(set(numbers)) == 5


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_layer_that_no_connector_serves_says_so(backend: str | None) -> None:
    model = PleOffloadLayer(1, 64)
    run = model if backend is None else compiled(model, backend)
    with pytest.raises(UsageError, match=r"layer number \d+: no connector serves this layer \(never made, or closed\)"):
        run(torch.ones(3, 8), torch.zeros(3, dtype=torch.int64))


def test_eager_layers_give_rows_and_raise_in_the_forward(rank: Rank) -> None:
    model = Model(rank.layers)
    good = random_inputs(np.random.default_rng(4), 20, 3, padded=30)
    for _ in range(2):
        rank.prepare(good)
        assert rank.right(forward(model, rank, good), good)
        rank.connector.release_outputs()
        rank.load(good)
        rank.ids[0] = 1000
        rank.connector.prepare_forward(3, 20)
        with pytest.raises(StepError, match=r"input_ids\[0\] = 1000"):
            forward(model, rank, good)
        rank.connector.release_outputs()


def test_hidden_that_wants_gradients_changes_nothing(rank: Rank) -> None:
    """Rows are constants: nothing is to be differentiated, and nobody is warned about it."""
    inputs = random_inputs(np.random.default_rng(5), 20, 3)
    rank.prepare(inputs)
    hidden = torch.ones(20, 8, requires_grad=True)
    found = [layer(hidden, rank.ids) for layer in rank.layers]
    assert rank.right([values.detach() for values in found], inputs)
    (hidden.sum() + found[0].float().sum()).backward()
    assert torch.equal(hidden.grad, torch.ones(20, 8))
