"""The ways to get a step's rows inside a forward, each from token ids.

`none`     no table at all
`hbm`      the table in GPU memory; row numbers and gather where the rows are needed
`uva`      the table in page-locked host memory, read by the GPU where the rows are needed, one program a row
`direct`, `staged`, `auto`   the connector, begun at the beginning of the forward
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import bare_gather
import torch
from on_device import page_locked, resident
from world import EMBED_DIM, LAYER, ROWS_PER_TOKEN, World

from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.families.qwen_ple_triton import NO_BAD_ID, QwenPleOnDevice
from ple_offload.layer import PleOffloadLayer, finish, start

if TYPE_CHECKING:
    from loop import Batch, Inputs

NAMES = ("none", "hbm", "uva", "direct", "staged", "auto")
OURS = ("direct", "staged", "auto")
IN_FLIGHT = 2


class Lookup(Protocol):
    """decoder.Lookup, and what an engine calls around its forward."""

    def before_dummy(self, batch: Batch) -> None:
        """The next forward is for warming up or for capture."""

    def before(self, batch: Batch) -> None:
        """The inputs are filled, in stream order; the forward comes next."""

    def after(self) -> None:
        """The oldest step is done on the device; raises if its rows were not right."""

    def begin(self, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> None: ...

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None: ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class NoTable:
    """Nothing to do, anywhere."""

    def before_dummy(self, batch: Batch) -> None: ...

    def before(self, batch: Batch) -> None: ...

    def after(self) -> None: ...

    def begin(self, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> None: ...

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class InForward(NoTable):
    """Row numbers and the plain gather on the forward's own stream, where the rows are needed.

    address: of the table, as the device sees it. keep: closed when this is.
    """

    def __init__(self, world: World, inputs: Inputs, address: int, keep: contextlib.ExitStack) -> None:
        family = world.spec.family
        assert isinstance(family, QwenPle)
        assert world.spec.format.scale is not None
        self._family = QwenPleOnDevice(family, inputs.device)
        self._address, self._keep = address, keep
        self._scale = float(torch.tensor(world.spec.format.scale, dtype=torch.bfloat16))
        self._rows = torch.empty((inputs.ids.shape[0], ROWS_PER_TOKEN), dtype=torch.int64, device=inputs.device)
        self._bad = torch.full((1,), NO_BAD_ID, dtype=torch.int64, device=inputs.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=inputs.device)
        self._asked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def begin(self, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> None:
        self._asked = (ids, starts, context)

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._asked is not None
        rows = self._rows[: hidden.shape[0]]
        out = torch.empty((hidden.shape[0], EMBED_DIM), dtype=torch.bfloat16, device=hidden.device)
        self._family.row_numbers(*self._asked, rows, self._bad, self._step)
        bare_gather.copy_and_decode(self._address, rows.view(-1), out.view(rows.numel(), -1), self._scale)
        return out

    def close(self) -> None:
        self._keep.close()


class Ours(NoTable):
    """The connector by one route; `address` of a worker, or "inline" with the world's own table."""

    def __init__(self, world: World, inputs: Inputs, route: str, address: str) -> None:
        on_gpu = inputs.device.type == "cuda"
        self._layer = PleOffloadLayer(LAYER, EMBED_DIM)
        self.connector = PleOffloadConnector(
            ConnectorConfig(
                inputs.ids.shape[0],
                inputs.context.shape[0],
                session=f"bench-{route}-{os.getpid()}",
                max_concurrent_batches=IN_FLIGHT,
                route=route if on_gpu else "auto",
            ),
            self._layer,
            inputs.device,
            address,
            input_ids_source=inputs.ids,
            query_start_loc_source=inputs.starts,
            ngram_context_source=inputs.context,
            tables={LAYER: world.table} if address == "inline" else None,
        )
        self._flight: deque[int] = deque()
        self._token: torch.Tensor | None = None

    def before_dummy(self, batch: Batch) -> None:
        self.connector.signal_dummy_outputs(batch.num_tokens)

    def before(self, batch: Batch) -> None:
        self._flight.append(self.connector.prepare_forward(batch.num_reqs, batch.num_tokens))

    def after(self) -> None:
        self.connector.check(self._flight.popleft())
        self.connector.release_outputs()

    def begin(self, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> None:
        self._token = start(ids, starts, context, self._layer.number)

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = finish(self._token, hidden, self._layer.number, EMBED_DIM, torch.bfloat16)
        return rows

    def describe(self) -> dict[str, Any]:
        report = getattr(self.connector, "route_report", None)
        return {"report": str(report)} if report is not None else {}

    def close(self) -> None:
        self.connector.close()


def make(name: str, world: World, inputs: Inputs, address: str) -> Lookup:
    """A way by its name; `address` of a worker over the world."""
    if name == "none":
        return NoTable()
    if name in OURS:
        return Ours(world, inputs, name, "inline" if name == "direct" else address)
    with contextlib.ExitStack() as stack:
        if name == "hbm":
            rows = resident(world, inputs.device)
            stack.callback(rows.untyped_storage().resize_, 0)  # keeps the memory until then
            at = rows.data_ptr()
        else:
            at = stack.enter_context(page_locked(world, inputs.device))
        return InForward(world, inputs, at, stack.pop_all())
