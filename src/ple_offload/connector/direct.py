"""Route `direct`: the GPU reads the rows itself, from host memory registered with the driver for reading only.

Nothing of the host takes part in a step. The rows are where an open table has them: in sealed memory (tier `ram`), or in
the page cache of the checkpoint's own files (tier `file`: nothing is copied, and any number of engine processes share the
one copy). The table is open in this process, or lent by a worker, whose end changes nothing then. Inside the forward,
`start` begins to compute row numbers and to gather, for many tokens on a side stream, which `finish` joins; both can be
captured in a CUDA graph.

A bad id or row number cannot be refused before the step runs: its token gets NaN, its position goes to a word of the
host's that is this step's, and `check` raises once the step is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ple_offload.config import num_threads
from ple_offload.connector.base import PortSpec, check_width
from ple_offload.connector.choose import why_not_direct
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.sources import Sources
from ple_offload.cuda import Cuda, Registration
from ple_offload.errors import CudaError, StepError, UsageError
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.families.qwen_ple_triton import NO_BAD_ID, PLACE_BIT, QwenPleOnDevice
from ple_offload.formats.gather_triton import GatherOnDevice, Given
from ple_offload.table import Table

# To fork and join takes some 3 us of the GPU, which is what fewer tokens take; and some 200 us of the host where it is not
# captured once and for all.
FORK_TOKENS, EAGER_FORK_TOKENS = 16, 256
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class TableOnDevice:
    """One table as the device reads it."""

    family: QwenPleOnDevice | None  # None: request "rows" needs no rule
    gather: GatherOnDevice
    num_rows: int
    rows_per_token: int

    @property
    def device_bytes(self) -> int:
        return self.gather.device_bytes + (0 if self.family is None else self.family.device_bytes)


class TablesOnDevice:
    """Open tables, registered with the driver: `layers` by decoder layer, until `close`. The tables are closed by others.

    device: where the kernels' small arrays are put; the driver's own, except in tests without a GPU.
    Raises CudaError for what stands against it (connector/choose.py) or what the driver refuses, and leaves nothing.
    """

    def __init__(
        self,
        cuda: Cuda,
        config: ConnectorConfig,
        tables: Mapping[int, Table],
        *,
        sources_on_cpu: bool,
        device: torch.device | None = None,
    ) -> None:
        self.cuda, self.tables = cuda, tables
        self._device = device or cuda.device
        self._resources = contextlib.ExitStack()
        reason = why_not_direct(cuda, config, tables, sources_on_cpu)
        if reason is not None:
            raise CudaError(f"route 'direct': {reason}")
        try:
            self.layers = {layer: self._put(table) for layer, table in tables.items()}
        except BaseException:
            self._resources.close()
            raise

    def _put(self, table: Table) -> TableOnDevice:
        if not self.cuda.reads_host_memory and table.store.absent_bytes():
            table.store.bring_in(num_threads())  # registering reads a cold file page by page
        moved: dict[int, int] = {}  # host address of a mapped range -> how far away the device sees it
        for address, num_bytes in table.store.ranges():
            registration = Registration(self.cuda, address, num_bytes, read_only=True, owner=table.store)
            self._resources.callback(registration.close)
            moved[address] = registration.device_address - address
        at, family = table.store.rows, table.spec.family
        starts = sorted(moved)
        bases = np.array(
            [int(base) + moved[max(start for start in starts if start <= int(base))] for base in at.bases], np.uint64
        )
        with self.cuda.current():
            return TableOnDevice(
                QwenPleOnDevice(family, self._device) if isinstance(family, QwenPle) else None,
                GatherOnDevice(table.spec.format, bases, at.starts, at.step, self._device),
                table.num_rows,
                table.rows_per_token,
            )

    def close(self) -> None:
        """Unregister, once nothing on the device can read the tables any more."""
        self._resources.close()


class DirectRoute:
    """See the module. `on_device` is closed by the caller, after this route.

    What the forward does not bring, query_start_loc or ngram_context, is read from the sources, if those are on the device.
    look: called at every step; notices the end of a worker that lent the tables.
    """

    name = "direct"

    def __init__(
        self,
        config: ConnectorConfig,
        ports: Sequence[PortSpec],
        on_device: TablesOnDevice,
        sources: Sources,
        device: torch.device,
        look: Callable[[], object] | None = None,
    ) -> None:
        for port in ports:
            check_width(port, on_device.tables[port.layer].embed_dim)
        self._device, self._sources, self._look = device, sources, look
        self._tables = list(on_device.tables.values())
        self._max_num_tokens, self._slots = config.max_num_tokens, config.max_concurrent_batches
        self._cuda = cuda = on_device.cuda
        self._by_rows = config.request == "rows"
        self._from_sources = not sources.on_cpu()
        with cuda.current():
            self._layers = [
                _Layer(
                    port,
                    on_device.layers[port.layer],
                    None
                    if self._by_rows
                    else torch.empty(
                        (config.max_num_tokens, on_device.layers[port.layer].rows_per_token),
                        dtype=torch.int64,
                        device=device,
                    ),
                )
                for port in ports
            ]
            # its few programs go first: they wait for the bus most of the time, and the model for them
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            # where a captured graph reads it: the step's place in `_bad`, its requests (24 bits), its tokens (32 bits)
            self._size = torch.full((1,), self._slots << PLACE_BIT, dtype=torch.int64, device=device)
            self._places = torch.arange(config.max_num_reqs + 1, dtype=torch.int64, device=device)
        own = [self._size, self._places, *(layer.rows for layer in self._layers if layer.rows is not None)]
        self.device_bytes = sum(tensor.nbytes for tensor in own)
        self.device_bytes += sum(layer.table.device_bytes for layer in self._layers)
        # a word for each slot of steps; behind them one for dummies, whose ids nobody answers for
        self._bad = torch.full((len(ports), self._slots + 1), NO_BAD_ID, dtype=torch.int64, pin_memory=True)
        self._bad_words = self._bad.numpy().data  # the same memory: to look at a word through torch takes microseconds
        # by layer: what is being written, and whether on the side stream
        self._running: dict[int, tuple[torch.Tensor, bool]] = {}

    def asks_worker(self, step: int, num_tokens: int) -> bool:
        """The forward itself has all it needs."""
        return False

    def make_room(self, step: int) -> None:
        """There are no slots."""

    def stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        """The forward brings the ids."""

    def begin(self, step: int, num_reqs: int, num_tokens: int, dummy: bool) -> None:
        """Tell the device the step's size, in stream order; a dummy whose forward brings ids gets the rows of those.

        Raises StoreError when a table's file has changed.
        """
        if self._look is not None:
            self._look()
        for table in self._tables:
            table.check()
        main = torch.cuda.current_stream(self._device)
        if self._running:  # a forward broke off: its memory may be used again once the side stream is done with it
            main.wait_stream(self._side)
            self._running.clear()
        size = self._slots << PLACE_BIT if dummy else step % self._slots << PLACE_BIT | num_reqs << 32 | num_tokens
        with self._cuda.current():
            self._cuda.write_value(main.cuda_stream, self._size.data_ptr(), size)

    def release(self, step: int) -> None:
        """Outputs are fresh tensors: nothing is held."""

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """Begin a layer's rows for the tokens of `ids` [num_tokens]; many of them on the side stream, which forks here."""
        layer = self._layers[index]
        if ids.shape[0] > self._max_num_tokens:
            raise UsageError(
                f"layer {layer.port.layer}: expected at most {self._max_num_tokens} ids in the forward, found "
                f"{ids.shape[0]}. Raise max_num_tokens."
            )
        out = torch.empty(
            (ids.shape[0], layer.port.embed_dim), dtype=TORCH_DTYPES[layer.port.dtype], device=self._device
        )
        forks = ids.shape[0] >= (FORK_TOKENS if torch.cuda.is_current_stream_capturing() else EAGER_FORK_TOKENS)
        if forks:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side) if forks else self._cuda.current():
            given = None
            if layer.rows is None:
                rows = (self._sources.row_numbers or {})[layer.port.layer][: ids.shape[0]]
                given = Given(self._size, self._bad[index], layer.table.rows_per_token, PLACE_BIT)
            else:
                rows = layer.rows[: ids.shape[0]]
                assert layer.table.family is not None  # checked when the tables were registered
                starts, context = self._cuts(query_start_loc, ngram_context)
                layer.table.family.row_numbers(ids, starts, context, rows, self._bad[index], self._size)
            values = out.view(-1, layer.port.embed_dim // layer.table.rows_per_token)
            layer.table.gather.run(rows.view(-1), values, given)
        self._running[index] = out, forks

    def _cuts(
        self, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward's own tensors, or those of the sources, for the greatest number of requests."""
        sources, most = self._sources, len(self._places) - 1
        if query_start_loc is None or ngram_context is None:
            if not self._from_sources or sources.query_start_loc is None or sources.ngram_context is None:
                raise UsageError(
                    "route 'direct': expected query_start_loc and ngram_context in the forward, or sources on the device, "
                    "found None and sources on the CPU."
                )
            if query_start_loc is None:
                # behind the step's last request the source holds anything: repeat the end, as for empty requests
                query_start_loc = sources.query_start_loc.index_select(
                    0, torch.minimum(self._places, self._size >> 32 & 0xFFFFFF)
                )
            if ngram_context is None:
                ngram_context = sources.ngram_context[:most].contiguous()
        return query_start_loc, ngram_context

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        """Join: the layer's rows [num_rows, embed_dim], written when the current stream comes here."""
        out, forked = self._running.pop(index)
        if forked:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        if out.shape[0] != num_rows:
            raise UsageError(
                f"layer {self._layers[index].port.layer}: expected as many ids as hidden states, found {out.shape[0]} and "
                f"{num_rows}."
            )
        return out

    def error(self, step: int) -> StepError | None:
        """What went wrong in a step that is done, once."""
        slot = step % self._slots
        position, index = min((self._bad_words[index, slot], index) for index in range(len(self._bad)))
        if position == NO_BAD_ID:
            return None
        self._bad[:, slot] = NO_BAD_ID
        if self._by_rows:
            return StepError(
                f"row_numbers[{self._layers[index].port.layer}][{position}] holds a row number outside the table, expected "
                f"0 to {self._layers[index].table.num_rows - 1}; its token got NaN."
            )
        return StepError(
            f"the n-gram of input_ids[{position}] holds an id outside the vocabulary; its token got NaN. "
            "Placeholders (-1) and ids of another vocabulary cannot be looked up."
        )

    def close(self) -> None:
        """Wait for the GPU."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        self._running.clear()
        self._layers = []


@dataclass(frozen=True)
class _Layer:
    port: PortSpec
    table: TableOnDevice
    rows: torch.Tensor | None  # [max_num_tokens, rows_per_token] int64, at a fixed address; None: the engine's own
