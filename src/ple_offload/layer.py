"""The layer a model has in the place of its table, and the two ops that make its wait opaque to compilers.

    token = start(ids, query_start_loc, ngram_context, layer)    where a route begins its work inside the forward
    rows  = finish(token, hidden, layer)                         [hidden.shape[0], embed_dim], a fresh tensor

`layer` is the number of a `PleOffloadLayer` of this process; the connector that serves it is found in a registry when the
op runs, so nothing of the table or the connector becomes part of a graph. The token ties the two together: a compiler
drops an op whose result nobody uses and may reorder one that only mutates, but `finish` needs the token of `start`.
"""

from __future__ import annotations

import itertools

import torch

from ple_offload.connector import registry

_numbers = itertools.count(1)


_library = torch.library.Library("ple_offload", "DEF")
_library.define("start(Tensor ids, Tensor? query_start_loc, Tensor? ngram_context, int layer) -> Tensor")
_library.define("finish(Tensor token, Tensor hidden, int layer, int embed_dim, ScalarType dtype) -> Tensor")


def _start(
    ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None, layer: int
) -> torch.Tensor:
    """Begin a layer's lookup; returns a token. Where the step was begun by `prepare_forward`, this only orders."""
    connector, index = registry.find(layer)
    connector.start(index, ids, query_start_loc, ngram_context)
    return torch.empty(1, dtype=torch.int64, device=ids.device)


def _start_fake(
    ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None, layer: int
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device=ids.device)


def _finish(token: torch.Tensor, hidden: torch.Tensor, layer: int, embed_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Wait for a layer's rows of its next step, within the connector's limits; NaN when they do not come."""
    connector, index = registry.find(layer)
    rows: torch.Tensor = connector.deliver(index, hidden.shape[0])
    return rows


def _finish_fake(
    token: torch.Tensor, hidden: torch.Tensor, layer: int, embed_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], embed_dim), dtype=dtype)


# torch.library.custom_op would do the same, and cost 60 us more a call (docs/LOG.md)
_library.impl("start", _start, "CompositeExplicitAutograd")
_library.impl("finish", _finish, "CompositeExplicitAutograd")
# rows are constants: autograd has nothing to do here, also where `hidden` wants gradients
_library.impl("start", torch.library.fallthrough_kernel, "Autograd")
_library.impl("finish", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("ple_offload::start", _start_fake, lib=_library)
torch.library.register_fake("ple_offload::finish", _finish_fake, lib=_library)
start = torch.ops.ple_offload.start
finish = torch.ops.ple_offload.finish


class PleOffloadLayer(torch.nn.Module):
    """A PLE layer's place in a model: never allocates the table, has no parameters, delivers its rows.

    layer: the decoder layer (from 0) whose table it stands for. embed_dim: elements a token receives (all its rows).
    dtype: of the values.
    """

    def __init__(self, layer: int, embed_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layer = layer
        self.embed_dim = embed_dim
        self.dtype = dtype
        self.number = next(_numbers)

    def get_offload_output_dtype(self) -> torch.dtype:
        return self.dtype

    def get_offload_output_dim(self) -> int:
        return self.embed_dim

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        ngram_context: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows [hidden.shape[0], embed_dim] of the step that was prepared; raises in eager mode when they did not come."""
        token = start(ids, query_start_loc, ngram_context, self.number)
        rows: torch.Tensor = finish(token, hidden, self.number, self.embed_dim, self.dtype)
        if not torch.compiler.is_compiling():
            registry.find(self.number)[0].raise_unreported()
        return rows
