"""The only caller of the CUDA driver. Each failure names its call, the driver's reason and the remedy.

Everything runs under the device the caller names, whatever the current one is. `set_driver` puts another driver in the
place of the real one, for tests on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ple_offload.errors import CudaError, UsageError

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30  # of one registration: some drivers refuse larger ones
PAGE_BYTES = 4096
# cuMemHostRegister
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 0x1, 0x2, 0x8
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


class Cuda:
    """The driver's calls under one device.

    activate: makes a device the current one for a `with` block; torch's, except in tests without a GPU.
    """

    def __init__(
        self, device: torch.device, activate: Callable[[torch.device], AbstractContextManager[Any]] | None = None
    ) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._activate = activate or torch.cuda.device
        if activate is None:
            with self.current():
                torch.zeros(1, device=self.device)  # the primary context

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """This device as the current one."""
        with self._activate(self.device):
            yield

    def attribute(self, name: str) -> int:
        """A device attribute by its name in ATTRIBUTES."""
        return int(self._call("cuDeviceGetAttribute", ATTRIBUTES[name], self.device.index or 0))

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

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Write a 64-bit word in stream order, after all that the stream did before."""
        self._call("cuStreamWriteValue64", stream, device_address, value, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        api = driver()
        if name == "cuDeviceGetAttribute":
            kind = getattr(api, "CUdevice_attribute", int)
            arguments = (kind(arguments[0]), arguments[1])
        with self.current():
            result = getattr(api, name)(*arguments)
        code, *values = result if isinstance(result, tuple) else (result,)
        if int(code) != 0:
            reason = getattr(code, "name", str(code))
            raise CudaError(
                f"{name}{tuple(a if isinstance(a, str) else hex(int(a)) for a in arguments)} on {self.device}: {reason}. "
                f"{_REMEDIES.get(name, '')}".rstrip()
            )
        return values[0] if values else None


_REMEDIES = {
    "cuMemHostRegister": "The memory cannot be page-locked: lower the table's size or use route 'staged'.",
    "cuStreamWriteValue64": "This GPU or driver has no stream memory operations.",
}


class Registration:
    """Host memory registered with the driver, without replacing its storage; page-rounded, in chunks.

    device_address is where the device sees `address`. Where it uses the host's page tables that is the same, and nothing is
    registered. Raises CudaError and leaves nothing registered behind. `close` may be
    called twice, once nothing can touch the memory any more; what it cannot unregister is logged.
    """

    def __init__(self, cuda: Cuda, address: int, num_bytes: int, *, read_only: bool) -> None:
        self._cuda = cuda
        self._chunks: list[int] = []
        self.device_address = address
        if cuda.reads_host_memory:
            return
        first = address // PAGE_BYTES * PAGE_BYTES
        end = -(-(address + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        try:
            offset: int | None = None
            for chunk in range(first, end, CHUNK_BYTES):
                cuda.register_host(chunk, min(CHUNK_BYTES, end - chunk), read_only=read_only)
                self._chunks.append(chunk)
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
            chunk = self._chunks.pop()
            try:
                self._cuda.unregister_host(chunk)
            except CudaError as error:
                log.error("%s", error)


def kernel_driver_version(root: str = "/") -> tuple[int, int] | None:
    """(major, minor) of the NVIDIA kernel driver, or None where it does not say."""
    try:
        text = (Path(root) / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
