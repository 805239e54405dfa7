"""The CUDA driver's one caller, with a driver that is a fake: refusals, devices, chunks, and memory that does not unpin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="devices are torch's")

from fake_driver import SHIFT, FakeDriver  # noqa: E402
from ple_offload import cuda  # noqa: E402
from ple_offload.errors import CudaError, UsageError  # noqa: E402

GIB = 1 << 30


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    before = cuda.set_driver(driver)
    yield driver
    cuda.set_driver(before)


@pytest.fixture
def gpu(fake: FakeDriver) -> cuda.Cuda:
    return cuda.Cuda(torch.device("cuda", 3), fake.activate)


def test_every_call_is_made_under_the_device_whatever_the_current_one_is(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    fake.current = torch.device("cuda", 0)
    registration = cuda.Registration(gpu, 4096, 100, read_only=True)
    gpu.write_value(1, 2, 3)
    gpu.attribute("integrated")
    registration.close()
    assert len(fake.calls) == 6
    assert {call[2] for call in fake.calls} == {torch.device("cuda", 3)}
    assert fake.current == torch.device("cuda", 0)
    assert fake.calls[4][1] == (cuda.ATTRIBUTES["integrated"], 3)


def test_ranges_are_rounded_to_pages_and_cut_into_chunks(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    registration = cuda.Registration(gpu, 5000, 2 * GIB, read_only=True)
    assert registration.device_address == 5000 + SHIFT
    starts = sorted(fake.registered)
    assert starts == [4096, 4096 + GIB, 4096 + 2 * GIB]
    assert sum(size for size, _ in fake.registered.values()) == 2 * GIB + 4096
    assert {flags for _, flags in fake.registered.values()} == {0x1 | 0x2 | 0x8}
    registration.close()
    registration.close()
    assert not fake.registered


def test_writable_memory_is_not_registered_for_reading_only(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    cuda.Registration(gpu, 4096, 100, read_only=False)
    assert fake.registered == {4096: (4096, 0x1 | 0x2)}


def test_a_refused_chunk_gives_the_earlier_ones_back_and_names_the_call(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    fake.refused["cuMemHostRegister"] = 2
    with pytest.raises(CudaError, match=r"cuMemHostRegister\(.*\) on cuda:3: CUDA_ERROR_FAKE\. .*route 'staged'"):
        cuda.Registration(gpu, 4096, 2 * GIB, read_only=True)
    assert not fake.registered


def test_memory_that_does_not_unpin_is_logged_and_hides_no_error(
    fake: FakeDriver, gpu: cuda.Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refused = {"cuMemHostRegister": 2, "cuMemHostUnregister": 1}
    with pytest.raises(CudaError, match="cuMemHostRegister"):
        cuda.Registration(gpu, 4096, 2 * GIB, read_only=True)
    assert "cuMemHostUnregister" in caplog.text


def test_no_stream_memory_operations_is_said(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    fake.refused["cuStreamWriteValue64"] = 1
    with pytest.raises(CudaError, match="no stream memory operations"):
        gpu.write_value(1, 2, 3)


def test_where_the_device_uses_host_page_tables_nothing_is_registered_and_it_is_said_once(
    fake: FakeDriver, gpu: cuda.Cuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_said", set())
    fake.attributes[cuda.ATTRIBUTES["uses_host_page_tables"]] = 1
    for read_only in (True, False):
        registration = cuda.Registration(gpu, 5000, 2 * GIB, read_only=read_only)
        assert registration.device_address == 5000
        registration.close()
    assert not fake.registered
    assert {call[0] for call in fake.calls} == {"cuDeviceGetAttribute"}
    assert caplog.text.count("untested") == 1


def test_the_kernel_drivers_version_is_read_where_it_stands(tmp_path: Path) -> None:
    assert cuda.kernel_driver_version(str(tmp_path)) is None
    place = tmp_path / "proc/driver/nvidia/version"
    place.parent.mkdir(parents=True)
    place.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
    )
    assert cuda.kernel_driver_version(str(tmp_path)) == (580, 159)


def test_without_cuda_bindings_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    before = cuda.set_driver(None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        with pytest.raises(UsageError, match=r"pip install 'ple-offload\[cuda\]'"):
            cuda.driver()
    finally:
        cuda.set_driver(before)
