"""A checkpoint that holds nothing but one FP8 n-gram table of random bytes, written without torch.

The rows are the same for every size of file, whatever wrote them: the generator is seeded per block of rows, so a table
can be rewritten or compared without keeping a copy.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from ple_offload.families.qwen_ple import QwenPle

ROW_DIM = 160
ROWS_PER_TOKEN = 16
SCALE = 0.0123
VOCAB_SIZE, EOS = 248_320, 248_044
LAYER = 1
BLOCK_ROWS = 100_000  # rows generated at once: 16 MB


@dataclass(frozen=True)
class Made:
    """A written checkpoint; `raw` holds the table's bytes alone, for baselines that want one plain file."""

    folder: Path
    raw: Path
    num_rows: int
    shards: int

    @property
    def table_bytes(self) -> int:
        return self.num_rows * ROW_DIM

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def make(folder: Path, rows_wanted: int, shards: int) -> Made:
    """Write (or find, when the same one is there already) a table of about `rows_wanted` rows in `shards` files."""
    config = {
        "model_type": "qwen4_exp_text",
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS,
        "hidden_size": ROWS_PER_TOKEN * ROW_DIM,
        "num_hidden_layers": 4,
        "ple_layer_ids": [LAYER + 1],
        "ple_embed_dim": ROWS_PER_TOKEN * ROW_DIM,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": rows_wanted // ROWS_PER_TOKEN,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
    }
    rule = QwenPle.from_text_config(config, 0)
    folder = folder / f"table-{rule.num_rows}x{ROW_DIM}-{shards}"
    made = Made(folder, folder / "rows.raw", rule.num_rows, shards)
    if (folder / "config.json").exists():  # written last: the folder is complete
        return made
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"model.layers.{LAYER}.ple.ple_embedding."
    shard_rows = math.ceil(made.num_rows / shards)
    index: dict[str, str] = {}
    with made.raw.open("wb") as raw:
        for shard in range(shards):
            first = min(shard * shard_rows, made.num_rows)
            count = min(shard_rows, made.num_rows - first)
            tensors = {f"{prefix}ngram_embedding.shard_{shard}.weight": ("F8_E4M3", (count, ROW_DIM), b"")}
            if shard == 0:
                small = {
                    "ngram_embedding.weight_scale": ("BF16", np.array([SCALE], ml_dtypes.bfloat16)),
                    "layer_multipliers": ("I64", rule.multipliers),
                    "ngram_heads_vocab_sizes": ("I64", rule.head_sizes),
                    "ngram_heads_offsets": ("I64", rule.head_offsets),
                }
                tensors |= {prefix + key: (kind, array.shape, array.tobytes()) for key, (kind, array) in small.items()}
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            index |= dict.fromkeys(tensors, name)
            with (folder / name).open("wb") as file:
                file.write(_header(tensors, count * ROW_DIM))
                for start in range(first, first + count, BLOCK_ROWS):
                    rows = _random_rows(start, min(BLOCK_ROWS, first + count - start))
                    file.write(rows)
                    raw.write(rows)
                for _, _, data in tensors.values():
                    file.write(data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return made


def _random_rows(first_row: int, count: int) -> bytes:
    return np.random.default_rng(first_row).bytes(count * ROW_DIM)


def _header(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], table_bytes: int) -> bytes:
    """The safetensors header; the table comes first, its bytes are written by the caller."""
    header: dict[str, object] = {}
    end = 0
    for name, (kind, shape, data) in tensors.items():
        start, end = end, end + (len(data) or table_bytes)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
