"""The design where another process copies into this one's GPU memory: event, message, `index_select`, CUDA IPC, flag.

As engines with an embedding service build it, with one difference: the message goes over a unix socket, because the
machine has no ZeroMQ. One step:

    here    row numbers into shared page-locked memory, an event behind them; a thread waits for it and sends a message
    there   `torch.index_select` into page-locked memory; on its stream: wait for flag 0, copy to here, flag 1
    here    on the model's stream: wait for flag 1, flag 0, decode

A stream that waits for a flag waits for ever. So when the other process dies, a thread here raises the flag: the result is
wrong then, and is found to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import torch
from batches import MAX_TOKENS, Batch
from contenders import DEVICE, Contender, Decoder
from on_device import words_of
from world import ROWS_PER_TOKEN, World

from ple_offload.cuda import Cuda, Registration, driver
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping

MAX_ROWS = MAX_TOKENS * ROWS_PER_TOKEN
FLAG_BYTES = 256  # the flag lies before the rows, in the same allocation
HANDLE_BYTES = 64
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
START_LIMIT_S = 120.0


def _call(name: str, *arguments: Any) -> Any:
    code, *values = getattr(driver(), name)(*arguments)
    if int(code) != 0:
        raise RuntimeError(f"{name}: {getattr(code, 'name', code)}")
    return values[0] if values else None


class _DeviceWords:
    """int64 words [rows, words] at a device address, for `torch.as_tensor`."""

    def __init__(self, address: int, rows: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, words),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
        }


class CrossProcess(Contender):
    """See the module; this side."""

    captured = False

    def __init__(self, world: World, decode: Decoder) -> None:
        self._decode = decode
        self._resources = resources = contextlib.ExitStack()
        try:
            self._start(world, resources)
        except BaseException:
            resources.close()
            raise

    def _start(self, world: World, resources: contextlib.ExitStack) -> None:
        torch.zeros(1, device=DEVICE)  # the primary context
        self._closing = False
        ids_fd = memfd.create("row numbers", MAX_ROWS * 8)
        resources.callback(os.close, ids_fd)
        ids = Mapping(ids_fd, MAX_ROWS * 8, writable=True, what="row numbers")
        resources.callback(ids.close)
        registration = Registration(Cuda(DEVICE), ids.address, ids.num_bytes, read_only=False)
        resources.callback(registration.close)
        self._ids = torch.from_numpy(ids.view().view(np.int64))
        buffer = int(_call("cuMemAlloc", FLAG_BYTES + MAX_ROWS * world.spec.row_bytes))
        resources.callback(_call, "cuMemFree", buffer)
        _call("cuMemsetD32", buffer, 0, FLAG_BYTES // 4)
        self._flag = buffer
        shape = (MAX_ROWS, self._decode.words)
        self._stored = torch.as_tensor(_DeviceWords(buffer + FLAG_BYTES, *shape), device=DEVICE)
        handle = _call("cuIpcGetMemHandle", buffer)
        torch.cuda.synchronize()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        resources.callback(self._socket.close)
        options = {
            "fd": world.store.fd,
            "kind": world.kind,
            "rows": world.wanted_rows,
            "huge": world.huge,
            "ids_fd": ids_fd,
            "socket": theirs.fileno(),
            "threads": torch.get_num_threads(),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                pass_fds=[world.store.fd, ids_fd, theirs.fileno()],
            )
        resources.callback(self._end)
        self._socket.settimeout(START_LIMIT_S)
        self._socket.send(ctypes.string_at(handle.getPtr(), HANDLE_BYTES))
        if not self._socket.recv(16):
            raise RuntimeError("the other process died while starting; its error is on stderr.")
        self._events = [torch.cuda.Event() for _ in range(4)]
        self._step = 0
        self._queue: queue.Queue[tuple[torch.cuda.Event, int] | None] = queue.Queue()
        threading.Thread(target=self._send, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = batch.rows.view(-1)
        count = rows.numel()
        stream = torch.cuda.current_stream()
        self._ids[:count].copy_(rows, non_blocking=True)
        event = self._events[self._step % len(self._events)]
        self._step += 1
        event.record(stream)
        self._queue.put((event, count))
        _call("cuStreamWaitValue32", stream.cuda_stream, self._flag, 1, EQUAL)
        _call("cuStreamWriteValue32", stream.cuda_stream, self._flag, 0, 0)
        if self._decode.scale is None:  # nothing to compute, but the result must outlive the next step
            return self._decode(self._stored[:count].clone())
        return self._decode(self._stored[:count])

    def finish(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the other process ended with status {self._process.returncode}.")

    def describe(self) -> dict[str, Any]:
        return {"torch_threads": torch.get_num_threads(), "message": "unix socket"}

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            event, count = item
            event.synchronize()
            with contextlib.suppress(OSError):  # `_watch` deals with its death
                self._socket.send(struct.pack("<q", count))

    def _watch(self) -> None:
        self._process.wait()
        if not self._closing:
            with torch.cuda.device(DEVICE):
                stream = torch.cuda.Stream()
                while not self._closing and not torch.cuda.current_stream().query():
                    _call("cuStreamWriteValue32", stream.cuda_stream, self._flag, 1, 0)
                    stream.synchronize()

    def _end(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._resources.close()


def serve(options: dict[str, Any]) -> None:
    """The other side, until the socket ends."""
    link = socket.socket(fileno=options["socket"])
    torch.set_num_threads(options["threads"])
    torch.zeros(1, device=DEVICE)
    world = World.over(options["fd"], options["kind"], options["rows"], huge=options["huge"], threads=1)
    table = words_of(world)
    handle = driver().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), link.recv(HANDLE_BYTES), HANDLE_BYTES)
    buffer = int(_call("cuIpcOpenMemHandle", handle, 1))
    ids = torch.frombuffer(mmap.mmap(options["ids_fd"], MAX_ROWS * 8), dtype=torch.int64)
    staged = torch.empty((MAX_ROWS, table.shape[1]), dtype=torch.int64, pin_memory=True)
    target = torch.as_tensor(_DeviceWords(buffer + FLAG_BYTES, *staged.shape), device=DEVICE)
    stream = torch.cuda.Stream()
    link.send(b"ready")
    while message := link.recv(16):
        (count,) = struct.unpack("<q", message)
        # the copy of the step before may still read what is about to be overwritten
        stream.synchronize()
        torch.index_select(table, 0, ids[:count], out=staged[:count])
        with torch.cuda.stream(stream):
            _call("cuStreamWaitValue32", stream.cuda_stream, buffer, 0, EQUAL)
            target[:count].copy_(staged[:count], non_blocking=True)
            _call("cuStreamWriteValue32", stream.cuda_stream, buffer, 1, 0)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
