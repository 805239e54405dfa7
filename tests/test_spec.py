"""`inspect` finds every table, however it is packed, and its segments are the table, byte for byte."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ple_offload
from checkpoint import tiny
from ple_offload.checkpoint.reader import ReadJob, read_into
from ple_offload.errors import CheckpointError, UsageError
from ple_offload.spec import TableSpec, inspect


def _read_back(table: TableSpec) -> bytes:
    """The table's bytes by its segments, which must cover its rows in order."""
    memory = np.zeros(table.size_bytes, np.uint8)
    row = 0
    jobs = []
    for segment in table.segments:
        assert segment.first_row == row
        assert segment.num_rows > 0
        num_bytes = segment.num_rows * table.row_bytes
        jobs.append(ReadJob(segment.path, segment.offset, num_bytes, memory.ctypes.data + row * table.row_bytes))
        row += segment.num_rows
    assert row == table.num_rows
    read_into(jobs, threads=1)
    return memory.tobytes()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_packing_gives_the_same_table(data: st.DataObject) -> None:
    """Any dtype, number of layers, cut into shards and files, prefix; with and without an index."""
    layer_ids = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="ple_layer_ids")
    prefix = data.draw(st.sampled_from(["", "model.", "model.language_model.", "a.b.layers.9.c."]))
    nested = data.draw(st.booleans(), label="nested text_config")
    constants = data.draw(st.booleans(), label="constants")
    num_files = data.draw(st.integers(1, 4), label="files")
    text_config = {**tiny.CONFIG, "ple_layer_ids": layer_ids}
    config = {"model_type": "qwen4_exp", "text_config": text_config} if nested else text_config

    expected: dict[int, tuple[str, bytes]] = {}
    files: list[tiny.Tensors] = [{} for _ in range(num_files)]
    for layer_index, layer_id in enumerate(sorted(set(layer_ids))):
        dtype = data.draw(st.sampled_from(sorted(tiny.ITEM_BYTES)))
        rows = tiny.family(layer_index).num_rows
        content = tiny.table_bytes(rows, dtype, seed=layer_index)
        cuts = data.draw(st.none() | st.lists(st.integers(0, rows), max_size=12).map(sorted))
        made = tiny.tensors(
            dtype=dtype,
            cuts=cuts,
            layer=layer_id - 1,
            layer_index=layer_index,
            prefix=prefix,
            constants=constants,
            data=content,
        )
        for name in data.draw(st.permutations(sorted(made))):
            files[data.draw(st.integers(0, num_files - 1))][name] = made[name]
        expected[layer_id - 1] = (dtype, content)

    with TemporaryDirectory() as folder:
        tiny.write(
            Path(folder),
            {f"part {i}.safetensors": content for i, content in enumerate(files)},
            config=config,
            index=data.draw(st.booleans(), label="index"),
        )
        spec = inspect(folder)
        assert [table.layer for table in spec.tables] == sorted(expected)
        for table in spec.tables:
            dtype, content = expected[table.layer]
            names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8_e4m3"}
            assert table.format.name == names[dtype]
            assert table.format.scale == (0.5 if dtype == "F8_E4M3" else None)
            assert table.constants_stored is constants
            assert _read_back(table) == content


def test_what_a_spec_says(tmp_path: Path) -> None:
    folder = tiny.write_default(tmp_path, dtype="F8_E4M3", cuts=(50,))
    spec = ple_offload.inspect(folder)
    assert spec.path == folder
    assert spec.model_type == "qwen4_exp_text"
    table = spec.table()
    assert spec.table(1) is table
    assert table.name == "layers.1"
    assert (table.num_rows, table.row_dim, table.row_bytes, table.size_bytes) == (120, 16, 16, 1920)
    assert (table.rows_per_token, table.embed_dim) == (4, 64)
    assert table.constants_stored
    assert [(s.path.name, s.first_row, s.num_rows) for s in table.segments] == [
        ("a.safetensors", 0, 50),
        ("b.safetensors", 50, 70),
    ]
    hash(spec)  # specs can be keys
    with pytest.raises(UsageError, match=r"expected one that has a table \(1; counted from 0\), found 2"):
        spec.table(2)


def test_layers_are_counted_from_0_and_indexed_by_their_order(tmp_path: Path) -> None:
    """Config 4, 2, 2 means decoder layers 1 and 3; the hash of layer 3 is that of the second PLE layer."""
    config = {**tiny.CONFIG, "ple_layer_ids": [4, 2, 2]}
    tensors = {**tiny.tensors(layer=1, layer_index=0), **tiny.tensors(layer=3, layer_index=1)}
    spec = inspect(tiny.write(tmp_path, {"m.safetensors": tensors}, config=config))
    assert [(table.layer, table.family.layer_index) for table in spec.tables] == [(1, 0), (3, 1)]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"\(1, 3; counted from 0\), found None"):
        spec.table()


def test_empty_last_shards_are_fine(tmp_path: Path) -> None:
    """120 rows in 50 parts of ceil(120 / 50) = 3 rows: the last ten are empty."""
    cuts = [min(3 * i, 120) for i in range(1, 50)]
    table = inspect(tiny.write(tmp_path, {"m.safetensors": tiny.tensors(cuts=cuts)})).table()
    assert len(table.segments) == 40
    assert _read_back(table) == tiny.table_bytes(120, "BF16")


@pytest.mark.parametrize(("dtype", "shape"), [("F32", ()), ("F32", (1,)), ("BF16", ()), ("BF16", (1,))])
def test_scales_in_every_spelling(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = tiny.tensors(dtype="F8_E4M3")
    value = np.float32(-0.0001983642578125)  # exact in bfloat16
    raw = value.tobytes() if dtype == "F32" else value.tobytes()[2:]
    tensors["model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"] = (dtype, raw, shape)
    table = inspect(tiny.write(tmp_path, {"m.safetensors": tensors})).table()
    assert table.format.scale == value


def test_other_tensors_of_the_module_are_left_alone(tmp_path: Path) -> None:
    module = "model.layers.1.ple.ple_embedding"
    tensors: tiny.Tensors = {
        **tiny.tensors(),
        f"{module}.token_lookup": ("I32", bytes(40), (10,)),
        f"{module}.hashstats_0": ("F64", bytes(8), (1,)),
        "model.layers.0.mlp.weight": ("BF16", bytes(8), (2, 2)),
    }
    assert inspect(tiny.write(tmp_path, {"m.safetensors": tensors})).table().num_rows == 120


def test_a_checkpoint_that_transformers_wrote(make_checkpoint: Callable[..., Path]) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder = make_checkpoint(ple_layer_ids=[1, 2])
    stored: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        stored.update(safetensors.load_file(file))
    tables = inspect(folder).tables
    assert [table.layer for table in tables] == [0, 1]
    for table in tables:
        assert table.constants_stored
        start = f"model.layers.{table.layer}.ple.ple_embedding.ngram_embedding.shard_"
        parts = [name for name in stored if name.startswith(start)]
        parts.sort(key=lambda name: int(name.removeprefix(start).split(".")[0]))
        assert len(parts) > 1
        assert stored[parts[0]].dtype == ml_dtypes.bfloat16
        assert _read_back(table) == b"".join(stored[part].tobytes() for part in parts)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
@pytest.mark.parametrize("victim", ["a.safetensors", "b.safetensors", "model.safetensors.index.json", "config.json"])
def test_damage_gives_a_checkpoint_error_or_the_same_table(dtype: str, victim: str, tmp_path: Path) -> None:
    """A few random bytes changed, removed or added: refused, or nothing that matters was hit."""
    folder = tiny.write_default(tmp_path / "whole", dtype=dtype)
    whole = inspect(folder).table()
    original = (folder / victim).read_bytes()
    names = ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in names:
        shutil.copy(folder / name, damaged / name)
    refused = 0
    for seed in range(60):
        content = _damage(original, random.Random(seed))
        (damaged / victim).write_bytes(content)
        try:
            table = inspect(damaged).table()
        except CheckpointError:
            refused += 1
            continue
        if victim == "config.json":
            continue  # another seed or EOS is another model, which only the stored constants can tell
        places = [(s.path.name, s.offset, s.first_row, s.num_rows) for s in table.segments]
        assert places == [(s.path.name, s.offset, s.first_row, s.num_rows) for s in whole.segments], seed
        assert table.family == whole.family
        assert table.format.name == whole.format.name
        if len(content) == len(original):
            _read_back(table)
    assert refused >= 20


def _damage(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    region = min(len(damaged), 1500)  # where the header is; the data may hold anything anyway
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(region)
        match rng.randrange(4):
            case 0:
                damaged[place] ^= 1 << rng.randrange(8)
            case 1:
                damaged[place] = rng.choice(b'0123456789[]{},:"')
            case 2:
                del damaged[place : place + rng.randint(1, 20)]
            case 3:
                damaged[place:place] = rng.randbytes(rng.randint(1, 20))
        region = min(region, len(damaged))
    if rng.randrange(6) == 0:
        del damaged[rng.randrange(len(damaged)) :]
    return bytes(damaged)


def test_json_that_is_valid_and_means_nothing(tmp_path: Path) -> None:
    """Each value of config.json replaced by junk of every kind: refused or understood, no other error."""
    folder = tiny.write_default(tmp_path)
    junk: list[Any] = [None, True, -1, 0, 1.5, 10**30, "x", [], [[]], {}, [None], 2**63, 10**15]
    for key in tiny.CONFIG:
        for value in junk:
            (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, key: value}))
            with suppress(CheckpointError):
                inspect(folder)
