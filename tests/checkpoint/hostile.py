"""Checkpoints that must be refused: one builder per attack or accident, each with what the message must say.

    for attack in ATTACKS: attack.build(empty_folder)   # a checkpoint that is valid but for the one thing

`python tests/checkpoint/hostile.py FOLDER` writes them all, one folder each, to try other readers on.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoint import tiny
from support import write_safetensors

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
MODULE = "model.layers.1.ple.ple_embedding"


@dataclass(frozen=True)
class Attack:
    name: str
    build: Callable[[Path], None]
    says: tuple[str, ...]  # parts of the message, each of which must be there


ATTACKS: list[Attack] = []


def attack(*says: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(build: Callable[[Path], None]) -> Callable[[Path], None]:
        ATTACKS.append(Attack(build.__name__, build, says))
        return build

    return register


def _write_one(folder: Path, tensors: tiny.Tensors, **config: Any) -> None:
    tiny.write(folder, {"m.safetensors": tensors}, config={**tiny.CONFIG, **config})


def _write_raw(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    tiny.write(folder, {})
    length = len(header) if length is None else length
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", length) + header + data)


def _write_entry(folder: Path, data: bytes = bytes(8), **changes: Any) -> None:
    """A file with one tensor "t", I64 [1], some of its entry changed; None removes a key."""
    entry = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8], **changes}
    entry = {key: value for key, value in entry.items() if value is not None}
    _write_raw(folder, json.dumps({"t": entry}).encode(), data)


# --- the file ---


@attack("m.safetensors", "found 0 bytes")
def empty_file(folder: Path) -> None:
    tiny.write(folder, {})
    (folder / "m.safetensors").touch()


@attack("m.safetensors", "header length", "found 1,000")
def header_longer_than_file(folder: Path) -> None:
    _write_raw(folder, b"{}", length=1000)


@attack("header length", "found 18,446,744,073,709,551,615")
def header_length_of_all_ones(folder: Path) -> None:
    _write_raw(folder, b"{}", length=2**64 - 1)


@attack("header length", "allows 100,000,000")
def enormous_header(folder: Path) -> None:
    _write_raw(folder, b"{", length=150_000_000)
    os.truncate(folder / "m.safetensors", 200_000_000)  # sparse


@attack("a.safetensors", "expected 1,", "found 1,", "download it again")
def cut_short(folder: Path) -> None:
    tiny.write_default(folder)
    os.truncate(folder / "a.safetensors", (folder / "a.safetensors").stat().st_size - 1)


@attack("a.safetensors", "where the header's last tensor ends")
def bytes_after_the_end(folder: Path) -> None:
    tiny.write_default(folder)
    with (folder / "a.safetensors").open("ab") as file:
        file.write(b"x")


@attack("m.safetensors", "Git LFS pointer", "git lfs pull")
def git_lfs_pointer(folder: Path) -> None:
    tiny.write(folder, {})
    (folder / "m.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@attack("m.safetensors", "regular file", "'p'")
def a_pipe(folder: Path) -> None:
    """Opening it would wait for a writer for ever."""
    tiny.write(folder, {})
    os.mkfifo(folder / "m.safetensors")


@attack("m.safetensors", "regular file", "'d'")
def a_folder(folder: Path) -> None:
    tiny.write(folder, {})
    (folder / "m.safetensors").mkdir()


@attack("m.safetensors", "cannot be opened", "No such file")
def a_dangling_link(folder: Path) -> None:
    tiny.write(folder, {})
    (folder / "m.safetensors").symlink_to(folder / "gone")


@attack("m.safetensors", "cannot be opened", "symbolic links")
def a_link_to_itself(folder: Path) -> None:
    tiny.write(folder, {})
    (folder / "m.safetensors").symlink_to("m.safetensors")


# --- the header's text ---


@attack("header", "begin with '{'")
def not_json(folder: Path) -> None:
    _write_raw(folder, b"PK\x03\x04 this is something else")


@attack("header", "cannot be read", "Expecting")
def broken_json(folder: Path) -> None:
    _write_raw(folder, b'{"t": {')


@attack("header", "utf-8")
def not_utf8(folder: Path) -> None:
    _write_raw(folder, b'{"\xff": 1}')


@attack("tensor '__metadata__x'", "expected dtype, shape and data_offsets", "found 1")
def entry_is_a_number(folder: Path) -> None:
    _write_raw(folder, b'{"__metadata__x": 1}')


@attack("key 't' appears twice")
def equal_names(folder: Path) -> None:
    entry = b'"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    _write_raw(folder, b"{" + entry + b"," + entry + b"}")


@attack("key 'shape' appears twice")
def equal_keys_in_an_entry(folder: Path) -> None:
    _write_raw(folder, b'{"t":{"dtype":"U8","shape":[0],"shape":[1],"data_offsets":[0,0]}}')


@attack("recursion")
def nested_a_million_deep(folder: Path) -> None:
    _write_raw(folder, b'{"t":' + b"[" * 1_000_000)


@attack("JSON values")
def forty_megabytes_of_brackets(folder: Path) -> None:
    _write_raw(folder, b'{"t":[' + b"[]," * 13_000_000 + b"[]]}")


@attack("cannot be read", "digits")
def a_number_of_a_million_digits(folder: Path) -> None:
    _write_raw(folder, b'{"t":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,0]}}')


@attack("NaN")
def not_a_number(folder: Path) -> None:
    _write_raw(folder, b'{"t":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}')


@attack("characters)")
def a_name_of_a_million_characters(folder: Path) -> None:
    """Must not become a message of a million characters."""
    _write_raw(folder, json.dumps({"x" * 1_000_000: 1}).encode())


@attack(r"'\udc80'")
def a_name_that_cannot_be_printed(folder: Path) -> None:
    _write_raw(folder, b'{"\\udc80": 1}')


# --- one tensor's entry ---


@attack("'t'", "expected dtype, shape and data_offsets", "['data_offsets', 'dtype']")
def no_shape(folder: Path) -> None:
    _write_entry(folder, shape=None)


@attack("'t'", "expected dtype, shape and data_offsets", "'strides'")
def an_unknown_key(folder: Path) -> None:
    _write_entry(folder, strides=[8])


@attack("'t'", "dtype", "expected a string", "found 64")
def dtype_is_a_number(folder: Path) -> None:
    _write_entry(folder, dtype=64)


@attack("'t'", "shape", "found [-1]")
def negative_shape(folder: Path) -> None:
    _write_entry(folder, shape=[-1])


@attack("'t'", "shape", "found [-1, -1]")
def two_negative_sizes(folder: Path) -> None:
    _write_entry(folder, shape=[-1, -1])


@attack("'t'", "shape", "found [True]")
def boolean_shape(folder: Path) -> None:
    _write_entry(folder, shape=[True])


@attack("'t'", "shape", "found [1.0]")
def float_shape(folder: Path) -> None:
    _write_entry(folder, shape=[1.0])


@attack("'t'", "shape", "found 1")
def shape_is_a_number(folder: Path) -> None:
    _write_entry(folder, shape=1)


@attack("'t'", "shape", "9223372036854775808")
def shape_past_63_bits(folder: Path) -> None:
    _write_entry(folder, shape=[2**63])


@attack("'t'", "expected", "bytes for I64", "found 8")
def product_past_64_bits(folder: Path) -> None:
    """2**32 * 2**32 + 1 elements: 1 element for who multiplies in 64 bits."""
    _write_entry(folder, shape=[2**32 + 1, 2**32 + 1, 2**62 + 1])


@attack("'t'", "at most 64")
def a_million_dimensions(folder: Path) -> None:
    _write_entry(folder, shape=[2**62] * 100_000)


@attack("'t'", "data_offsets", "found [8, 0]")
def reversed_offsets(folder: Path) -> None:
    _write_entry(folder, data_offsets=[8, 0])


@attack("'t'", "data_offsets", "found [-8, 0]")
def negative_offsets(folder: Path) -> None:
    _write_entry(folder, data_offsets=[-8, 0])


@attack("'t'", "data_offsets", "found [0, 8, 8]")
def three_offsets(folder: Path) -> None:
    _write_entry(folder, data_offsets=[0, 8, 8])


@attack("'t'", "data_offsets", "found [False, 8]")
def boolean_offset(folder: Path) -> None:
    _write_entry(folder, data_offsets=[False, 8])


@attack("'t'", "expected 16 bytes for I64 [2]", "found 8")
def size_and_shape_differ(folder: Path) -> None:
    _write_entry(folder, shape=[2])


@attack("'t'", "expected 1.5 bytes for F4 [3]", "found 2")
def half_a_byte(folder: Path) -> None:
    _write_entry(folder, bytes(2), dtype="F4", shape=[3], data_offsets=[0, 2])


@attack("m.safetensors", "expected 88 bytes", "found 80")
def offsets_past_the_file(folder: Path) -> None:
    header = json.dumps({"t": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    _write_raw(folder, header.ljust(64), bytes(8))


@attack("'b'", "overlaps", "begin at byte", "found")
def overlapping_tensors(folder: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
    }
    _write_raw(folder, json.dumps(header).encode(), bytes(12))


@attack("'b'", "overlaps")
def two_names_for_the_same_bytes(folder: Path) -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    _write_raw(folder, json.dumps({"a": entry, "b": entry}).encode(), bytes(8))


@attack("'b'", "gap")
def a_gap_between_tensors(folder: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
    }
    _write_raw(folder, json.dumps(header).encode(), bytes(12))


@attack("'t'", "gap")
def a_gap_before_the_first(folder: Path) -> None:
    _write_entry(folder, bytes(16), data_offsets=[8, 16])


@attack("'u'", "overlaps")
def unknown_dtype_that_overlaps(folder: Path) -> None:
    """A dtype nobody knows is no reason to believe its offsets."""
    header = {
        "t": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "u": {"dtype": "X9", "shape": [3], "data_offsets": [4, 12]},
    }
    _write_raw(folder, json.dumps(header).encode(), bytes(12))


# --- config.json and the index ---


def _write_config(folder: Path, text: str) -> None:
    tiny.write_default(folder)
    (folder / "config.json").write_text(text)


@attack("config.json", "cannot be opened")
def no_config(folder: Path) -> None:
    tiny.write_default(folder)
    (folder / "config.json").unlink()


@attack("config.json", "JSON object")
def config_is_no_json(folder: Path) -> None:
    _write_config(folder, "vocab_size: 1000")


@attack("config.json", "found list")
def config_is_a_list(folder: Path) -> None:
    _write_config(folder, "[]")


@attack("config.json", "at most")
def enormous_config(folder: Path) -> None:
    tiny.write_default(folder)
    os.truncate(folder / "config.json", 1 << 30)


@attack("config.json", "model_type", "llama")
def another_model(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "model_type": "llama"}))


@attack("config.json", "text_config", "list")
def text_config_is_a_list(folder: Path) -> None:
    _write_config(folder, json.dumps({"model_type": "qwen4_exp", "text_config": []}))


@attack("config.json", "ple_layer_ids", "nothing to offload")
def no_ple_layers(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "ple_layer_ids": []}))


@attack("config.json", "ple_layer_ids", "found [0]")
def ple_layer_zero(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "ple_layer_ids": [0]}))


@attack("config.json", "ple_layer_ids", "found [0, 0,")
def a_megabyte_of_layer_numbers(folder: Path) -> None:
    """Must not become a message of a megabyte."""
    _write_config(folder, json.dumps({**tiny.CONFIG, "ple_layer_ids": [0] * 300_000}))


@attack("config.json", "ngram_vocab_size_base", "found 1000000000000000000")
def primes_without_end(folder: Path) -> None:
    """Looking for primes of this size would take years."""
    _write_config(folder, json.dumps({**tiny.CONFIG, "ngram_vocab_size_base": 10**18}))


@attack("config.json", "model_type", "found ['qwen4_exp']")
def model_type_is_a_list(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "model_type": ["qwen4_exp"]}))


@attack("config.json", "ngram_size", "found 3.5")
def fractional_ngram_size(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "ngram_size": 3.5}))


@attack("config.json", "ple_embed_dim", "found 63")
def width_that_does_not_divide(folder: Path) -> None:
    _write_config(folder, json.dumps({**tiny.CONFIG, "ple_embed_dim": 63}))


@attack("safetensors", "found none")
def no_tensor_files(folder: Path) -> None:
    tiny.write(folder, {})


def _write_index(folder: Path, file: Any, tensor: str = f"{TABLE}.shard_0.weight") -> None:
    tiny.write_default(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][tensor] = file
    index.write_text(json.dumps(content))


@attack("index.json", "c.safetensors", "found no such file", "not complete")
def index_names_a_missing_file(folder: Path) -> None:
    _write_index(folder, "c.safetensors")


@attack("index.json", "shard_0.weight", "inside the folder", "../a.safetensors")
def index_leaves_the_folder(folder: Path) -> None:
    _write_index(folder, "../a.safetensors")


@attack("index.json", "shard_0.weight", "inside the folder", "sub/../../a.safetensors")
def index_leaves_the_folder_later(folder: Path) -> None:
    _write_index(folder, "sub/../../a.safetensors")


@attack("index.json", "shard_0.weight", "inside the folder", "/etc/a.safetensors")
def index_names_an_absolute_path(folder: Path) -> None:
    _write_index(folder, "/etc/a.safetensors")


@attack("index.json", "shard_0.weight", "inside the folder", "config.json")
def index_names_another_kind_of_file(folder: Path) -> None:
    _write_index(folder, "config.json")


@attack("index.json", "shard_0.weight", "inside the folder", r"a\x00.safetensors")
def index_names_a_file_with_a_nul(folder: Path) -> None:
    _write_index(folder, "a\0.safetensors")


@attack("index.json", "shard_0.weight", "inside the folder", "found 3")
def index_file_is_a_number(folder: Path) -> None:
    _write_index(folder, 3)


@attack("b.safetensors", "shard_0.weight", "expected by the index", "not found in the file")
def index_names_the_wrong_file(folder: Path) -> None:
    _write_index(folder, "b.safetensors")


@attack("a.safetensors", "shard_7.weight", "expected by the index")
def index_names_a_shard_that_is_nowhere(folder: Path) -> None:
    _write_index(folder, "a.safetensors", f"{TABLE}.shard_7.weight")


@attack("index.json", "weight_map", "found None")
def index_without_weight_map(folder: Path) -> None:
    tiny.write_default(folder)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


@attack("one index", "x.safetensors.index.json", "y.safetensors.index.json")
def two_indices(folder: Path) -> None:
    tiny.write_default(folder)
    index = folder / "model.safetensors.index.json"
    for name in ("x", "y"):
        (folder / f"{name}.safetensors.index.json").write_text(index.read_text())
    index.unlink()


# --- the table ---


@attack("ngram_embedding", "found none in 1 file", "Accepted are")
def no_table(folder: Path) -> None:
    _write_one(folder, {"model.embed_tokens.weight": ("BF16", bytes(4), (2, 1))})


@attack("ngram_embedding", "found none in 1 file", "leaves out b.safetensors")
def table_left_out_of_the_index(folder: Path) -> None:
    files = {"a.safetensors": {"t": ("U8", b"1", (1,))}}
    tiny.write(folder, files, index=True)  # type: ignore[arg-type]
    write_safetensors(folder / "b.safetensors", tiny.tensors())


@attack("ngram_embedding", "layers.2.", "found none")
def table_of_another_layer(folder: Path) -> None:
    _write_one(folder, tiny.tensors(), ple_layer_ids=[3])


@attack("ngram_embedding", "found none", "layers.1.")
def layer_number_that_only_ends_alike(folder: Path) -> None:
    _write_one(folder, tiny.tensors(prefix="model.my"))


@attack("expected it once", "'model.layers.1.", "'other.layers.1.")
def two_prefixes(folder: Path) -> None:
    _write_one(folder, {**tiny.tensors(), **tiny.tensors(prefix="other.")})


@attack("shard_1.weight", "shard_2", "incomplete")
def missing_shard(folder: Path) -> None:
    tensors = tiny.tensors(cuts=(40, 80))
    del tensors[f"{TABLE}.shard_1.weight"]
    _write_one(folder, tensors)


@attack("shard_0.weight", "shard_1", "incomplete")
def missing_first_shard(folder: Path) -> None:
    tensors = tiny.tensors(cuts=(40,))
    del tensors[f"{TABLE}.shard_0.weight"]
    _write_one(folder, tensors)


@attack("expected 120 rows", "found 80 in 2 tensors")
def missing_last_shard(folder: Path) -> None:
    tensors = tiny.tensors(cuts=(40, 80))
    del tensors[f"{TABLE}.shard_2.weight"]
    _write_one(folder, tensors)


@attack("expected 120 rows", "found 240 in 3 tensors")
def extra_shard(folder: Path) -> None:
    extra = ("BF16", tiny.table_bytes(120, "BF16"), (120, 16))
    _write_one(folder, {**tiny.tensors(), f"{TABLE}.shard_2.weight": extra})


@attack("shard_01.weight", "no known layout")
def the_same_shard_written_twice(folder: Path) -> None:
    tensors = tiny.tensors()
    _write_one(folder, {**tensors, f"{TABLE}.shard_01.weight": tensors[f"{TABLE}.shard_1.weight"]})


@attack("b.safetensors", "shard_0.weight", "one file", "a.safetensors")
def one_shard_in_two_files(folder: Path) -> None:
    tensors = tiny.tensors()
    name = f"{TABLE}.shard_0.weight"
    tiny.write(folder, {"a.safetensors": tensors, "b.safetensors": {name: tensors[name]}})


@attack("ngram_embedding.weight", "whole here and in 2 shards")
def fused_and_shards(folder: Path) -> None:
    _write_one(folder, {**tiny.tensors(), **tiny.tensors(cuts=None)})


@attack("ngram_embedding.weight", "expected shape [rows, 16]", "found [240, 8]")
def wrong_width(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.weight": ("BF16", tiny.table_bytes(120, "BF16"), (240, 8))})


@attack("ngram_embedding.weight", "expected shape [rows, 16]", "found [1920]")
def flat_table(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.weight": ("BF16", tiny.table_bytes(120, "BF16"), (1920,))})


@attack("expected 120 rows", "found 119 in 1 tensor")
def rows_without_padding(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.weight": ("BF16", tiny.table_bytes(119, "BF16"), (119, 16))})


@attack("shard_1.weight", "expected dtype BF16", "found F16")
def mixed_dtypes(folder: Path) -> None:
    tensors = tiny.tensors()
    _, data, shape = tensors[f"{TABLE}.shard_1.weight"]
    _write_one(folder, {**tensors, f"{TABLE}.shard_1.weight": ("F16", data, shape)})


@attack("ngram_embedding.weight", "F64", "BF16, F16, F32, F8_E4M3")
def doubles(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.weight": ("F64", bytes(120 * 16 * 8), (120, 16))})


@attack("ngram_embedding.weight", "X9", "BF16, F16, F32, F8_E4M3")
def a_dtype_nobody_knows(folder: Path) -> None:
    entry = {"dtype": "X9", "shape": [120, 16], "data_offsets": [0, 16]}
    _write_raw(folder, json.dumps({f"{TABLE}.weight": entry}).encode(), bytes(16))


# --- scales ---


def _write_scale(folder: Path, dtype: str, value: Any, shape: tuple[int, ...]) -> None:
    tensors = tiny.tensors(dtype="F8_E4M3")
    _write_one(folder, {**tensors, f"{TABLE}.weight_scale": (dtype, value, shape)})


@attack("shard_0.weight", "weight_scale", "found none")
def fp8_without_scale(folder: Path) -> None:
    tensors = tiny.tensors(dtype="F8_E4M3")
    del tensors[f"{TABLE}.weight_scale"]
    _write_one(folder, tensors)


@attack("BF16", "weight_scale", "0.5")
def bf16_with_scale(folder: Path) -> None:
    scale = ("BF16", np.array([0.5], ml_dtypes.bfloat16), (1,))
    _write_one(folder, {**tiny.tensors(), f"{TABLE}.weight_scale": scale})


@attack("ngram_embedding", "found none")
def scale_without_table(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.weight_scale": ("F32", np.float32([0.5]), (1,))})


@attack("weight_scale", "finite number other than zero", "found 0.0")
def zero_scale(folder: Path) -> None:
    _write_scale(folder, "F32", np.float32([0]), (1,))


@attack("weight_scale", "finite number other than zero", "found -0.0")
def minus_zero_scale(folder: Path) -> None:
    _write_scale(folder, "BF16", np.array([-0.0], ml_dtypes.bfloat16), (1,))


@attack("weight_scale", "finite number other than zero", "found nan")
def scale_is_nan(folder: Path) -> None:
    _write_scale(folder, "F32", np.float32([np.nan]), ())


@attack("weight_scale", "finite number other than zero", "found inf")
def scale_is_infinite(folder: Path) -> None:
    _write_scale(folder, "BF16", np.array([np.inf], ml_dtypes.bfloat16), (1,))


@attack("weight_scale", "rounded to bfloat16", "found 3.40282346")
def scale_that_rounds_to_infinity(folder: Path) -> None:
    _write_scale(folder, "F32", np.float32([np.finfo(np.float32).max]), (1,))


@attack("weight_scale", "rounded to bfloat16", "found 1.40129846")
def scale_that_rounds_to_zero(folder: Path) -> None:
    _write_scale(folder, "F32", np.float32([1e-45]), (1,))


@attack("weight_scale", "expected one number", "F32 [120]")
def scale_per_row(folder: Path) -> None:
    _write_scale(folder, "F32", np.ones(120, np.float32), (120,))


@attack("weight_scale", "expected one number", "F32 [0]")
def empty_scale(folder: Path) -> None:
    _write_scale(folder, "F32", b"", (0,))


@attack("weight_scale", "BF16 or F32", "F64 []")
def scale_in_double(folder: Path) -> None:
    _write_scale(folder, "F64", np.float64([0.5]), ())


# --- hash constants ---


def _write_constant(folder: Path, name: str, value: Any, dtype: str = "I64") -> None:
    tensors: tiny.Tensors = {**tiny.tensors(), f"{MODULE}.{name}": (dtype, value, value.shape)}
    _write_one(folder, tensors)


@attack("layer_multipliers", "index 1", "expected", "found", "every row")
def another_multiplier(folder: Path) -> None:
    values = tiny.tensors()[f"{MODULE}.layer_multipliers"][1].copy()  # type: ignore[union-attr]
    values[1] += 2
    _write_constant(folder, "layer_multipliers", values)


@attack("ngram_heads_vocab_sizes", "index 0", "expected 23", "found 20")
def another_head_size(folder: Path) -> None:
    _write_constant(folder, "ngram_heads_vocab_sizes", np.array([20, 29, 31, 37]))


@attack("ngram_heads_offsets", "index 3", "expected 83", "found -1")
def another_head_offset(folder: Path) -> None:
    _write_constant(folder, "ngram_heads_offsets", np.array([0, 23, 52, -1]))


@attack("ngram_heads_offsets", "expected I64 [4]", "found I64 [3]")
def too_few_head_offsets(folder: Path) -> None:
    _write_constant(folder, "ngram_heads_offsets", np.array([0, 23, 52]))


@attack("ngram_heads_offsets", "expected I64 [4]", "found I32 [4]")
def head_offsets_in_32_bits(folder: Path) -> None:
    _write_constant(folder, "ngram_heads_offsets", np.array([0, 23, 52, 83], np.int32), "I32")


@attack("ngram_heads_offsets", "expected I64 [4]", "found I64 [200000]")
def enormous_constant(folder: Path) -> None:
    _write_constant(folder, "ngram_heads_offsets", np.zeros(200_000, np.int64))


@attack("layer_multipliers", "expected all of", "no ngram_heads_vocab_sizes")
def some_constants_missing(folder: Path) -> None:
    tensors = tiny.tensors()
    del tensors[f"{MODULE}.ngram_heads_vocab_sizes"]
    _write_one(folder, tensors)


@attack("layer_multipliers", "index 0")
def constants_of_another_seed(folder: Path) -> None:
    _write_one(folder, tiny.tensors(), seed=1)


# --- layouts that exist and are not read ---


@attack("NVFP4", "weight_scale_2", "F32", "Accepted are")
def nvfp4(folder: Path) -> None:
    tensors: tiny.Tensors = {
        f"{TABLE}.shard_0.weight": ("U8", bytes(120 * 8), (120, 8)),
        f"{TABLE}.shard_0.weight_scale": ("F8_E4M3", bytes(120), (120, 1)),
        f"{TABLE}.weight_scale_2": ("F32", np.float32([1]), ()),
    }
    _write_one(folder, tensors)


@attack("one scale per shard, row or block", "shard_0.weight_scale", "F16 [120, 1]", "Accepted are")
def int4_with_block_scales(folder: Path) -> None:
    tensors: tiny.Tensors = {
        f"{TABLE}.shard_0.weight": ("U8", bytes(120 * 8), (120, 8)),
        f"{TABLE}.shard_0.weight_scale": ("F16", bytes(240), (120, 1)),
    }
    _write_one(folder, tensors)


@attack("packed table", "I32 [120, 2]", "Accepted are")
def int4_in_words(folder: Path) -> None:
    tensors: tiny.Tensors = {
        f"{TABLE}.weight": ("I32", bytes(120 * 8), (120, 2)),
        f"{TABLE}.weight_scale": ("F16", bytes(240), (120, 1)),
    }
    _write_one(folder, tensors)


@attack("MLX", "shards.0.scales", "Accepted are")
def mlx(folder: Path) -> None:
    tensors: tiny.Tensors = {
        f"{TABLE}.shards.0.weight": ("U32", bytes(120 * 8), (120, 2)),
        f"{TABLE}.shards.0.scales": ("BF16", bytes(240), (120, 1)),
        f"{TABLE}.shards.0.biases": ("BF16", bytes(240), (120, 1)),
    }
    _write_one(folder, tensors)


@attack("EXL3", "trellis", "Accepted are")
def exl3(folder: Path) -> None:
    _write_one(folder, {f"{TABLE}.trellis": ("U8", bytes(120), (120,))})


if __name__ == "__main__":
    for one in ATTACKS:
        one.build(Path(sys.argv[1]) / one.name)
