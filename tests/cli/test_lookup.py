"""`lookup`: the file's values are those of the checkpoint."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from ple_offload.cli import main
from ple_offload.worker.spawn import SpawnedWorker


def whole_table(checkpoint: Path) -> np.ndarray:
    """[num_rows, row_dim] float32, read by safetensors itself."""
    import torch
    from safetensors import safe_open

    places = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(
        (int(name.split("shard_")[1].split(".")[0]), name, file) for name, file in places.items() if ".shard_" in name
    )
    parts = []
    for _, name, file in shards:
        with safe_open(checkpoint / file, framework="pt") as opened:
            parts.append(opened.get_tensor(name))
    return torch.cat(parts).float().numpy()


@pytest.mark.parametrize("tier", ["ram", "file", "auto"])
def test_values_are_the_rows_of_the_checkpoint(
    checkpoint: Path, tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(checkpoint), "--tokens", "5,6,7,8", "--context", "3"]
    assert main(["rows", *arguments, "--json"]) == 0
    numbers = np.array(json.loads(capsys.readouterr().out))
    out = tmp_path / "values"  # no .npy is added behind the user's back
    assert main(["lookup", *arguments, "--out", str(out), "--tier", tier, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["shape"], report["dtype"], report["out"]) == ([4, 64], "float32", str(out))
    assert report["tier"] in (("ram", "file") if tier == "auto" else (tier,))
    np.testing.assert_array_equal(np.load(out), whole_table(checkpoint)[numbers].reshape(4, 64))
    assert printed.err == ""  # no progress in a pipe


@pytest.mark.parametrize("worker", ["spawn", "unix"])
def test_a_workers_values_are_the_same(
    checkpoint: Path, worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lookup", str(checkpoint), "--tokens", "5,6,7,8", "--context", "3", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "here")]) == 0
    with contextlib.ExitStack() as stack:
        if worker == "unix":
            worker = stack.enter_context(SpawnedWorker(checkpoint, tier="file")).address
        assert main([*arguments, "--out", str(tmp_path / "there"), "--worker", worker]) == 0
    here, there = map(json.loads, capsys.readouterr().out.splitlines())
    assert (here["worker"], here["tier"]) == ("inline", "ram")
    if worker == "spawn":
        assert there["worker"].startswith("worker process ")
        assert there["tier"] == "ram"
    else:
        assert (there["worker"], there["tier"]) == (f"the worker at {worker}", "file")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--worker", "daemon"], "unix:/path"),
        (["--worker", "unix:/nowhere/s", "--tier", "ram"], "--tier"),
        (["--worker", "unix:/nowhere/s", "--skip-memory-check"], "--skip-memory-check"),
        (["--worker", "spawn", "--layer", "3"], "layer"),
    ],
)
def test_a_worker_that_cannot_be_meant(
    checkpoint: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "values"
    assert main(["lookup", str(checkpoint), "--tokens", "5", "--out", str(out), *options]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not out.exists()


def test_a_folder_that_is_not_there(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "missing" / "values.npy"
    assert main(["lookup", str(checkpoint), "--tokens", "5", "--out", str(out)]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", str(checkpoint), "--tokens", "1", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path}: expected a file to write, found a folder" in capsys.readouterr().err


def test_a_bad_id_writes_no_file(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "values.npy"
    assert main(["lookup", str(checkpoint), "--tokens", "5000", "--out", str(out)]) == 2
    assert not out.exists()
