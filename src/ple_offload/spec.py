"""What a checkpoint holds: its tables, their rules, formats and places. Opens no table.

Accepted, behind any prefix:

    <prefix><module><table>.shard_<i>.weight   i = 0, 1, 2, ...; one after the other they are the table
    <prefix><module><table>.weight             the whole table; instead of shards, never beside them
    <prefix><module><table>.weight_scale       for F8_E4M3, and only for it
    <prefix><module><constant>                 what the row rule is made of; all of them or none

Whatever else is found under <table> is another layout. It is refused by name: reading it as one of these
would give fluent text from wrong rows. Only headers, the scale and the constants are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ple_offload import families
from ple_offload.checkpoint.folder import Checkpoint
from ple_offload.checkpoint.reader import open_file, read_bytes
from ple_offload.checkpoint.safetensors import StoredTensor
from ple_offload.checkpoint.strict_json import shown
from ple_offload.errors import CheckpointError, UsageError
from ple_offload.families import Family, FoundTable
from ple_offload.formats.base import RowFormat, detect
from ple_offload.stores.base import Segment

FINGERPRINT_SAMPLES = 64
_ACCEPTED = (
    "Accepted are shard_0.weight, shard_1.weight, ... or one weight, "
    "in BF16, F16 or F32, or in F8_E4M3 with a weight_scale"
)
_SCALE_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4")}

# A name under <table> that marks another layout -> what it is. The first match counts.
_OTHER_LAYOUTS = (
    (r"trellis$", "an EXL3 (trellis) table"),
    (r"(scales|biases)$", "an MLX quantised table"),
    (r"weight_scale_2$", "an NVFP4 table"),
    (r"shards?[._]\d+\.weight_scale$", "a table with one scale per shard, row or block"),
)


@dataclass(frozen=True)
class TableSpec:
    """One table. Its segments are in row order and hold every row exactly once; none is empty."""

    family: Family
    format: RowFormat
    layer: int  # decoder layer that consumes the rows, from 0
    num_rows: int
    segments: tuple[Segment, ...]
    constants_stored: bool  # the checkpoint stored the rule's constants, and they are equal to ours

    @property
    def name(self) -> str:
        return f"layers.{self.layer}"

    @property
    def row_dim(self) -> int:
        """Elements of one row."""
        return self.format.row_dim

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes

    @property
    def rows_per_token(self) -> int:
        return self.family.rows_per_token

    @property
    def embed_dim(self) -> int:
        """Elements one token receives: all its rows, one after the other."""
        return self.rows_per_token * self.row_dim

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class CheckpointSpec:
    """The tables of one checkpoint, in layer order."""

    path: Path
    model_type: str
    tables: tuple[TableSpec, ...]

    def table(self, layer: int | None = None) -> TableSpec:
        """The table of decoder layer `layer` (from 0), or the only one. UsageError if there is none."""
        matching = [table for table in self.tables if layer in (None, table.layer)]
        if len(matching) != 1:
            raise UsageError(
                f"{self.path}: layer: expected one that has a table ("
                f"{', '.join(str(table.layer) for table in self.tables)}; counted from 0), found {layer}."
            )
        return matching[0]


def fingerprint(table: TableSpec) -> str:
    """A table's identity, from its rule, its shape and the bytes of rows spread over it; 32 hex digits.

    The same for any copy or packing of a table; another quantisation of the same model gives another one. Reads the
    sampled rows from the files as they are now; `Table.fingerprint` is that of an open table. Raises CheckpointError when
    they cannot be read.
    """
    wanted, found = sampled_rows(table), []
    for segment in table.segments:
        inside = [row for row in wanted if 0 <= row - segment.first_row < segment.num_rows]
        if inside:
            with open_file(segment.path) as fd:
                for row in inside:
                    offset = segment.offset + (row - segment.first_row) * table.row_bytes
                    found.append(read_bytes(fd, segment.path, offset, table.row_bytes))
    return fingerprint_of(table, b"".join(found))


def sampled_rows(table: TableSpec) -> list[int]:
    """The row numbers that a fingerprint is made of, in order."""
    return sorted({i * (table.num_rows - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)})


def fingerprint_of(table: TableSpec, rows: bytes) -> str:
    """The fingerprint of a table whose `sampled_rows` hold these bytes."""
    digest = hashlib.sha256(repr((table.family, table.format, table.layer, table.num_rows)).encode())
    digest.update(rows)
    return digest.hexdigest()[:32]


def inspect(path: str | Path) -> CheckpointSpec:
    """Find and check every table of a checkpoint.

    `path` is a folder of safetensors files with config.json, or a model id that the local hub cache holds.
    Raises UsageError when there is no such folder, CheckpointError for what is damaged, incomplete or not
    understood.
    """
    checkpoint = Checkpoint.open(path)
    try:
        found = families.find_tables(checkpoint.config)
    except CheckpointError as error:
        # The families quote what they found, and a hostile config.json may have megabytes of it.
        raise CheckpointError(f"{checkpoint.folder}: {str(error)[:1000]}") from None
    return CheckpointSpec(
        path=checkpoint.folder,
        model_type=str(checkpoint.config["model_type"]),
        tables=tuple(_table_spec(checkpoint, table) for table in found),
    )


def _table_spec(checkpoint: Checkpoint, found: FoundTable) -> TableSpec:
    tensors, module = _tensors_of_module(checkpoint, found)
    under_table = {
        name.removeprefix(found.table + "."): tensor
        for name, tensor in tensors.items()
        if name.startswith(found.table + ".")
    }
    scale = under_table.pop("weight_scale", None)
    parts = _parts(under_table)
    first = parts[0]
    for part in parts:
        _check_part(part, first, found)
    num_rows = sum(part.shape[0] for part in parts)
    if num_rows != found.family.num_rows:
        raise CheckpointError(
            f"{checkpoint.folder}: table {module}{found.table}: expected {found.family.num_rows:,} rows "
            f"(by config.json), found {num_rows:,} in {_count(len(parts), 'tensor')}. A shard is missing or "
            "belongs to "
            "another model, or config.json does: get the complete checkpoint."
        )
    row_format = detect(
        first.dtype,
        found.row_dim,
        None if scale is None else _scale_value(checkpoint, scale),
        f"{first.path}: tensor {shown(first.name)}",
    )
    return TableSpec(
        family=found.family,
        format=row_format,
        layer=found.layer,
        num_rows=num_rows,
        segments=_segments(parts),
        constants_stored=_compare_constants(checkpoint, tensors, found),
    )


def _tensors_of_module(checkpoint: Checkpoint, found: FoundTable) -> tuple[dict[str, StoredTensor], str]:
    """The tensors whose names end in <module><rest>, by <rest>, and <prefix><module>."""
    pattern = re.compile(rf"((?:.*\.)?{re.escape(found.module)})(.+)", re.DOTALL)
    for name, path in checkpoint.absent.items():
        match = pattern.fullmatch(name)
        if match and (match[2].startswith(found.table + ".") or match[2] in found.constants):
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: expected by the index, not found in the file. "
                "File and index do not belong together: download both again."
            )
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        if match := pattern.fullmatch(name):
            modules.setdefault(match[1], {})[match[2]] = tensor
    names = {name for tensors in modules.values() for name in tensors if name.startswith(found.table + ".")}
    if not names - {f"{found.table}.weight_scale"}:
        unlisted = ""
        if checkpoint.unlisted:
            files = ", ".join(file.name for file in checkpoint.unlisted[:3])
            unlisted = f" The index leaves out {files}: if the table is there, correct the index."
        raise CheckpointError(
            f"{checkpoint.folder}: tensors ...{found.module}{found.table}.*: expected the table that "
            "config.json "
            f"announces, found none in {_count(len(checkpoint.files), 'file')}. {_ACCEPTED}.{unlisted}"
        )
    if len(modules) > 1:
        raise CheckpointError(
            f"{checkpoint.folder}: table of layer {found.layer}: expected it once, found it under "
            f"{' and '.join(shown(module) for module in sorted(modules))}. Remove the files that do not "
            "belong."
        )
    ((module, tensors),) = modules.items()
    return tensors, module


def _parts(under_table: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """The table's own tensors in row order. `under_table`: name below <table> -> tensor, no scale."""
    for pattern, layout in _OTHER_LAYOUTS:
        for name, tensor in under_table.items():
            if re.search(pattern, name):
                _refuse_layout(tensor, layout)
    fused = under_table.get("weight")
    shards: dict[int, StoredTensor] = {}
    for name, tensor in under_table.items():
        match = re.fullmatch(r"shard_(0|[1-9][0-9]{0,8})\.weight", name)
        if match:
            shards[int(match[1])] = tensor
        elif name != "weight":
            _refuse_layout(tensor, "a tensor that is part of no known layout")
    if fused is not None and shards:
        raise CheckpointError(
            f"{fused.path}: tensor {shown(fused.name)}: expected the table once, found it whole here and in "
            f"{_count(len(shards), 'shard')}. Remove the files that do not belong."
        )
    if fused is not None:
        return [fused]
    for i, (shard, tensor) in enumerate(sorted(shards.items())):
        if shard != i:
            missing = tensor.name.replace(f"shard_{shard}.", f"shard_{i}.")
            raise CheckpointError(
                f"{tensor.path.parent}: tensor {shown(missing)}: expected shards without a gap, found none "
                "with this "
                f"number but shard_{shard} in {tensor.path.name}. The checkpoint is incomplete: fetch what "
                "is missing."
            )
    return [shards[i] for i in range(len(shards))]


def _check_part(part: StoredTensor, first: StoredTensor, found: FoundTable) -> None:
    where = f"{part.path}: tensor {shown(part.name)}"
    if part.dtype in ("U8", "U32", "I32"):
        _refuse_layout(part, "a packed table (NVFP4, int4 or MLX)")
    if part.dtype != first.dtype:
        raise CheckpointError(
            f"{where}: expected dtype {first.dtype}, as {shown(first.name)} has, found {part.dtype}. "
            "The files come from different checkpoints: download them again."
        )
    if len(part.shape) != 2 or part.shape[1] != found.row_dim:
        raise CheckpointError(
            f"{where}: expected shape [rows, {found.row_dim}] (by config.json), found {list(part.shape)}. "
            "The file or config.json belongs to another model: download them again."
        )


def _refuse_layout(tensor: StoredTensor, layout: str) -> NoReturn:
    raise CheckpointError(
        f"{tensor.path}: tensor {shown(tensor.name)} ({tensor.dtype} {list(tensor.shape)}): found {layout}, "
        "which is not "
        f"supported. {_ACCEPTED}; use a checkpoint in one of those."
    )


def _scale_value(checkpoint: Checkpoint, scale: StoredTensor) -> float:
    where = f"{scale.path}: tensor {shown(scale.name)}"
    if scale.dtype not in _SCALE_DTYPES or scale.shape not in ((), (1,)):
        raise CheckpointError(
            f"{where}: expected one number in {' or '.join(_SCALE_DTYPES)} (shape [] or [1]), found "
            f"{scale.dtype} "
            f"{list(scale.shape)}. Scales per row or block are not supported. {_ACCEPTED}."
        )
    value = np.frombuffer(checkpoint.read(scale), _SCALE_DTYPES[scale.dtype])[0].astype(np.float32)
    # Decoding multiplies by the scale in the activation dtype: one that rounds to 0 or infinity there ruins
    # all values.
    with np.errstate(over="ignore"):
        rounded = value.astype(ml_dtypes.bfloat16)
    if not np.isfinite(rounded) or rounded == 0:
        raise CheckpointError(
            f"{where}: expected a finite number other than zero, also when rounded to bfloat16, found "
            f"{value}. "
            "The checkpoint is damaged: download it again."
        )
    return float(value)


def _segments(parts: list[StoredTensor]) -> tuple[Segment, ...]:
    segments = []
    first_row = 0
    for part in parts:
        if part.shape[0]:  # a table of few rows cut into many shards leaves the last ones empty
            segments.append(Segment(part.path, part.offset, first_row, part.shape[0], part.stamp))
        first_row += part.shape[0]
    return tuple(segments)


def _compare_constants(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], found: FoundTable) -> bool:
    """False when no constant is stored; True when all are, and are ours."""
    stored = {name: tensors[name] for name in found.constants if name in tensors}
    if not stored:
        return False
    for name, expected in found.constants.items():
        if name not in stored:
            present = next(iter(stored.values()))
            raise CheckpointError(
                f"{present.path}: expected all of {', '.join(found.constants)} or none, found "
                f"{shown(present.name)} and no {name}. The checkpoint is incomplete: fetch what is missing."
            )
        _compare_constant(checkpoint, stored[name], expected)
    return True


def _compare_constant(checkpoint: Checkpoint, tensor: StoredTensor, expected: npt.NDArray[np.int64]) -> None:
    where = f"{tensor.path}: tensor {shown(tensor.name)}"
    if tensor.dtype != "I64" or tensor.shape != expected.shape:
        raise CheckpointError(
            f"{where}: expected I64 {list(expected.shape)} (by config.json), found {tensor.dtype} "
            f"{list(tensor.shape)}. "
            "The file or config.json belongs to another model: download them again."
        )
    values = np.frombuffer(checkpoint.read(tensor), "<i8")
    for i in np.flatnonzero(values != expected):
        raise CheckpointError(
            f"{where}: index {i}: expected {expected[i]} (recomputed from config.json), found {values[i]}. "
            "With another "
            "number every row would be the wrong one: the file is damaged, or config.json belongs to another "
            "model."
        )


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
