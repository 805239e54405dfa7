"""Route `direct`: the GPU reads the rows itself, from host memory registered with the driver for reading only.

Nothing of the host takes part in a step. The rows are where the open table has them: in sealed memory (tier `ram`), or in
the page cache of the checkpoint's own files (tier `file`: nothing is copied, and any number of engine processes share the
one copy). Inside the forward, `start` forks a side stream that computes row numbers and gathers, and `finish` joins it;
both can be captured in a CUDA graph.

A bad id cannot be refused before the step runs: its token gets NaN, its position goes to a word of the host's, and `check`
raises once the step is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ple_offload.connector.base import PortSpec
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.sources import Sources
from ple_offload.cuda import Cuda, Registration, check_files_can_be_registered
from ple_offload.errors import StepError, UsageError
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.families.qwen_ple_triton import NO_BAD_ID, QwenPleOnDevice
from ple_offload.formats.gather_triton import GatherOnDevice
from ple_offload.table import Table

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class DirectRoute:
    """See the module. The caller opened the tables and closes them after this route."""

    name = "direct"
    asks_worker = False

    def __init__(
        self, config: ConnectorConfig, ports: Sequence[PortSpec], tables: Mapping[int, Table], device: torch.device
    ) -> None:
        if config.request != "tokens":
            raise UsageError("route 'direct': expected request 'tokens', found 'rows'. Use route 'staged'.")
        self._device = device
        self._resources = contextlib.ExitStack()
        cuda = Cuda(device)
        try:
            self._layers = [self._layer(cuda, config, port, tables[port.layer]) for port in ports]
            with cuda.current():
                self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._bad = torch.full((len(ports),), NO_BAD_ID, dtype=torch.int64, pin_memory=True)
        except BaseException:
            self._resources.close()
            raise
        self._running: dict[int, torch.Tensor] = {}

    def _layer(self, cuda: Cuda, config: ConnectorConfig, port: PortSpec, table: Table) -> _Layer:
        family = table.spec.family
        if not isinstance(family, QwenPle):
            raise UsageError(f"route 'direct': family {family.name!r} has no GPU kernel. Use route 'staged'.")
        if table.tier == "file":
            check_files_can_be_registered(cuda)
        moved: dict[int, int] = {}  # host address of a mapped range -> how far away the device sees it
        for address, num_bytes in table.store.ranges():
            registration = Registration(cuda, address, num_bytes, read_only=True)
            self._resources.callback(registration.close)
            moved[address] = registration.device_address - address
        at = table.store.rows
        starts = sorted(moved)
        bases = np.array(
            [int(base) + moved[max(start for start in starts if start <= int(base))] for base in at.bases], np.uint64
        )
        heads = table.rows_per_token
        with cuda.current():
            return _Layer(
                QwenPleOnDevice(family, self._device),
                GatherOnDevice(table.spec.format, bases, at.starts, at.step, self._device),
                torch.empty((config.max_num_tokens, heads), dtype=torch.int64, device=self._device),
                port.embed_dim,
                TORCH_DTYPES[port.dtype],
            )

    def make_room(self, step: int) -> None:
        """There are no slots."""

    def stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        """The forward brings the ids."""

    def begin(self, step: int, num_tokens: int, dummy: bool) -> None:
        """A dummy's rows are those of its ids."""

    def release(self, step: int) -> None:
        """Outputs are fresh tensors: nothing is held."""

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """Fork: begin a layer's rows for the tokens of `ids` [num_tokens], on the side stream."""
        layer = self._layers[index]
        if query_start_loc is None or ngram_context is None:
            raise UsageError("route 'direct': expected query_start_loc and ngram_context in the forward, found None.")
        main = torch.cuda.current_stream(self._device)
        out = torch.empty((ids.shape[0], layer.embed_dim), dtype=layer.dtype, device=self._device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            rows = layer.rows[: ids.shape[0]]
            layer.family.row_numbers(ids, query_start_loc, ngram_context, rows, self._bad[index : index + 1])
            layer.gather.run(rows.view(-1), out.view(rows.numel(), -1))
        self._running[index] = out

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        """Join: the layer's rows [num_rows, embed_dim], written when the current stream comes here."""
        out = self._running.pop(index)
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return out

    def error(self, step: int) -> StepError | None:
        """What went wrong in the steps that are done, once; `step` is the one whose caller asks."""
        bad = self._bad.numpy()
        if (bad == NO_BAD_ID).all():
            return None
        position = int(bad.min())
        bad[:] = NO_BAD_ID
        return StepError(
            f"the n-gram of input_ids[{position}] holds an id outside the vocabulary; its token got NaN. "
            "Placeholders (-1) and ids of another vocabulary cannot be looked up."
        )

    def close(self) -> None:
        """Wait for the GPU, then unregister."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        self._running.clear()
        self._layers = []
        self._resources.close()


class _Layer:
    def __init__(
        self, family: QwenPleOnDevice, gather: GatherOnDevice, rows: torch.Tensor, embed_dim: int, dtype: torch.dtype
    ) -> None:
        self.family = family
        self.gather = gather
        self.rows = rows  # [max_num_tokens, rows_per_token] int64, at a fixed address for captured graphs
        self.embed_dim = embed_dim
        self.dtype = dtype
