"""A checkpoint of a few kilobytes, written without torch, in any of the layouts that are accepted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ple_offload.families.qwen_ple import QwenPle
from support import write_safetensors

# 4 heads of 23, 29, 31, 37 rows = 120 rows of 16 elements; PLE on decoder layer 1, counted from 0
CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 1000,
    "eos_token_id": 7,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 8,
    "seed": 1234,
}
ROWS = 120
ROW_DIM = 16
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}

Tensors = dict[str, tuple[str, "np.ndarray | bytes", tuple[int, ...]]]


def family(layer_index: int) -> QwenPle:
    return QwenPle.from_text_config(CONFIG, layer_index)


def table_bytes(rows: int, dtype: str, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(rows * ROW_DIM * ITEM_BYTES[dtype])


def tensors(
    *,
    dtype: str = "BF16",
    cuts: Sequence[int] | None = (50,),
    layer: int = 1,
    layer_index: int = 0,
    prefix: str = "model.",
    constants: bool = True,
    data: bytes | None = None,
) -> Tensors:
    """The tensors of one table and a neighbour. `cuts`: rows where a new shard begins; None: one tensor."""
    rule = family(layer_index)
    rows = rule.num_rows
    row_bytes = ROW_DIM * ITEM_BYTES[dtype]
    data = table_bytes(rows, dtype) if data is None else data
    module = f"{prefix}layers.{layer}.ple."
    table = f"{module}ple_embedding.ngram_embedding"
    made: Tensors = {f"{module}conv1d.weight": ("BF16", bytes(2 * 8), (2, 1, 4))}
    if cuts is None:
        made[f"{table}.weight"] = (dtype, data, (rows, ROW_DIM))
    else:
        edges = [0, *cuts, rows]
        for i, (first, last) in enumerate(itertools.pairwise(edges)):
            part = data[first * row_bytes : last * row_bytes]
            made[f"{table}.shard_{i}.weight"] = (dtype, part, (last - first, ROW_DIM))
    if dtype == "F8_E4M3":
        made[f"{table}.weight_scale"] = ("BF16", np.array([0.5], ml_dtypes.bfloat16), (1,))
    if constants:
        stored = {
            "layer_multipliers": rule.multipliers,
            "ngram_heads_vocab_sizes": rule.head_sizes,
            "ngram_heads_offsets": rule.head_offsets,
        }
        for name, values in stored.items():
            made[f"{module}ple_embedding.{name}"] = ("I64", values, values.shape)
    return made


def write(
    folder: Path,
    files: Mapping[str, Tensors],
    *,
    config: Mapping[str, Any] = CONFIG,
    index: bool = False,
) -> Path:
    """Write config.json, the files, and an index that names every tensor's file if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        write_safetensors(folder / name, content)
    if index:
        places = {name: file for file, content in files.items() for name in content}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def write_default(folder: Path, **options: Any) -> Path:
    """Two shards in two files with an index; `options` go to `tensors`."""
    every = tensors(**options)
    first = {name: tensor for i, (name, tensor) in enumerate(every.items()) if i < 2}
    second = {name: tensor for name, tensor in every.items() if name not in first}
    return write(folder, {"a.safetensors": first, "b.safetensors": second}, index=True)
