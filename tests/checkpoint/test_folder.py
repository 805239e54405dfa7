"""Which files of a folder count, and where a folder is looked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from checkpoint import tiny
from ple_offload.checkpoint.folder import Checkpoint
from ple_offload.errors import CheckpointError, UsageError
from support import write_safetensors

ONE = ("U8", b"1", (1,))
TWO = ("U8", b"2", (1,))


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _names(files: tuple[Path, ...]) -> list[str]:
    return [file.name for file in files]


def test_without_index_every_file_counts(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"b.safetensors": {"t": ONE}, "any name.safetensors": {"u": TWO}})
    (tmp_path / "model.bin").write_text("not ours")
    checkpoint = Checkpoint.open(tmp_path)
    assert _names(checkpoint.files) == ["any name.safetensors", "b.safetensors"]
    assert checkpoint.read(checkpoint.tensors["t"]) == b"1"
    assert checkpoint.config == tiny.CONFIG
    assert checkpoint.folder == tmp_path


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"a.safetensors": {"t": ONE, "v": ONE}, "b.safetensors": {"t": TWO}}, index=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read(checkpoint.tensors["t"]) == b"2"
    assert not checkpoint.absent


def test_files_the_index_leaves_out_are_not_read(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"a.safetensors": {"t": ONE}}, index=True)
    (tmp_path / "broken.safetensors").write_text("not a safetensors file")
    checkpoint = Checkpoint.open(tmp_path)
    assert _names(checkpoint.files) == ["a.safetensors"]
    assert _names(checkpoint.unlisted) == ["broken.safetensors"]


def test_a_tensor_the_index_forgot_counts_all_the_same(tmp_path: Path) -> None:
    """Engines load whole files; a shard they would load must not escape our checks."""
    tiny.write(tmp_path, {"a.safetensors": {"t": ONE}}, index=True)
    write_safetensors(tmp_path / "a.safetensors", {"t": ONE, "u": TWO})
    assert set(Checkpoint.open(tmp_path).tensors) == {"t", "u"}


def test_a_tensor_that_the_index_invents_is_reported(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"a.safetensors": {"t": ONE}})
    index = {"weight_map": {"t": "a.safetensors", "ghost": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint.open(tmp_path).absent == {"ghost": tmp_path / "a.safetensors"}


def test_an_index_of_another_name_and_files_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    tiny.write(tmp_path, {"parts/a.safetensors": {"t": ONE}}, index=True)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "other.safetensors.index.json")
    assert "t" in Checkpoint.open(tmp_path).tensors


def test_the_usual_index_wins(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"a.safetensors": {"t": ONE}}, index=True)
    (tmp_path / "x.safetensors.index.json").write_text("not read")
    assert "t" in Checkpoint.open(tmp_path).tensors


def test_read_is_for_small_tensors(tmp_path: Path) -> None:
    size = (1 << 20) + 1
    tiny.write(tmp_path, {"a.safetensors": {"t": ("U8", bytes(size), (size,))}})
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"'t'.*at most 1,048,576 bytes, found 1,048,577"):
        checkpoint.read(checkpoint.tensors["t"])


def test_read_notices_a_file_cut_since(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"a.safetensors": {"t": ("U8", bytes(100), (100,))}})
    checkpoint = Checkpoint.open(tmp_path)
    os.truncate(tmp_path / "a.safetensors", checkpoint.tensors["t"].offset + 60)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: expected 100 bytes at offset \d+, found 60"):
        checkpoint.read(checkpoint.tensors["t"])


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    tiny.write_default(tmp_path)
    before = _descriptors()
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)
    assert checkpoint.tensors
    assert _descriptors() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(tmp_path: Path) -> None:
    tiny.write_default(tmp_path)
    (tmp_path / "a.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be opened: Permission denied"):
        Checkpoint.open(tmp_path)


def _hub(root: Path) -> Path:
    """A hub cache with owner/name, laid out as huggingface_hub does: links to blobs."""
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / "0123abcd"
    tiny.write_default(snapshot)
    (repo / "blobs").mkdir()
    for file in snapshot.iterdir():
        file.rename(repo / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abcd\n")
    return snapshot


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))


@pytest.mark.usefixtures("_no_hub")
@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_model_id_is_looked_up_in_the_hub_cache(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _hub(tmp_path / below)
    monkeypatch.setenv(variable, str(tmp_path))
    checkpoint = Checkpoint.open("owner/name")
    assert checkpoint.folder == snapshot
    assert checkpoint.tensors


@pytest.mark.usefixtures("_no_hub")
def test_a_model_id_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="hf download owner/name"):
        Checkpoint.open("owner/name")
    (tmp_path / "models--owner--name" / "refs").mkdir(parents=True)
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("../../..")
    with pytest.raises(UsageError, match="hf download owner/name"):
        Checkpoint.open("owner/name")


def test_a_path_that_cannot_be_looked_up() -> None:
    with pytest.raises(UsageError, match=r"'x{119}\.\.\. .*: cannot be looked up: File name too long"):
        Checkpoint.open("x" * 5000)


def test_neither_folder_nor_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        Checkpoint.open(tmp_path / "nothing" / "here")
    file = write_safetensors(tmp_path / "a.safetensors", {"t": ONE})
    with pytest.raises(UsageError, match="found a file"):
        Checkpoint.open(file)
