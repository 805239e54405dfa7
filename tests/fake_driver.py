"""A CUDA driver without a GPU: device memory is host memory, streams do their work at once, every call is recorded.

One fake stands for the driver in an engine and in a worker that is a thread of the same process. Like the real one it
registers memory once, and refuses calls without a current device, copies outside allocations, and calls that a test
has chosen (`refused`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

SHIFT = 1 << 45  # where the fake's device sees host memory, unless it is told another place
NOT_READY = 600
ALREADY_REGISTERED = 712
UUIDS = [bytes(range(16 * i, 16 * i + 16)) for i in range(2)]
NAMES = ["00010203-0405-0607-0809-0a0b0c0d0e0f", "10111213-1415-1617-1819-1a1b1c1d1e1f"]


class Code(int):
    """A driver's answer: a number with a name."""

    name = "CUDA_ERROR_FAKE"


class Uuid:
    def __init__(self, text: bytes) -> None:
        self.bytes = text


class CUipcMemHandle:
    """64 bytes at an address; the fields' names differ from release to release of the bindings, `getPtr` does not."""

    def __init__(self, content: bytes = bytes(64)) -> None:
        self._content = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._content)


class FakeDriver:
    """calls: (name, arguments, the device that was current). refused: a call's name -> from which time on it fails.

    hold: streams keep what they are given until `go`, in order. no_library: nothing is found, as without an NVIDIA driver.
    """

    CUipcMemHandle = CUipcMemHandle

    def __init__(self, shift: int = SHIFT) -> None:
        self.shift = shift
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self.refused: dict[str, int] = {}
        self.registered: dict[int, tuple[int, int]] = {}
        self.attributes: dict[int, int] = {}
        self.allocated: dict[int, np.ndarray] = {}
        self.opened: list[int] = []
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.contexts = [0, 0]  # how often each is retained
        self.hold = False
        self.no_library = False
        self._thread = threading.local()
        self._lock = threading.Lock()

    # ---- what is current

    @property
    def current(self) -> Any:
        return getattr(self._thread, "current", None)

    @current.setter
    def current(self, device: Any) -> None:
        self._thread.current = device

    @contextlib.contextmanager
    def activate(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:  # noqa: N802
        self._thread.before = [*getattr(self._thread, "before", []), self.current]
        self.current = context
        return (Code(0),)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        context, self.current = self.current, self._thread.before.pop()
        return Code(0), context

    # ---- answers

    def _answer(self, name: str, arguments: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        if self.no_library:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        with self._lock:
            self.calls.append((name, arguments, self.current))
            count = sum(call[0] == name for call in self.calls)
        return (Code(801 if count >= self.refused.get(name, 1 << 30) else 0), *values)

    def in_use(self) -> list[Any]:
        """What has not been given back."""
        return [*self.registered, *self.allocated, *self.opened, *self.streams, *filter(None, self.contexts)]

    def bytes(self, address: int, num_bytes: int) -> np.ndarray:
        """Device memory as uint8; raises IndexError outside allocations."""
        for base, memory in self.allocated.items():
            if base <= address and address + num_bytes <= base + memory.size:
                return memory[address - base : address - base + num_bytes]
        raise IndexError(f"{num_bytes} bytes at {address:#x} are not allocated")

    def go(self) -> None:
        """Do what streams hold, and hold no more."""
        self.hold = False
        for work in self.streams.values():
            while work:
                work.pop(0)()

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        if self.hold:
            self.streams[stream].append(work)
        else:
            work()

    # ---- devices and contexts

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuInit", (flags,))

    def cuDeviceGetCount(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuDeviceGetCount", (), len(UUIDS))

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuDeviceGet", (ordinal,), ordinal)

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuDeviceGetUuid", (device,), Uuid(UUIDS[device]))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuDeviceGetAttribute", (attribute, device), self.attributes.get(int(attribute), 0))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuDevicePrimaryCtxRetain", (device,), f"context of {device}")
        self.contexts[device] += not answer[0]
        return answer

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuDevicePrimaryCtxRelease", (device,))
        self.contexts[device] -= not answer[0]
        return answer

    # ---- host memory

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemHostRegister", (address, num_bytes, flags))
        if any(at < address + num_bytes and address < at + size for at, (size, _) in self.registered.items()):
            return (Code(ALREADY_REGISTERED),)
        if not answer[0]:
            self.registered[address] = (num_bytes, flags)
        return answer

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemHostUnregister", (address,))
        if not answer[0]:
            del self.registered[address]
        return answer

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuMemHostGetDevicePointer", (address, flags), address + self.shift)

    # ---- device memory

    def cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:  # noqa: N802
        memory = np.full(num_bytes + 64, 0xAB, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:num_bytes]
        answer = self._answer("cuMemAlloc", (num_bytes,), memory.ctypes.data)
        if not answer[0]:
            self.allocated[memory.ctypes.data] = memory
        return answer

    def cuMemFree(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemFree", (address,))
        if not answer[0]:
            del self.allocated[address]
        return answer

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        content = b"\xff" * 56 + address.to_bytes(8, "little")
        return self._answer("cuIpcGetMemHandle", (address,), CUipcMemHandle(content))

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> tuple[Any, ...]:  # noqa: N802
        content = ctypes.string_at(handle.getPtr(), 64)
        address = int.from_bytes(content[56:], "little")
        answer = self._answer("cuIpcOpenMemHandle", (handle, flags), address)
        if content[:56] != b"\xff" * 56 or address not in self.allocated:
            return Code(201), 0
        if not answer[0]:
            self.opened.append(address)
        return answer

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuIpcCloseMemHandle", (address,))
        if not answer[0]:
            self.opened.remove(address)
        return answer

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuMemGetAddressRange", (address,), address, self.allocated[address].size)

    # ---- streams

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        stream = 1000 + len(self.calls)
        answer = self._answer("cuStreamCreate", (flags,), stream)
        if not answer[0]:
            self.streams[stream] = []
        return answer

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuStreamDestroy", (stream,))
        if not answer[0]:
            del self.streams[stream]
        return answer

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuStreamQuery", (stream,))
        return (Code(NOT_READY),) if not answer[0] and self.streams[stream] else answer

    def cuMemsetD8Async(self, address: int, value: int, num_bytes: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemsetD8Async", (address, value, num_bytes, stream))
        if not answer[0]:
            self._enqueue(stream, lambda: self.bytes(address, num_bytes).fill(value))
        return answer

    def cuMemcpyHtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemcpyHtoDAsync", (target, source, num_bytes, stream))
        if not answer[0]:
            place = self.bytes(target, num_bytes)
            self._enqueue(stream, lambda: ctypes.memmove(place.ctypes.data, source, num_bytes) and None)
        return answer

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuStreamWriteValue64", (stream, address, value, flags))
        if not answer[0] and stream in self.streams:
            place = self.bytes(address, 8).view(np.uint64)
            self._enqueue(stream, lambda: place.fill(value))
        return answer

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuStreamWaitValue64", (stream, address, value, flags))
