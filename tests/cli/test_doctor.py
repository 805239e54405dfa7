"""`doctor`: complete with and without a checkpoint, and honest about what was set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ple_offload.cli import main

SECTIONS = ["versions", "settings", "memory", "huge pages", "processors", "compiled code"]


def test_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [*SECTIONS, "advice"]
    assert report["compiled code"]["threading layer"] in ("omp", "tbb", "workqueue")
    assert isinstance(report["advice"], list)


def test_with_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    for part in [*SECTIONS, "layer 1", "tier", "filesystem", "what to change"]:
        assert part in text


def test_settings_show_their_origin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PLE_OFFLOAD_THREADS", "3")
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    assert shown["PLE_OFFLOAD_THREADS"] == "3 (from the environment)"
    assert shown["PLE_OFFLOAD_LOG"] == "warning (default)"


def test_where_compiled_code_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(["doctor"]) == 0
    assert "numba cannot be imported" in capsys.readouterr().out


def test_a_path_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/nowhere/at/all"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err
