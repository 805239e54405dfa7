"""What an engine does around its steps: it fills the inputs, starts the lookup, runs the forward, and takes the result.

Decode steps are CUDA graphs, prefills run eagerly. `in_flight` 2 is an engine that prepares a step while the one before
still computes; 1 waits for every step. Ids are new in every step, drawn on the GPU, so no row is found in a cache.

On the CPU everything runs eagerly: that is for the tests.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from decoder import Decoder
from lookups import Lookup
from world import VOCAB_SIZE

MAX_TOKENS, MAX_REQS = 8192, 256
CONTEXT_LEN = 2


@dataclass(frozen=True)
class Batch:
    """One kind of step: decode has one token a request, prefill has one request."""

    kind: str  # "decode" or "prefill"
    num_tokens: int

    @property
    def num_reqs(self) -> int:
        return self.num_tokens if self.kind == "decode" else 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.num_tokens}"


class Inputs:
    """A step's input tensors, at fixed addresses, as an engine has them; int32."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32, device=device)
        self.context = torch.zeros((MAX_REQS, CONTEXT_LEN), dtype=torch.int32, device=device)
        self._starts: dict[Batch, torch.Tensor] = {}

    def fill(self, batch: Batch) -> None:
        """New random ids and contexts of a batch, in stream order."""
        if batch not in self._starts:
            cuts = torch.arange(batch.num_reqs + 1) * (batch.num_tokens // batch.num_reqs)
            # behind the batch's requests there are empty ones
            padded = torch.full((MAX_REQS + 1,), batch.num_tokens, dtype=torch.int32)
            padded[: batch.num_reqs + 1] = cuts
            self._starts[batch] = padded.to(self.device)
        self.starts.copy_(self._starts[batch])
        self.ids[: batch.num_tokens].random_(0, VOCAB_SIZE)
        self.context[: batch.num_reqs].random_(0, VOCAB_SIZE)

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, starts, context) of a batch: views."""
        return self.ids[: batch.num_tokens], self.starts[: batch.num_reqs + 1], self.context[: batch.num_reqs]

    def on_host(self, batch: Batch) -> tuple[Any, Any, Any]:
        """The same as int64 arrays."""
        ids, starts, context = (part.cpu().numpy().astype(np.int64) for part in self.of(batch))
        return ids, starts, context


@dataclass
class Ran:
    """A captured or plain forward and where its results are."""

    call: Any
    hidden: torch.Tensor
    rows: torch.Tensor | None


@dataclass
class Times:
    """Seconds a step, and of them those in calls of the lookup outside the forward, on the host."""

    step_s: float
    host_s: float


@dataclass
class Engine:
    """One model with one way to get its rows."""

    decoder: Decoder
    lookup: Lookup
    inputs: Inputs
    _ran: dict[Batch, Ran] = field(default_factory=dict)

    def prepare(self, batch: Batch) -> None:
        """Compile, and capture where the batch is a decode batch on a GPU."""
        self.inputs.fill(batch)
        self.lookup.before_dummy(batch)
        hidden, rows = self._forward(batch)
        self.synchronize()
        if batch.kind == "prefill" or self.inputs.device.type == "cpu":
            self._ran[batch] = Ran(None, hidden, rows)
            return
        self.lookup.before_dummy(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, rows = self._forward(batch)
        self._ran[batch] = Ran(graph, hidden, rows)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.decoder.forward(self.lookup, *self.inputs.of(batch))

    def _run(self, batch: Batch) -> Ran:
        ran = self._ran[batch]
        if ran.call is None:
            ran.hidden, ran.rows = self._forward(batch)
        else:
            ran.call.replay()
        return ran

    def look(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden, rows) of one step with new ids, whatever stood in the outputs before it overwritten."""
        ran = self._ran[batch]
        for output in (ran.hidden, ran.rows):
            if output is not None:
                output.fill_(7.0)
        self.inputs.fill(batch)
        return self.look_again(batch)

    def look_again(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same with the ids that are there."""
        self.lookup.before(batch)
        ran = self._run(batch)
        self.synchronize()
        self.lookup.after()
        return ran.hidden, ran.rows

    def steps(self, batch: Batch, count: int, in_flight: int = 2) -> Times:
        """Run `count` steps, at most `in_flight` of them at once; mean times."""
        waiting: deque[Any] = deque()
        host_s = 0.0
        self.synchronize()
        began_s = time.perf_counter()
        for i in range(count + in_flight):
            if len(waiting) == in_flight or (i >= count and waiting):
                wait_for(waiting.popleft())
                at_s = time.perf_counter()
                self.lookup.after()
                host_s += time.perf_counter() - at_s
            if i < count:
                self.inputs.fill(batch)
                at_s = time.perf_counter()
                self.lookup.before(batch)
                host_s += time.perf_counter() - at_s
                self._run(batch)
                waiting.append(mark(self.inputs.device))
        return Times((time.perf_counter() - began_s) / count, host_s / count)

    def synchronize(self) -> None:
        if self.inputs.device.type == "cuda":
            torch.cuda.synchronize(self.inputs.device)

    def close(self) -> None:
        self.synchronize()
        self._ran.clear()


def mark(device: torch.device) -> Any:
    """This place in the current stream."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: Any) -> None:
    if event is not None:
        event.synchronize()
