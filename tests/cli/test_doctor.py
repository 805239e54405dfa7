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
from ple_offload.cli import doctor, gpu, main
from ple_offload.worker.main import open_tables
from ple_offload.worker.server import PleOffloadWorker

SECTIONS = ["versions", "settings", "memory", "huge pages", "processors", "compiled code", "workers"]
NO_GPU = "none: torch sees no GPU; rows are delivered on the CPU"


def test_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    gpus = [section for section in report if section.startswith("GPU")]
    assert [section for section in report if section not in ("routes measured", *gpus)] == [*SECTIONS, "advice"]
    assert gpus
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


def put_a_gpu(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    """What doctor asks of torch.cuda and the driver, on a machine that has none."""
    import contextlib

    import torch

    from ple_offload import cuda

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a fake GPU")
    monkeypatch.setattr(cuda, "Cuda", lambda device, real=cuda.Cuda: real(device, lambda _: contextlib.nullcontext()))
    monkeypatch.setattr(cuda, "_driver", driver)
    monkeypatch.setattr(cuda, "kernel_driver_version", lambda: (560, 1))
    monkeypatch.setattr("ple_offload.connector.choose.kernel_driver_version", lambda: (560, 1))


def test_without_a_gpu_or_torch_there_is_one_section(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    advice: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.sections(advice) == {"GPU": {"routes": NO_GPU}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    assert "torch does not start: broken" in gpu.sections(advice)["GPU"]["routes"]
    assert len(advice) == 1
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch is not installed" in gpu.sections(advice)["GPU"]["routes"]


def test_what_a_gpu_can_do_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="without Triton no route can work, and doctor says only that")
    from fake_driver import FakeDriver
    from ple_offload import cuda

    driver = FakeDriver()
    put_a_gpu(monkeypatch, driver)
    monkeypatch.setattr(gpu, "measured", lambda advice: {"auto": "not here"})
    advice: list[str] = []
    found = gpu.sections(advice)["GPU 0"]
    assert (found["name"], found["driver"], found["staged"]) == ("a fake GPU", "560.1", "can work")
    assert "for reading only" in found["direct, tier ram"]
    assert (found["ipc"], driver.in_use()) == ("can work, if the worker sees this GPU", [])
    driver.attributes[cuda.ATTRIBUTES["read_only_host_register"]] = 1
    driver.refused["cuIpcGetMemHandle"] = 1
    found = gpu.sections(advice)["GPU 0"]
    assert found["direct, tier ram"] == "can work"
    assert "no: cuIpcGetMemHandle" in found["ipc"]
    assert driver.in_use() == []
    assert "driver 560.1 marks every page" in found["direct, tier file"]
    assert not advice


def test_a_broken_driver_breaks_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="without Triton no route can work, and doctor says only that")
    from fake_driver import FakeDriver

    driver = FakeDriver()
    driver.refused["cuDeviceGetAttribute"] = 1
    put_a_gpu(monkeypatch, driver)
    advice: list[str] = []
    found = gpu.sections(advice)  # measuring fails as well: there is no GPU
    assert "cuDeviceGetAttribute" in found["GPU 0"]["routes"]
    assert "not measured" in found["routes measured"]["auto"]
    assert [line.split(":")[0] for line in advice] == ["GPU 0", "GPU"]


def test_the_table_that_is_measured_is_one(tmp_path: Path) -> None:
    import ple_offload

    gpu.write_checkpoint(tmp_path, head_rows=50)
    with ple_offload.open_table(tmp_path, tier="file", threads=1) as table:
        assert table.embed_dim == gpu.EMBED_DIM
        assert table.gather([0, table.num_rows - 1]).any(axis=1).all()
