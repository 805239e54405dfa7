"""`doctor`: complete with and without a checkpoint, and honest about what was set."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from checkpoint.tiny import write_default
from ple_offload.cli import doctor, main
from ple_offload.worker.main import open_tables
from ple_offload.worker.server import PleOffloadWorker

SECTIONS = ["versions", "settings", "memory", "huge pages", "processors", "compiled code", "workers"]


def test_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [*SECTIONS, "advice"]
    assert report["compiled code"]["threading layer"] in ("omp", "tbb", "workqueue")
    assert isinstance(report["advice"], list)


def test_workers_that_would_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kinds work, and who listens at the usual place: nobody, a worker, somebody else."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    advice: list[str] = []
    found = doctor.worker_facts(advice)
    assert (found["inline"], found["spawn"], found["serve"]) == ("works", "works", "works")
    assert found["default socket"] == f"unix:{tmp_path}/ple-offload/socket"
    assert found["there now"] == "nobody listens"
    worker = PleOffloadWorker(open_tables([write_default(tmp_path / "tiny")], tier="file"))
    worker.listen(found["default socket"])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert doctor.worker_facts(advice)["there now"] == f"worker process {os.getpid()}, tables of layers [1]"
    finally:
        worker.stop("the test is done")
        thread.join(10)
    assert not advice
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "ple-offload/socket"))
        silent.listen()
        assert "does not answer" in doctor.worker_facts(advice)["there now"]
    assert "stop that process" in advice[0]


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
