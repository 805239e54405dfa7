"""The CUDA driver's one caller, with a driver that is a fake: refusals, devices, chunks, and memory that does not unpin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="devices are torch's")

from fake_driver import NAMES, SHIFT, FakeDriver  # noqa: E402
from ple_offload import CpuGpuSemaphore, cuda  # noqa: E402
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


def test_another_map_at_the_same_address_does_not_get_the_pages_of_the_first(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    """A table that was closed under its connector: the driver says so, which is better than rows of the old one."""
    first, second = object(), object()
    held = cuda.Registration(gpu, 4096, 100, read_only=True, owner=first)
    with pytest.raises(CudaError, match="cuMemHostRegister"):
        cuda.Registration(gpu, 4096, 100, read_only=True, owner=second)
    held.close()
    cuda.Registration(gpu, 4096, 100, read_only=True, owner=second).close()
    assert not fake.registered


def test_two_users_of_one_range_share_its_registration(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    """The driver refuses memory that is registered already: two connectors may read one table all the same."""
    one = cuda.Registration(gpu, 4096, 2 * GIB, read_only=True)
    other = cuda.Registration(gpu, 4096, 2 * GIB, read_only=True)
    assert other.device_address == one.device_address
    assert len([call for call in fake.calls if call[0] == "cuMemHostRegister"]) == 2  # one for each GiB
    one.close()
    one.close()
    assert len(fake.registered) == 2
    other.close()
    assert not fake.registered
    cuda.Registration(gpu, 4096, 2 * GIB, read_only=True).close()
    assert not fake.registered


def test_memory_that_does_not_unpin_is_logged_and_hides_no_error(
    fake: FakeDriver, gpu: cuda.Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refused = {"cuMemHostRegister": 2, "cuMemHostUnregister": 1}
    with pytest.raises(CudaError, match="cuMemHostRegister"):
        cuda.Registration(gpu, 4096, 2 * GIB, read_only=True)
    assert "cuMemHostUnregister" in caplog.text


def test_no_stream_memory_operations_is_said(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    fake.refused = {"cuStreamWriteValue64": 1, "cuStreamWaitValue64": 1}
    for call in (gpu.write_value, gpu.wait_value):
        with pytest.raises(CudaError, match="no stream memory operations"):
            call(1, 2, 3)


def test_a_device_is_found_by_its_uuid_without_torch(fake: FakeDriver) -> None:
    """Every call that needs a device is made under the context of that one; the caller's is current again afterwards."""
    fake.current = "the caller's"
    context = cuda.Context(NAMES[1])
    assert context.uuid() == NAMES[1]
    address = context.allocate(4096)
    stream = context.make_stream()
    context.fill(stream, address, 7, 4096)
    assert context.wait_for(stream, 0)
    assert (fake.bytes(address, 4096) == 7).all()
    context.end_stream(stream)
    context.free(address)
    assert fake.contexts == [0, 1]
    made = [call[0] for call in fake.calls].index("cuDevicePrimaryCtxRetain") + 1
    assert {call[2] for call in fake.calls[made:]} == {"context of 1"}
    context.close()
    assert fake.in_use() == []
    assert fake.current == "the caller's"


def test_a_uuid_that_is_not_there_is_said_with_those_that_are(fake: FakeDriver) -> None:
    with pytest.raises(
        CudaError, match=rf"GPU elsewhere: expected one of .* {NAMES[0]}, {NAMES[1]}\..*CUDA_VISIBLE_DEVICES"
    ):
        cuda.Context("elsewhere")
    assert fake.in_use() == []


def test_without_the_drivers_library_that_is_said(fake: FakeDriver) -> None:
    fake.no_library = True
    with pytest.raises(CudaError, match=r"cuInit on GPU .*libcuda\.so\.1.*route 'staged'"):
        cuda.Context(NAMES[0])


def test_memory_is_shared_by_64_plain_bytes(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    address = gpu.allocate(4096)
    handle = gpu.share(address)
    assert type(handle) is bytes
    assert len(handle) == cuda.HANDLE_BYTES == 64
    assert gpu.open_shared(handle) == address
    assert gpu.num_bytes_from(address) == 4096
    gpu.close_shared(address)
    with pytest.raises(UsageError, match="expected 64 bytes, found 63"):
        gpu.open_shared(handle[:-1])
    with pytest.raises(CudaError, match=r"cuIpcOpenMemHandle\(CUipcMemHandle, 0x1\) on cuda:3.*route 'staged'"):
        gpu.open_shared(bytes(64))


def test_a_wait_for_a_stream_ends(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    address, stream = gpu.allocate(64), gpu.make_stream()
    fake.hold = True
    gpu.fill(stream, address, 1, 64)
    assert not gpu.wait_for(stream, 0.05)
    fake.go()
    assert gpu.wait_for(stream, 0)


def test_a_semaphore_signals_and_waits_in_stream_order(fake: FakeDriver, gpu: cuda.Cuda) -> None:
    address, stream = gpu.allocate(64), gpu.make_stream()
    semaphore = CpuGpuSemaphore(gpu, address + 8)
    gpu.fill(stream, address, 0, 64)
    fake.hold = True
    semaphore.signal(stream, 5 << 48 | 3)
    semaphore.wait(stream, 5 << 48 | 3)
    word = fake.bytes(address + 8, 8).view("u8")
    assert word[0] == 0
    fake.go()
    assert word[0] == 5 << 48 | 3
    assert fake.calls[-1][1] == (stream, address + 8, 5 << 48 | 3, 1)  # 1: until it is equal
    with pytest.raises(UsageError, match="multiple of 8"):
        CpuGpuSemaphore(gpu, address + 4)


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
