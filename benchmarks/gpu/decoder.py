"""A synthetic decoder: what stands around a lookup in a real model, and how long it takes, without the model.

    hidden = embedding[ids]
    48 times: hidden += norm(hidden) @ up @ down       a layer reads 2 x HIDDEN x width weights, which is what decode costs
    before layer 1: hidden += the rows of the table

Layers share two sets of weights in turn. Each set is larger than the GPU's cache (the results give both), so every layer
reads its weights from GPU memory, as 48 sets would, and a step's time is set by `width` alone. No attention, no sampling:
both would only make the step longer, and the lookup easier to hide. With width 0 there is nothing of this: a forward is
the lookup alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from world import EMBED_DIM, VOCAB_SIZE

HIDDEN = EMBED_DIM  # as in the released model
LAYERS = 48
PLE_LAYER = 1
SETS = 2


class Lookup(Protocol):
    """The table's part of a forward. Both calls may be captured in a graph."""

    def begin(self, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor) -> None:
        """At the beginning of the forward, as soon as ids are known."""

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Where the rows are needed: bf16 [tokens, EMBED_DIM], or None where there is no table."""


class Decoder:
    """See the module. width: columns of `up`, rows of `down`."""

    def __init__(self, width: int, device: torch.device, vocab_size: int = VOCAB_SIZE) -> None:
        generator = torch.Generator(device).manual_seed(3)

        def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
            out = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
            return out.normal_(std=scale, generator=generator)

        self.width = width
        self.embedding = normal(vocab_size if width else 0, HIDDEN, 1.0)
        self.layers = LAYERS if width else PLE_LAYER + 1
        self.weights = [
            (normal(HIDDEN, width, HIDDEN**-0.5), normal(width, HIDDEN, max(1, width) ** -0.5)) for _ in range(SETS)
        ]

    @property
    def layer_bytes(self) -> int:
        """Weights that one layer reads."""
        return 2 * HIDDEN * self.width * 2

    def forward(
        self, lookup: Lookup, ids: torch.Tensor, starts: torch.Tensor, context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden [tokens, HIDDEN], the table's rows) of ids [tokens] of requests that begin at starts [requests + 1]."""
        lookup.begin(ids, starts, context)
        if self.width:
            hidden = torch.nn.functional.embedding(ids, self.embedding)
        else:
            hidden = torch.zeros((ids.shape[0], HIDDEN), dtype=torch.bfloat16, device=ids.device)
        rows = None
        for layer in range(self.layers):
            if layer == PLE_LAYER:
                rows = lookup.take(hidden)
                if rows is not None:
                    hidden = hidden + rows
            if not self.width:
                continue
            up, down = self.weights[layer % SETS]
            hidden = torch.addmm(hidden, torch.nn.functional.rms_norm(hidden, (HIDDEN,)) @ up, down)
        return hidden, rows


def width_for(step_s: float, measure: Callable[[int], float], trials: tuple[int, int] = (8192, 32768)) -> int:
    """The width with which a step takes `step_s`: a step is a fixed part and one that grows with the width.

    measure: seconds of a step with a width. Rounded to 256, at least 256.
    """
    narrow, wide = trials
    first, second = measure(narrow), measure(wide)
    slope = (second - first) / (wide - narrow)
    return max(256, round((narrow + (step_s - first) / slope) / 256) * 256)
