"""The tensors a step's inputs come from, checked once: device, dtype, rank and shape, each against its shared buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ple_offload.connector.base import Inputs
from ple_offload.connector.config import ConnectorConfig
from ple_offload.errors import UsageError

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sources:
    """Where `prepare_forward` reads. Request "tokens": the first three; "rows": `row_numbers` per decoder layer.

    input_ids [>= max_num_tokens], query_start_loc [>= max_num_reqs + 1], ngram_context [>= max_num_reqs, context_len],
    row_numbers[layer] [>= max_num_tokens, rows_per_token]; int32 or int64.
    """

    input_ids: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    ngram_context: torch.Tensor | None = None
    row_numbers: Mapping[int, torch.Tensor] | None = None

    def check(
        self, config: ConnectorConfig, context_len: int, rows_per_token: Mapping[int, int], device: torch.device
    ) -> None:
        """Raise UsageError naming the source, what was expected and what was given; all on the CPU, or all on `device`."""
        tokens = {
            "input_ids": (self.input_ids, (config.max_num_tokens,)),
            "query_start_loc": (self.query_start_loc, (config.max_num_reqs + 1,)),
            "ngram_context": (self.ngram_context, (config.max_num_reqs, context_len)),
        }
        if config.request == "rows":
            for name, (source, _) in tokens.items():
                if source is not None:
                    raise UsageError(f"{name}: expected None with request 'rows', found a tensor.")
            given = self.row_numbers or {}
            if set(given) != set(rows_per_token):
                raise UsageError(
                    f"row_numbers: expected one source for each of layers {sorted(rows_per_token)}, found {sorted(given)}."
                )
            for layer, source in given.items():
                _check(f"row_numbers[{layer}]", source, (config.max_num_tokens, rows_per_token[layer]), device)
        else:
            if self.row_numbers is not None:
                raise UsageError("row_numbers: expected None with request 'tokens', found sources.")
            if context_len == 0 and self.ngram_context is not None:
                raise UsageError("ngram_context: expected None for a family that does not look back, found a tensor.")
            for name, (source, shape) in tokens.items():
                if name != "ngram_context" or context_len:
                    _check(name, source, shape, device)
        places = sorted({str(source.device) for source in self.given()})
        if len(places) > 1:
            raise UsageError(f"sources: expected all on one device, found {' and '.join(places)}.")

    def given(self) -> list[torch.Tensor]:
        own = (self.input_ids, self.query_start_loc, self.ngram_context)
        return [source for source in own if source is not None] + list((self.row_numbers or {}).values())

    def on_cpu(self) -> bool:
        """Whether the host reads them; also where none is given, as long as that is not checked."""
        return all(source.device.type == "cpu" for source in self.given())

    def arrays(self, layers: Sequence[int]) -> Inputs:
        """NumPy views of CPU sources: they cost a tenth of slicing tensors, and follow what is written to the tensors."""
        nothing = torch.empty((0,), dtype=torch.int64)
        own = [nothing if source is None else source for source in (self.input_ids, self.query_start_loc)]
        context = torch.empty((1 << 22, 0), dtype=torch.int64) if self.ngram_context is None else self.ngram_context
        rows = [(self.row_numbers or {})[layer].numpy() for layer in layers] if self.row_numbers else []
        return Inputs(own[0].numpy(), own[1].numpy(), context.numpy(), rows)


def _check(name: str, source: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    where = "CPU tensor" if device.type == "cpu" else f"contiguous tensor on the CPU or {device}"
    wanted = f"a {where} of int32 or int64 of shape {' x '.join([f'>= {shape[0]}', *map(str, shape[1:])])}"
    if source is None:
        raise UsageError(f"{name}: expected {wanted}, found None.")
    fits = (
        (source.device.type == "cpu" or source.device == device)
        and source.dtype in INTEGERS
        and source.dim() == len(shape)
        and source.shape[0] >= shape[0]
        and tuple(source.shape[1:]) == shape[1:]
        and (source.device.type == "cpu" or source.is_contiguous())
    )
    if not fits:
        raise UsageError(
            f"{name}: expected {wanted}, found {source.dtype} of shape {list(source.shape)} on {source.device}."
        )
