"""A connector of a GPU on a machine without one: kernels run in Triton's interpreter, the driver is a fake.

The device is the CPU, which sees memory where the host does; streams do at once what they are given, unless a test counts
what they wait for. Tables and workers are real. The interpreted wait looks once, so the worker's flags are awaited here
before a forward that needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from connector.rig import Inputs, Made, reference, same_bytes
from fake_driver import FakeDriver
from ple_offload import cuda
from ple_offload.connector import ConnectorConfig, PleOffloadConnector, choose, routes, staged
from ple_offload.connector.choose import Timing
from ple_offload.connector.direct import TablesOnDevice
from ple_offload.connector.routes import GpuRoutes
from ple_offload.connector.sources import Sources
from ple_offload.ipc import words
from ple_offload.layer import PleOffloadLayer

CPU = torch.device("cpu")
MAX_TOKENS, MAX_REQS, BORDER = 64, 8, 16
SLOTS = 2


class Stream:
    """Remembers which streams it has waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class HostDriver(FakeDriver):
    """Its device sees host memory; what a stream writes there is written."""

    def __init__(self) -> None:
        super().__init__(shift=0)
        self.attributes[cuda.ATTRIBUTES["read_only_host_register"]] = 1

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        if stream in self.streams:
            return super().cuStreamWriteValue64(stream, address, value, flags)
        answer = self._answer("cuStreamWriteValue64", (stream, address, value, flags))
        ctypes.c_uint64.from_address(address).value = value
        return answer


class Gpu:
    """What stands for the GPU while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = HostDriver()
        self.main = Stream()
        gpu = cuda.Cuda(torch.device("cuda", 0), self.driver.activate)

        def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

        class OnCpu(GpuRoutes):
            def __init__(self, config: Any, ports: Any, sources: Any, device: Any) -> None:
                super().__init__(config, ports, sources, CPU)

        for name in ("zeros", "full"):
            monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
        for name, value in (
            ("is_available", lambda: True),
            ("Stream", Stream),
            ("current_stream", lambda *_: self.main),
            ("stream", lambda *_: contextlib.nullcontext()),
            ("synchronize", lambda *_: None),
            ("is_current_stream_capturing", lambda: False),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Sources, "on_cpu", lambda self: False)
        monkeypatch.setattr(routes, "GpuRoutes", OnCpu)
        monkeypatch.setattr(routes, "Cuda", lambda device: gpu)
        monkeypatch.setattr(staged, "Cuda", lambda device: gpu)
        monkeypatch.setattr(routes, "TablesOnDevice", lambda *a, **o: TablesOnDevice(*a, **o, device=CPU))
        monkeypatch.setattr(routes, "measure", lambda *_: ((Timing(1, 5, 10), Timing(BORDER, 5, 5)), 0.0))
        monkeypatch.setattr(routes, "border", lambda timings: BORDER)
        monkeypatch.setattr(choose, "kernel_driver_version", lambda: (580, 0))


class Model:
    """PLE layers on that GPU, the sources, and the connector."""

    def __init__(
        self, made: Made, address: str, route: str, *, tables: Mapping[int, Any] | None = None, **options: Any
    ) -> None:
        self.made = made
        options.setdefault("session", f"{route}-{id(self)}")
        config = ConnectorConfig(
            MAX_TOKENS, MAX_REQS, route=route, staging="async", max_concurrent_batches=SLOTS, **options
        )
        self.layers = [PleOffloadLayer(table.layer, table.embed_dim) for table in made.spec.tables]
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32)
        self.context = torch.zeros((MAX_REQS, 2), dtype=torch.int32)
        self.connector = PleOffloadConnector(
            config,
            torch.nn.ModuleList(self.layers),
            "cuda:0",
            address,
            input_ids_source=self.ids,
            query_start_loc_source=self.starts,
            ngram_context_source=self.context,
            tables=tables,
        )

    def prepare(self, inputs: Inputs) -> int:
        self.ids.fill_(-1)
        self.starts.fill_(inputs.tokens)
        self.context.fill_(7)
        self.ids[: len(inputs.ids)] = torch.from_numpy(inputs.ids)
        self.starts[: len(inputs.starts)] = torch.from_numpy(inputs.starts)
        self.context[: len(inputs.context)] = torch.from_numpy(inputs.context)
        return self.connector.prepare_forward(len(inputs.starts) - 1, inputs.padded)

    def await_flags(self, step: int, tokens: int) -> None:
        """Until the worker has said of every block of the step that it is there, or failed."""
        transport = self.connector._transport
        base, layout, flag = transport._region.address, transport.layout, transport.flag(step)
        end = time.monotonic() + 10
        for layer, rows in enumerate(layout.rows_per_token):
            for block in range(max(1, -(-tokens * rows // layout.block_rows))):
                at = np.uint64(base + layout.flag(layer, step % SLOTS, block))
                while int(words.load_word(at)) & ~words.FAILED != flag:
                    assert time.monotonic() < end, "the worker's flag did not come"
                    time.sleep(0.0005)

    def forward(self, padded: int) -> list[torch.Tensor]:
        hidden = torch.zeros((padded, 1))
        ids = self.ids[:padded].clone()
        return [layer(hidden, ids, self.starts, self.context) for layer in self.layers]

    def run(self, inputs: Inputs) -> list[torch.Tensor]:
        step = self.prepare(inputs)
        if self.asks_worker(inputs.padded):
            self.await_flags(step, inputs.padded)
        found = self.forward(inputs.padded)
        self.connector.check(step)
        self.connector.release_outputs()
        return found

    def asks_worker(self, tokens: int) -> bool:
        name = self.connector._route.name
        return name == "staged" or (name == "auto" and tokens > BORDER)

    def right(self, found: list[torch.Tensor], inputs: Inputs) -> bool:
        specs = self.made.spec.tables
        wanted = [reference(spec, self.made.raw[spec.layer], inputs, "bf16") for spec in specs]
        return all(same_bytes(f, w) for f, w in zip(found, wanted, strict=True))

    def close(self) -> None:
        self.connector.close()
