"""Headers that must be accepted, and what is made of them. (Those that must not be: test_hostile.py.)"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from checkpoint import tiny
from ple_offload.checkpoint.reader import Stamp
from ple_offload.checkpoint.safetensors import StoredTensor, read_header
from support import write_safetensors


def _write(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_places_are_absolute(tmp_path: Path) -> None:
    header = (
        b'{"b":{"dtype":"I64","shape":[1],"data_offsets":[6,14]},"a":{"shape":[2,3],"dtype":"U8","data_offsets":[0,6]}}'
    )
    path = _write(tmp_path / "t.safetensors", header, bytes(14))
    start = 8 + len(header)
    stamp = Stamp(start + 14, path.stat().st_mtime_ns)
    assert read_header(path) == {
        "b": StoredTensor("b", "I64", (1,), path, start + 6, 8, stamp),
        "a": StoredTensor("a", "U8", (2, 3), path, start, 6, stamp),
    }


def test_metadata_and_padding_are_skipped(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"note":"[[,,{}"},"t":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}    '
    tensors = read_header(_write(tmp_path / "t.safetensors", header, b"x"))
    assert list(tensors) == ["t"]
    assert tensors["t"].shape == ()
    assert tensors["t"].num_bytes == 1


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert read_header(_write(tmp_path / "t.safetensors", b"{}", b"")) == {}


def test_empty_tensors_may_lie_anywhere_between(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [4, 4]},
        "c": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        "d": {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]},
    }
    assert len(read_header(_write(tmp_path / "t.safetensors", json.dumps(header).encode(), bytes(8)))) == 4


def test_sub_byte_and_unknown_dtypes(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [3, 6]},
        "c": {"dtype": "SOMETHING_NEW", "shape": [1000], "data_offsets": [6, 8]},
    }
    tensors = read_header(_write(tmp_path / "t.safetensors", json.dumps(header).encode(), bytes(8)))
    assert {name: tensor.num_bytes for name, tensor in tensors.items()} == {"a": 3, "b": 3, "c": 2}


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The hub cache consists of links."""
    write_safetensors(tmp_path / "blob", {"t": ("U8", b"1", (1,))})
    link = tmp_path / "t.safetensors"
    link.symlink_to("blob")
    assert read_header(link)["t"].path == link


def test_the_bytes_are_those_the_writer_put_there(tmp_path: Path) -> None:
    written = tiny.tensors(dtype="F8_E4M3", cuts=(1, 50))
    raw = write_safetensors(tmp_path / "t.safetensors", written).read_bytes()
    stored = read_header(tmp_path / "t.safetensors")
    assert stored.keys() == written.keys()
    for name, (dtype, data, shape) in written.items():
        tensor = stored[name]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        expected = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        assert raw[tensor.offset : tensor.offset + tensor.num_bytes] == expected
