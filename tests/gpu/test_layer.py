"""What a compiled and a captured model holds of the table: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.test_routes import Engine, same, write
from ple_offload.layer import PleOffloadLayer
from ple_offload.worker.spawn import SpawnedWorker

pytestmark = pytest.mark.gpu

TOKENS = 64


class Model(torch.nn.Module):
    """A PLE layer and a parameter behind it."""

    def __init__(self, ple: PleOffloadLayer) -> None:
        super().__init__()
        self.ple = ple
        self.weight = torch.nn.Parameter(torch.ones(2560, dtype=torch.bfloat16, device="cuda"))

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        return self.ple(hidden, ids, starts, context) * self.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("route", ["direct-ram", "direct-file", "staged-async"])
def test_the_table_is_no_part_of_a_graph(tmp_path: Path, route: str) -> None:
    """No input, attribute or constant of the compiled graph, no parameter, not in the state, not in GPU memory."""
    path = write(tmp_path, "BF16")
    worker = SpawnedWorker(path, tier="ram") if route.startswith("staged") else None
    one = Engine(path, route, worker)
    seen: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append((graph, inputs))
        return graph.forward

    try:
        table_bytes = one.reference.spec.size_bytes
        model = Model(one.layer)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        rng = np.random.default_rng(0)
        hidden = torch.empty((TOKENS, 1), device="cuda")
        before = torch.cuda.memory_allocated()

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return compiled(hidden, one.ids[:TOKENS], one.starts, one.context)

        one.fill(rng, TOKENS, 3)
        one.connector.signal_dummy_outputs(TOKENS)
        forward()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = forward()
        for _ in range(3):
            one.fill(rng, TOKENS, 3)
            step = one.connector.prepare_forward(3, TOKENS)
            captured.replay()
            torch.cuda.synchronize()
            one.connector.check(step)
            assert same(out, one.expected())
            one.connector.release_outputs()

        ((graph, inputs),) = seen
        nodes = list(graph.graph.nodes)
        called = [str(node.target) for node in nodes if node.op == "call_function"]
        assert any("ple_offload.start" in name for name in called)
        assert any("ple_offload.finish" in name for name in called)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        assert len(placeholders) == len(inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        held = [*tensors, *graph.parameters(), *graph.buffers()]
        held += [x for x in vars(graph).values() if isinstance(x, torch.Tensor)]
        assert 4 <= len(tensors) <= 5  # hidden, ids, starts, context; the weight, where it is lifted
        assert sum(x.numel() * x.element_size() for x in held) < table_bytes / 100
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        assert list(model.state_dict()) == ["weight"]
        assert not list(model.buffers())
        assert torch.cuda.memory_allocated() - before < table_bytes / 4
    finally:
        one.close()
        if worker is not None:
            worker.close()
        torch._dynamo.reset()
