"""A rank of an engine for tests: its model, sources and connector, and what its steps must deliver by the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from checkpoint import tiny
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.layer import PleOffloadLayer
from ple_offload.spec import CheckpointSpec, TableSpec, inspect

CODES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def finite_bytes(rows: int, dtype: str, seed: int) -> bytes:
    """Rows without NaN or infinity, so that results compare byte by byte and NaN always means a failed step."""
    values = np.random.default_rng(seed).standard_normal(rows * tiny.ROW_DIM)
    return values.astype(CODES[dtype]).tobytes()


@dataclass(frozen=True)
class Made:
    """A checkpoint and the bytes of its tables by decoder layer."""

    path: Path
    raw: Mapping[int, bytes]

    @property
    def spec(self) -> CheckpointSpec:
        return inspect(self.path)


def make(folder: Path, dtype: str = "BF16", num_layers: int = 1, seed: int = 0, zero: bool = False) -> Made:
    """A tiny checkpoint with PLE on decoder layers 1, 3, ... in one file for each."""
    layers = [1 + 2 * i for i in range(num_layers)]
    raw, files = {}, {}
    for i, layer in enumerate(layers):
        raw[layer] = finite_bytes(tiny.family(i).num_rows, dtype, seed + i)
        stored = bytes(len(raw[layer])) if zero else raw[layer]
        files[f"{layer}.safetensors"] = tiny.tensors(dtype=dtype, layer=layer, layer_index=i, data=stored)
    config = {**tiny.CONFIG, "ple_layer_ids": [layer + 1 for layer in layers]}
    return Made(tiny.write(folder, files, config=config), raw)


@dataclass(frozen=True)
class Inputs:
    """A ragged step, and how many rows the model's input has (`padded` >= tokens)."""

    ids: np.ndarray
    starts: np.ndarray
    context: np.ndarray
    padded: int

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])


def random_inputs(
    rng: np.random.Generator,
    tokens: int,
    reqs: int,
    *,
    padded: int | None = None,
    vocab: int = 1000,
    context_len: int = 2,
) -> Inputs:
    """`reqs` requests with `tokens` tokens among them; some have none. One id in ten is the EOS id 7."""
    cuts = np.sort(rng.integers(0, tokens + 1, max(reqs - 1, 0)))
    starts = np.array([0, *cuts, tokens][: reqs + 1] if reqs else [0], np.int64)
    ids = rng.integers(0, vocab, tokens)
    ids[rng.random(tokens) < 0.1] = 7
    return Inputs(ids, starts, rng.integers(0, vocab, (reqs, context_len)), tokens if padded is None else padded)


def reference(table: TableSpec, raw: bytes, inputs: Inputs, dtype: str) -> np.ndarray:
    """Values [padded, embed_dim] by the specification, zeros behind the tokens; plain NumPy, nothing compiled."""
    rows = table.family.row_numbers_reference(inputs.ids, inputs.starts, inputs.context)
    stored = np.frombuffer(raw, np.uint8).reshape(-1, table.row_bytes)
    values = table.format.decode_reference(stored[rows], dtype).reshape(inputs.tokens, table.embed_dim)
    return np.concatenate([values, np.zeros((inputs.padded - inputs.tokens, table.embed_dim), values.dtype)])


def same_bytes(found: torch.Tensor, expected: np.ndarray) -> bool:
    return found.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()


class Rank:
    """One rank: a model of PLE layers, sources of the full size, and a connector."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        raw: Mapping[int, bytes],
        address: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        width: torch.dtype = torch.int64,
        opened: Mapping[int, Any] | None = None,
        max_num_tokens: int = 64,
        max_num_reqs: int = 8,
        **options: Any,
    ) -> None:
        options.setdefault("staging", "async")
        self.config = ConnectorConfig(max_num_tokens, max_num_reqs, **options)
        self.tables, self.raw, self.dtype = list(tables), raw, dtype
        self.layers = [PleOffloadLayer(table.layer, table.embed_dim, dtype) for table in tables]
        self.model = torch.nn.ModuleList(self.layers)
        self.ids = torch.zeros(max_num_tokens, dtype=width)
        self.starts = torch.zeros(max_num_reqs + 1, dtype=width)
        self.context = torch.zeros((max_num_reqs, tables[0].family.context_len), dtype=width)
        self.rows = {t.layer: torch.zeros((max_num_tokens, t.rows_per_token), dtype=width) for t in tables}
        if self.config.request == "rows":
            sources: dict[str, Any] = {"row_numbers_source": self.rows}
        else:
            sources = {"input_ids_source": self.ids, "query_start_loc_source": self.starts}
            if self.context.shape[1]:
                sources["ngram_context_source"] = self.context
        self.connector = PleOffloadConnector(self.config, self.model, "cpu", address, tables=opened, **sources)

    @classmethod
    def of(cls, made: Made, address: str, **options: Any) -> Rank:
        """Of every layer of a checkpoint; a worker finds it by the name of its folder."""
        options.setdefault("checkpoint", made.path.name)
        return cls(made.spec.tables, made.raw, address, **options)

    def load(self, inputs: Inputs) -> None:
        """Write the sources: what is not the step's own is -1, which no lookup accepts."""
        for source in (self.ids, self.starts, self.context, *self.rows.values()):
            source.fill_(-1)
        self.ids[: len(inputs.ids)] = torch.from_numpy(inputs.ids)
        self.starts[: len(inputs.starts)] = torch.from_numpy(inputs.starts)
        self.context[: len(inputs.context)] = torch.from_numpy(inputs.context)
        if self.config.request == "rows":
            for table in self.tables:
                numbers = table.family.row_numbers_reference(inputs.ids, inputs.starts, inputs.context)
                self.rows[table.layer][: inputs.tokens] = torch.from_numpy(numbers)

    def prepare(self, inputs: Inputs) -> int:
        self.load(inputs)
        tokens = inputs.tokens if self.config.request == "rows" else inputs.padded
        return self.connector.prepare_forward(len(inputs.starts) - 1, tokens)

    def forward(self, padded: int) -> list[torch.Tensor]:
        hidden = torch.zeros(padded, 8)
        return [layer(hidden, self.ids[:padded]) for layer in self.layers]

    def run(self, inputs: Inputs) -> list[torch.Tensor]:
        """A whole step, its rows not yet compared."""
        step = self.prepare(inputs)
        found = self.forward(inputs.padded)
        self.connector.check(step)
        self.connector.release_outputs()
        return found

    def expected(self, inputs: Inputs) -> list[np.ndarray]:
        return [reference(table, self.raw[table.layer], inputs, NAMES[self.dtype]) for table in self.tables]

    def right(self, found: Sequence[torch.Tensor], inputs: Inputs) -> bool:
        pairs = list(zip(found, self.expected(inputs), strict=True))
        shapes = all(tuple(f.shape) == e.shape and f.dtype == self.dtype for f, e in pairs)
        return shapes and all(same_bytes(f, e) for f, e in pairs)

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def all_nan(found: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isnan(values.float()).all()) for values in found)
