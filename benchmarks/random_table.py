"""A checkpoint that holds nothing but one FP8 n-gram table of random bytes, written without torch.

The table comes first in each file and starts at a page; every shard but the last holds whole pages. So the shards can be
mapped one behind the other, as one tensor, for baselines that cannot read several.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from ple_offload.families.qwen_ple import QwenPle

ROW_DIM = 160
ROWS_PER_TOKEN = 16
SCALE = 0.0123
VOCAB_SIZE, EOS = 248_320, 248_044
LAYER = 1
BLOCK_ROWS = 100_000  # rows generated at once: 16 MB
HEADER_BYTES = 4096
PAGE_ROWS = 128  # 128 rows of 160 bytes are 5 pages


@dataclass(frozen=True)
class Made:
    """A written checkpoint; shard i holds rows from i * shard_rows on, HEADER_BYTES into its file."""

    folder: Path
    num_rows: int
    shards: int

    @property
    def shard_rows(self) -> int:
        return -(-self.num_rows // self.shards // PAGE_ROWS) * PAGE_ROWS

    @property
    def table_bytes(self) -> int:
        return self.num_rows * ROW_DIM

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def make(
    folder: Path,
    rows_wanted: int,
    shards: int,
    write_rows: Callable[[BinaryIO, int, int], None] | None = None,
) -> Made:
    """Write (or find, when the same one is there already) a table of about `rows_wanted` rows in `shards` files.

    write_rows: writes the bytes of `count` rows from row `first` on where the file stands; random ones by default.
    """
    write_rows = write_rows or _write_random
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
    made = Made(folder, rule.num_rows, shards)
    if (folder / "config.json").exists():  # written last: the folder is complete
        return made
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"model.layers.{LAYER}.ple.ple_embedding."
    index: dict[str, str] = {}
    for shard in range(shards):
        first = shard * made.shard_rows
        count = min(made.shard_rows, made.num_rows - first)
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
            write_rows(file, first, count)
            for _, _, data in tensors.values():
                file.write(data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return made


def _write_random(file: BinaryIO, first: int, count: int) -> None:
    for start in range(first, first + count, BLOCK_ROWS):
        file.write(np.random.default_rng(start).bytes(min(BLOCK_ROWS, first + count - start) * ROW_DIM))


def _header(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], table_bytes: int) -> bytes:
    """The safetensors header, HEADER_BYTES long; the table comes first, its bytes are written by the caller."""
    header: dict[str, object] = {}
    end = 0
    for name, (kind, shape, data) in tensors.items():
        start, end = end, end + (len(data) or table_bytes)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (HEADER_BYTES - 8 - len(text))
    return struct.pack("<Q", len(text)) + text
