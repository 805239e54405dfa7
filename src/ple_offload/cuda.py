"""The only caller of the CUDA driver. Each failure names its call, the driver's reason and the remedy.

Everything runs under the device the caller names, whatever the current one is. In an engine's process that device is
torch's (`Cuda`); a process without torch finds it by its UUID and holds its primary context (`Context`). `set_driver` puts
another driver in the place of the real one, for tests on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ple_offload.errors import CudaError, UsageError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30  # of one registration: some drivers refuse larger ones
PAGE_BYTES = 4096

HANDLE_BYTES = 64  # of device memory that another process may open
LOOK_EVERY_S = 0.0001  # at a stream that somebody waits for

# cuMemHostRegister
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 0x1, 0x2, 0x8
_NON_BLOCKING = 0x1  # cuStreamCreate: does not wait for the default stream
_EQUAL = 0x1  # cuStreamWaitValue64
_PEER_ACCESS = 0x1  # cuIpcOpenMemHandle takes no other flags
_NOT_READY = 600  # CUresult
# CUdevice_attribute
ATTRIBUTES = {
    "integrated": 18,
    "can_map_host_memory": 19,
    "unified_addressing": 41,
    "host_native_atomics": 86,
    "pageable_memory_access": 88,
    "can_use_host_pointer": 91,
    "uses_host_page_tables": 100,
    "read_only_host_register": 113,
    "kernel_time_limit": 17,
}

_driver: Any = None
_said: set[str] = set()


def set_driver(driver: Any) -> Any:
    """Use another driver, an object with the same calls; returns the one before (None: the real one, not yet loaded)."""
    global _driver
    before, _driver = _driver, driver
    return before


def driver() -> Any:
    """The driver in use; UsageError where cuda-bindings is not installed."""
    global _driver
    if _driver is None:
        try:
            from cuda.bindings import driver as real
        except ImportError as error:
            raise UsageError("GPU routes need cuda-bindings: pip install 'ple-offload[cuda]'.") from error
        _driver = real
    return _driver


@dataclass(frozen=True)
class Gpu:
    """A device without torch: its number in this process, and its UUID."""

    index: int
    uuid: str

    def __str__(self) -> str:
        return f"GPU {self.uuid}"


class Cuda:
    """The driver's calls under one device.

    activate: makes a device the current one for a `with` block; by default torch's, which makes the context.
    Addresses and streams are plain integers. Every call raises CudaError where the driver refuses it.
    """

    def __init__(
        self, device: torch.device | Gpu, activate: Callable[[Any], AbstractContextManager[Any]] | None = None
    ) -> None:
        self._ordinal = device.index or 0
        if activate is None:
            import torch

            device, activate = torch.device("cuda", self._ordinal), _activate
            with activate(device):
                torch.zeros(1, device=device)  # the primary context
        self.device: Any = device
        self._activate = activate

    def current(self) -> AbstractContextManager[Any]:
        """This device as the current one, for a `with` block."""
        return self._activate(self.device)

    def attribute(self, name: str) -> int:
        """A device attribute by its name in ATTRIBUTES."""
        return int(self._call("cuDeviceGetAttribute", ATTRIBUTES[name], self._ordinal))

    def uuid(self) -> str:
        """What names the device in every process: 36 characters, as nvidia-smi prints them behind "GPU-"."""
        return _uuid(self._call("cuDeviceGetUuid", self._ordinal))

    # ---- host memory

    @cached_property
    def reads_host_memory(self) -> bool:
        """Whether the device goes through the host's page tables (GB10, Grace): nothing is registered there.

        Untested: no such machine was at hand. Said once in a process.
        """
        shared = bool(self.attribute("uses_host_page_tables"))
        if shared and "host page tables" not in _said:
            _said.add("host page tables")
            log.warning(
                "%s uses the host's page tables: memory is not page-locked but read as it is mapped. This is untested; "
                "compare what you get with an ordinary lookup.",
                self.device,
            )
        return shared

    def register_host(self, address: int, num_bytes: int, *, read_only: bool) -> None:
        flags = _PORTABLE | _DEVICE_MAP | (_READ_ONLY if read_only else 0)
        self._call("cuMemHostRegister", address, num_bytes, flags)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_address(self, address: int) -> int:
        """Where the device sees a registered host address."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    # ---- device memory, also another process's

    def allocate(self, num_bytes: int) -> int:
        """Memory of the device, an allocation of its own; returns its address."""
        return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def share(self, address: int) -> bytes:
        """The handle, HANDLE_BYTES long, by which another process opens an allocation."""
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. UsageError for bytes that cannot be a handle."""
        if len(handle) != HANDLE_BYTES:
            raise UsageError(f"handle: expected {HANDLE_BYTES} bytes, found {len(handle)}.")
        record = driver().CUipcMemHandle()
        ctypes.memmove(int(record.getPtr()), handle, HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", record, _PEER_ACCESS))

    def close_shared(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def num_bytes_from(self, address: int) -> int:
        """How many bytes an allocation has from this address on."""
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        return int(base) + int(num_bytes) - address

    # ---- in stream order

    def make_stream(self) -> int:
        """A stream that waits for no other."""
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def fill(self, stream: int, device_address: int, value: int, num_bytes: int) -> None:
        self._call("cuMemsetD8Async", device_address, value, num_bytes, stream)

    def copy_to_device(self, stream: int, device_address: int, address: int, num_bytes: int) -> None:
        """Copy host memory; asynchronous where it is registered."""
        self._call("cuMemcpyHtoDAsync", device_address, address, num_bytes, stream)

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Write a 64-bit word in stream order, after all that the stream did before."""
        self._call("cuStreamWriteValue64", stream, device_address, value, 0)

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        """Hold the stream until a 64-bit word is this value, for ever if it never is."""
        self._call("cuStreamWaitValue64", stream, device_address, value, _EQUAL)

    def wait_for(self, stream: int, limit_s: float) -> bool:
        """Wait until the stream has done what it was given; False when that takes longer than limit_s."""
        end_s = time.monotonic() + limit_s
        while self._call("cuStreamQuery", stream, or_code=_NOT_READY) == _NOT_READY:
            if time.monotonic() > end_s:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _call(self, name: str, *arguments: Any, or_code: int = 0) -> Any:
        driver()  # before a device is made current: where there is none, that is what must be said
        with self.current():
            return _call(self.device, name, *arguments, or_code=or_code)


class Context(Cuda):
    """A device in a process without torch: the driver's primary context of the device with this UUID, until `close`.

    Raises CudaError where there is no driver, no such device or no room for a context (400 to 700 MiB of its memory), and
    UsageError where cuda-bindings is not installed.
    """

    def __init__(self, wanted: str) -> None:
        where = f"GPU {wanted}"
        _call(where, "cuInit", 0)
        numbers = [_call(where, "cuDeviceGet", i) for i in range(_call(where, "cuDeviceGetCount"))]
        uuids = [_uuid(_call(where, "cuDeviceGetUuid", number)) for number in numbers]
        if wanted not in uuids:
            raise CudaError(
                f"{where}: expected one of the GPUs that this process sees, found {', '.join(uuids) or 'none'}. "
                "Make it visible to the worker (CUDA_VISIBLE_DEVICES, the container's devices), or use route 'staged'."
            )
        index = uuids.index(wanted)
        self._device_number = numbers[index]
        self._context = _call(where, "cuDevicePrimaryCtxRetain", self._device_number)
        super().__init__(Gpu(index, wanted), self._push)

    @contextlib.contextmanager
    def _push(self, device: Gpu) -> Iterator[None]:
        _call(device, "cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _call(device, "cuCtxPopCurrent")

    def close(self) -> None:
        """Give the context back; nothing made under it may be in use any more."""
        _call(self.device, "cuDevicePrimaryCtxRelease", self._device_number)


def _activate(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one of torch; where it is already, as in nearly every step, this costs next to nothing."""
    import torch

    return _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device)


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def _call(where: object, name: str, *arguments: Any, or_code: int = 0) -> Any:
    """Call the driver; what it answers: a value, a tuple of values, or its code where it has none.

    or_code: another code that is no failure.
    """
    api = driver()
    if name == "cuDeviceGetAttribute":
        kind = getattr(api, "CUdevice_attribute", int)
        arguments = (kind(arguments[0]), arguments[1])
    try:
        result = getattr(api, name)(*arguments)
    except RuntimeError as error:  # how the bindings say that they find no driver
        raise CudaError(
            f"{name} on {where}: {error}. Make the NVIDIA driver's libcuda.so.1 visible here, or use route 'staged'."
        ) from error
    code, *values = result if isinstance(result, tuple) else (result,)
    if int(code) not in (0, or_code):
        reason = getattr(code, "name", str(code))
        shown = ", ".join(map(_shown, arguments))
        raise CudaError(f"{name}({shown}) on {where}: {reason}. {_REMEDIES.get(name, '')}".rstrip())
    if not values:
        return int(code)
    return values[0] if len(values) == 1 else tuple(values)


def _shown(argument: Any) -> str:
    try:
        return hex(int(argument))
    except (TypeError, ValueError):  # a record
        return type(argument).__name__


def _uuid(found: Any) -> str:
    return str(uuid.UUID(bytes=bytes(found.bytes)))


_REMEDIES = {
    "cuMemHostRegister": "The memory cannot be page-locked: lower the table's size or use route 'staged'.",
    "cuStreamWriteValue64": "This GPU or driver has no stream memory operations.",
    "cuStreamWaitValue64": "This GPU or driver has no stream memory operations.",
    "cuInit": "This process sees no usable NVIDIA GPU; use route 'staged'.",
    "cuDevicePrimaryCtxRetain": "A context takes 400 to 700 MiB of the GPU's memory; make room, or use route 'staged'.",
    "cuMemAlloc": "Lower max_num_tokens or max_concurrent_batches, or use route 'staged'.",
    "cuIpcGetMemHandle": "Route 'ipc' shares GPU memory between processes, which is not allowed here; use route 'staged'.",
    "cuIpcOpenMemHandle": "Route 'ipc': worker and engine must be two processes of one host that may share GPU memory "
    "(one user, one IPC namespace, the same GPU); else use route 'staged'.",
}


def quietly(call: Callable[..., Any], *arguments: Any) -> None:
    """Call something that gives back; log what the driver refuses, for nothing can be done about it."""
    try:
        call(*arguments)
    except CudaError as error:
        log.error("%s", error)


class CpuGpuSemaphore:
    """A 64-bit word that several processes reach: in shared device memory, or in host memory that all have registered.

    device_address: of the word, a multiple of 8, as the device of `cuda` sees it. It is compared for equality: with values
    that only grow it needs no resetting.
    """

    def __init__(self, cuda: Cuda, device_address: int) -> None:
        if device_address % 8:
            raise UsageError(f"device_address: expected a multiple of 8, found {device_address:#x}.")
        self._cuda = cuda
        self._address = device_address

    def signal(self, stream: int, value: int) -> None:
        """Store `value` when the stream comes here, after all that it did before."""
        self._cuda.write_value(stream, self._address, value)

    def wait(self, stream: int, value: int) -> None:
        """Hold the stream until the word is `value`.

        For tools and tests: nothing bounds it, and a signaller that dies leaves the stream hanging. A model waits by a
        kernel that also looks at the clock and at a poison word.
        """
        self._cuda.wait_value(stream, self._address, value)


class Registration:
    """Host memory registered with the driver, without replacing its storage; page-rounded, in chunks.

    device_address is where the device sees `address`. Where it uses the host's page tables that is the same, and nothing is
    registered. The driver takes memory only once, so users of the same range share a registration, which ends with the last
    one: two connectors may read one table. Raises CudaError and leaves nothing registered behind. `close` may be called
    twice, once nothing can touch the memory any more; what it cannot unregister is logged.

    owner: what keeps the memory mapped. Only users of the same owner share: an address alone may be another map's by now,
    while the device still reads the pages of the first.
    """

    def __init__(self, cuda: Cuda, address: int, num_bytes: int, *, read_only: bool, owner: object = None) -> None:
        self._cuda = cuda
        self._chunks: list[_Chunk] = []
        self.device_address = address
        if cuda.reads_host_memory:
            return
        first = address // PAGE_BYTES * PAGE_BYTES
        end = -(-(address + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        try:
            offset: int | None = None
            for chunk in range(first, end, CHUNK_BYTES):
                key = _Chunk(driver(), chunk, min(CHUNK_BYTES, end - chunk), read_only, owner)
                with _registering:
                    if key not in _registered:
                        cuda.register_host(chunk, key.num_bytes, read_only=read_only)
                    _registered[key] += 1
                self._chunks.append(key)
                moved = cuda.device_address(chunk) - chunk
                if offset is not None and moved != offset:
                    raise CudaError(
                        f"cuMemHostGetDevicePointer on {cuda.device}: chunks of one range lie apart on the device."
                    )
                offset = moved
            self.device_address = address + (offset or 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._chunks:
            key = self._chunks.pop()
            with _registering:
                _registered[key] -= 1
                if not _registered[key]:
                    del _registered[key]
                    quietly(self._cuda.unregister_host, key.address)


class _Chunk(NamedTuple):
    driver: Any
    address: int
    num_bytes: int
    read_only: bool
    owner: object


_registered: Counter[_Chunk] = Counter()  # how many use each chunk
_registering = threading.Lock()


def kernel_driver_version(root: str = "/") -> tuple[int, int] | None:
    """(major, minor) of the NVIDIA kernel driver, or None where it does not say."""
    try:
        text = (Path(root) / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
