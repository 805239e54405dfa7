"""The header of a safetensors file, believed only where it can be checked.

    8 bytes   N, little-endian
    N bytes   JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
              and perhaps a "__metadata__", which is of no interest here
    the rest  data; offsets count from its start. The tensors cover it exactly: no overlap, no gap, nothing
    after

Everything is checked before a byte of data is read: later code multiplies shapes and adds offsets without
asking.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_offload.checkpoint import strict_json
from ple_offload.checkpoint.reader import Stamp, open_file, read_bytes
from ple_offload.checkpoint.strict_json import shown
from ple_offload.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 64

_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}

_AGAIN = "The file is damaged or incomplete: download it again."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. `dtype` as safetensors spells it; `offset` in bytes from the file's start.

    stamp: the file's when its header was read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    stamp: Stamp


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name; their data is not read.

    A dtype this version does not know is passed through (only its place in the file is checked).
    Raises CheckpointError for a file that cannot be read or whose header does not describe exactly this file.
    """
    path = Path(path)
    with open_file(path) as fd:
        stamp = Stamp.of(fd)
        file_bytes = stamp.num_bytes
        if file_bytes < 8:
            raise CheckpointError(f"{path}: expected a safetensors file, found {file_bytes} bytes. {_AGAIN}")
        start = read_bytes(fd, path, 0, 8)
        if start == b"version ":  # how the pointer that Git LFS leaves in a clone begins
            raise CheckpointError(
                f"{path}: expected a safetensors file, found a Git LFS pointer. Run `git lfs pull` in the folder."
            )
        header_bytes: int = struct.unpack("<Q", start)[0]
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path}: header length: expected at most {min(MAX_HEADER_BYTES, file_bytes - 8):,} bytes "
                "(the file has "
                f"{file_bytes:,}, the format allows {MAX_HEADER_BYTES:,}), found {header_bytes:,}. {_AGAIN}"
            )
        raw = read_bytes(fd, path, 8, header_bytes)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: header: expected it to begin with '{{', found {raw[:1]!r}. {_AGAIN}")
    header = strict_json.parse_object(raw, f"{path}: header")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _stored_tensor(path, name, entry, data_start, stamp) for name, entry in header.items()}
    _check_cover(path, tensors, data_start, file_bytes)
    return tensors


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int, stamp: Stamp) -> StoredTensor:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else entry
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {shown(found)}. {_AGAIN}")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype: expected a string, found {shown(dtype)}. {_AGAIN}")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(
            f"{where}: shape: expected a list of at most {MAX_RANK} whole numbers from 0 to 2**63 - 1, "
            f"found {shown(shape)}. {_AGAIN}"
        )
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(
            f"{where}: data_offsets: expected two whole numbers, the second not smaller, found {shown(span)}. {_AGAIN}"
        )
    num_bytes = span[1] - span[0]
    if dtype in _BITS:
        bits = _BITS[dtype]
        for size in shape:
            bits *= size
        if bits != num_bytes * 8:
            raise CheckpointError(
                f"{where}: data_offsets: expected {bits / 8:,.15g} bytes for {dtype} {shown(shape)}, "
                f"found {num_bytes:,}. {_AGAIN}"
            )
    return StoredTensor(name, dtype, tuple(shape), path, data_start + span[0], num_bytes, stamp)


def _are_sizes(value: Any) -> bool:
    # type() and not isinstance(): True is an int, too.
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, file_bytes: int) -> None:
    """The tensors must cover [data_start, file_bytes) exactly: each begins where the one before ended."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)}: {what}: expected it to begin at byte {end:,} of the "
                "file, "
                f"found {tensor.offset:,}. {_AGAIN}"
            )
        end += tensor.num_bytes
    if end != file_bytes:
        raise CheckpointError(
            f"{path}: expected {end:,} bytes (where the header's last tensor ends), found {file_bytes:,}. {_AGAIN}"
        )
