"""What a connector needs from below: a transport that carries a step's inputs to where rows are found, and its rows back.

One step: `inputs(step)` gives the arrays to stage into -> `publish(step, ...)` -> `deliver(layer, step, ...)` once for each
layer, in any order -> `release(step)`. A transport knows no torch; it counts layers from 0, in the order of its ports.

Failure: `deliver` raises StepError when this step's rows will not come (the next steps may), ConnectionLostError when none
will come any more. It returns within the limits, whatever the other side does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from ple_offload.errors import PleOffloadError, UsageError
from ple_offload.ipc.messages import LayerFacts
from ple_offload.ipc.region import Layout

if TYPE_CHECKING:
    import torch

    from ple_offload.connector.sources import Sources


@dataclass(frozen=True)
class PortSpec:
    """What one layer of the model wants: which decoder layer it is, and its output's value dtype and width."""

    layer: int
    dtype: str  # "bf16", "fp16", "fp32"
    embed_dim: int


def check_width(port: PortSpec, table_width: int) -> None:
    """UsageError for a layer whose output is not as wide as a token's rows are together."""
    if port.embed_dim != table_width:
        raise UsageError(
            f"layer {port.layer}: expected an output of {table_width} elements a token, as the table has, found "
            f"{port.embed_dim}."
        )


@dataclass
class Inputs:
    """A step's input arrays: of a slot, all int64, or of the sources. `row_numbers` has one entry per layer."""

    input_ids: npt.NDArray[Any]  # [max_num_tokens]
    query_start_loc: npt.NDArray[Any]  # [max_num_reqs + 1]
    ngram_context: npt.NDArray[Any]  # [max_num_reqs, context_len]
    row_numbers: list[npt.NDArray[Any]]  # [max_num_tokens, rows_per_token] each; only for request "rows"


class Route(Protocol):
    """How rows reach a layer on a GPU. Calls are made under any current device; only `make_room` and `close` wait for it.

    One step: `asks_worker`; if so, `make_room` for host sources, `stage` for device sources -> `begin` -> in the forward,
    for each layer, `start` and `finish` -> `error` once the step is done on the device -> `release`.
    """

    name: str

    @property
    def device_bytes(self) -> int:
        """GPU memory that it holds between steps; the outputs are the forward's."""

    def asks_worker(self, step: int, num_tokens: int) -> bool:
        """Whether the step is to be published; else the forward itself has all it needs. Asked once for each real step.

        The same on every rank of a DP group.
        """

    def make_room(self, step: int) -> None:
        """Wait, within the limits, until the host may write the step's slot."""

    def stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        """Copy device sources into the step's slot and announce it, in stream order."""

    def begin(self, step: int, num_reqs: int, num_tokens: int, dummy: bool) -> None:
        """The next forward on the current stream is this step's; a dummy's rows are zeros where the route decides them."""

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """Inside the forward: begin the `index`-th layer's rows. May be captured in a graph."""

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        """Inside the forward: the layer's rows [num_rows, embed_dim], a fresh tensor. May be captured in a graph."""

    def error(self, step: int) -> PleOffloadError | None:
        """Why a step that is done on the device delivered NaN, or None."""

    def release(self, step: int) -> None:
        """Every step up to this one has been consumed once the current stream comes here."""

    def close(self) -> None:
        """Wait for the GPU, within the limits, then give registered memory back."""


class DeviceMemory(Protocol):
    """Memory of a GPU that a worker writes: shared once the layout of the region is known, freed when the worker let go."""

    address: int
    num_bytes: int
    layout: Layout

    def share(self, layout: Layout) -> tuple[str, bytes]:
        """Allocate for a connection with this region; returns the GPU's UUID and the handle by which a process opens it."""

    def close(self, let_go: bool) -> None:
        """Free it, or keep it for good where the worker has not let go of it: it may still write."""


class Transport(Protocol):
    facts: list[LayerFacts]  # one per layer

    def inputs(self, step: int) -> Inputs:
        """The arrays of the step's slot; valid until `publish`."""

    def publish(self, step: int, num_reqs: int, num_tokens: int) -> None:
        """Send the step on its way; never waits."""

    def deliver(self, layer: int, step: int, num_tokens: int, out: npt.NDArray[Any]) -> None:
        """Fill out [num_tokens, embed_dim], of the port's value dtype."""

    def release(self, step: int) -> None:
        """Every step up to this one has been consumed."""

    def close(self) -> None:
        """Bounded, and safe to call twice and after any failure."""
