"""`verify`: passes on a good checkpoint, and fails when rows differ or are not finite."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ple_offload
from ple_offload.cli import main, verify


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_a_good_checkpoint(checkpoint: Path, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint), "--rows", "500", "--tier", tier, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["tables"]
    assert 400 < report["rows_checked"] <= 508
    assert (report["tier"], report["rows_different"], report["rows_not_finite"]) == (tier, 0, 0)
    assert report["constants_stored"]


def test_every_table_is_checked(make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(make_checkpoint(ple_layer_ids=[1, 2]))]) == 0
    text = capsys.readouterr().out
    assert "layer 0, tier" in text
    assert "layer 1, tier" in text


def test_a_different_row_is_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_rows = verify.read_rows

    def one_bit_off(spec: ple_offload.TableSpec, rows: np.ndarray) -> np.ndarray:
        raw = read_rows(spec, rows)
        raw[3, 0] ^= 1
        return raw

    monkeypatch.setattr(verify, "read_rows", one_bit_off)
    assert main(["verify", str(checkpoint)]) == 1
    printed = capsys.readouterr()
    assert "layer 1: 1 of" in printed.err
    assert "different         1\n" in printed.out


@pytest.mark.parametrize("nan", [b"\xff\xff", b"\x81\x7f"], ids=["quiet", "signalling"])
def test_nan_in_a_row_is_damage(
    nan: bytes, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(checkpoint, copy)
    segment = ple_offload.inspect(copy).table().segments[1]
    with segment.path.open("r+b") as file:
        file.seek(segment.offset)
        file.write(nan)  # the first value of the segment's first row, which is always sampled
    assert main(["verify", str(copy)]) == 2
    assert "NaN or infinity in 1 of" in capsys.readouterr().err


def test_a_file_that_was_made_and_not_filled_is_found(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "hollow"
    shutil.copytree(checkpoint, copy)
    spec = ple_offload.inspect(copy).table()
    for segment in spec.segments:
        with segment.path.open("r+b") as file:
            file.seek(segment.offset)
            file.write(bytes(segment.num_rows * spec.row_bytes))
    assert main(["verify", str(copy)]) == 2
    printed = capsys.readouterr()
    assert "found nothing but zeros in" in printed.err
    assert "all zeros         3" in printed.out


def test_rows_and_seed_must_be_positive(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint), "--rows", "0"]) == 2
    assert "--rows" in capsys.readouterr().err
    assert main(["verify", str(checkpoint), "--seed", "-1"]) == 2
    assert "--seed: expected 0 or more, found -1" in capsys.readouterr().err
