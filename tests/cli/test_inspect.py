"""`inspect`: what a person and a program read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ple_offload.cli import main


def test_for_programs(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "path": str(checkpoint),
        "model_type": "qwen4_exp_text",
        "tables": [
            {
                "layer": 1,
                "family": "qwen_ple",
                "format": "bf16",
                "scale": None,
                "num_rows": 33024,
                "row_dim": 4,
                "row_bytes": 8,
                "rows_per_token": 16,
                "embed_dim": 64,
                "context_len": 2,
                "size_bytes": 33024 * 8,
                "num_segments": 4,
                "constants_stored": True,
            }
        ],
    }


def test_for_people_with_two_tables(make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(make_checkpoint(ple_layer_ids=[1, 2]))]) == 0
    text = capsys.readouterr().out
    assert "2 tables" in text
    assert "layer 0\n" in text
    assert "layer 1\n" in text
