"""A CUDA driver that is none: it writes down what it is asked, and refuses what it is told to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

SHIFT = 1 << 45  # where the fake's device sees host memory, unless it is told another place


class Code(int):
    """A driver's answer: a number with a name."""

    name = "CUDA_ERROR_FAKE"


class FakeDriver:
    """Records calls with the device that was current; refuses the calls in `refused` from their n-th time on."""

    def __init__(self, shift: int = SHIFT) -> None:
        self.shift = shift
        self.calls: list[tuple[str, tuple[Any, ...], torch.device | None]] = []
        self.refused: dict[str, int] = {}
        self.registered: dict[int, tuple[int, int]] = {}
        self.attributes: dict[int, int] = {}
        self.current: torch.device | None = None

    @contextlib.contextmanager
    def activate(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def _answer(self, name: str, arguments: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        self.calls.append((name, arguments, self.current))
        count = sum(call[0] == name for call in self.calls)
        return (Code(801 if count >= self.refused.get(name, 1 << 30) else 0), *values)

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        answer = self._answer("cuMemHostRegister", (address, num_bytes, flags))
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

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuDeviceGetAttribute", (attribute, device), self.attributes.get(int(attribute), 0))

    def cuStreamWriteValue64(self, *arguments: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuStreamWriteValue64", arguments)
