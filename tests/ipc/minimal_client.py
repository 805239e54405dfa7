"""A client written from docs/PROTOCOL.md alone. It imports nothing of the package: that is its point.

Use: client = Client("unix:/path", layer=1, max_num_tokens=64); step = client.publish(ids); client.wait(step, len(ids)).
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import platform
import select
import socket
import struct
import time

import msgspec
import numpy as np

PAGE = 4096
CODE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
ANNOUNCED, RELEASED, WAITERS = 0, 64, 128
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]


class RefusedError(Exception):
    """The worker has refused, or ended the connection."""


class StepFailedError(Exception):
    """The worker cannot serve this step."""


def up(x: int, n: int) -> int:
    return -(-x // n) * n


class Client:
    def __init__(
        self,
        address: str,
        *,
        layer: int,
        max_num_tokens: int,
        max_num_reqs: int = 4,
        slots: int = 2,
        request: str = "tokens",
        output: str = "stored",
        session: str = "minimal",
        limit_s: float = 30.0,
    ) -> None:
        self.failed: dict[int, str] = {}  # step -> reason
        self.limit_s, self.request, self.slots = limit_s, request, slots
        self.max_num_tokens, self.max_num_reqs = max_num_tokens, max_num_reqs
        self.sock = connect(address, limit_s)
        try:
            self.greet(layer, output, session)
        except BaseException:
            self.sock.close()
            raise

    def greet(self, layer: int, output: str, session: str) -> None:
        self.send({"type": "Ask", "version": 2, "checkpoint": ""})
        facts, _ = self.expect("Facts")
        self.facts = next(x for x in facts["layers"] if x["layer"] == layer)
        self.context_len = self.facts["context_len"]
        self.rows = self.facts["rows_per_token"]
        row_bytes = self.facts["row_dim"] * CODE_BYTES[self.facts["format"] if output == "stored" else output]
        self.token_bytes = self.rows * row_bytes
        self.lay_out()
        fd = os.memfd_create("region", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, self.size)
        os.posix_fallocate(fd, 0, self.size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
        self.memory = mmap.mmap(fd, self.size)
        self.doorbell = os.eventfd(0, os.EFD_CLOEXEC)
        hello = {
            "type": "Hello",
            "version": 2,
            "checkpoint": "",
            "session": session,
            "step": 0,
            "worker_id": 0,
            "dp_rank": 0,
            "dp_size": 1,
            "tp_rank": 0,
            "tp_size": 1,
            "request": self.request,
            "layers": [{"layer": layer, "output": output}],
            "max_num_tokens": self.max_num_tokens,
            "max_num_reqs": self.max_num_reqs,
            "slots": self.slots,
            "context_len": self.context_len,
            "rows_per_token": self.rows,
        }
        self.send(hello, fd, self.doorbell)
        os.close(fd)
        welcome, (heartbeat,) = self.expect("Welcome")
        self.epoch = welcome["epoch"]
        self.heartbeat = mmap.mmap(heartbeat, PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(heartbeat)
        ready, _ = self.expect("Ready")
        self.step = ready["step"]

    def lay_out(self) -> None:
        self.blocks = -(-self.max_num_tokens * self.rows // 256)
        self.flags_at = 192
        self.inputs_at = self.flags_at + up(self.slots * self.blocks * 8, 64)
        if self.request == "tokens":
            numbers = self.max_num_tokens + self.max_num_reqs + 1 + self.max_num_reqs * self.context_len
        else:
            numbers = self.max_num_tokens * self.rows
        self.input_bytes = up(64 + 8 * numbers, 64)
        self.outputs_at = up(self.inputs_at + self.slots * self.input_bytes, PAGE)
        self.output_bytes = up(self.max_num_tokens * self.token_bytes, PAGE)
        self.size = self.outputs_at + self.slots * self.output_bytes

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, message: dict, *descriptors: int) -> None:
        send(self.sock, msgspec.msgpack.encode(message), *descriptors)

    def receive(self, limit_s: float) -> tuple[dict, list[int]] | None:
        """The next message and its descriptors; None when none came in time."""
        if not select.select([self.sock], [], [], limit_s)[0]:
            return None
        packet, ancillary, _, _ = self.sock.recvmsg(32768, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
        if not packet:
            raise RefusedError("end of file")
        message = msgspec.msgpack.decode(packet)
        if message["type"] == "StepFailed":
            self.failed[message["step"]] = message["reason"]
        if message["type"] in ("Refused", "RankLost", "Closing"):
            raise RefusedError(str(message))
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        return message, list(descriptors)

    def expect(self, kind: str) -> tuple[dict, list[int]]:
        received = self.receive(self.limit_s)
        assert received is not None, f"no {kind} within {self.limit_s} s"
        assert received[0]["type"] == kind
        return received

    # ---- steps ----------------------------------------------------------------------------------------------------

    def word(self, at: int) -> int:
        return struct.unpack_from("<Q", self.memory, at)[0]

    def store(self, at: int, value: int) -> None:
        # one aligned 8-byte store; on x86 stores are seen in their order
        ctypes.c_uint64.from_buffer(self.memory, at).value = value

    def publish(self, ids, starts=None, context=None) -> int:
        """Publish one step: token ids and where requests begin, or with request "rows" row numbers; returns its number."""
        self.step += 1
        assert self.step - self.word(RELEASED) <= self.slots, "release a step first"
        head = self.inputs_at + self.step % self.slots * self.input_bytes
        self.write(head + 64, ids)
        num_reqs, num_tokens = 1, len(ids)
        if self.request == "tokens":
            starts = [0, len(ids)] if starts is None else starts
            num_reqs = len(starts) - 1
            if context is None:
                context = [[self.facts["filler"]] * self.context_len] * num_reqs
            starts_at = head + 64 + 8 * self.max_num_tokens
            self.write(starts_at, starts)
            self.write(starts_at + 8 * (self.max_num_reqs + 1), context)
        struct.pack_into("<QQQ", self.memory, head, self.step, num_reqs, num_tokens)
        self.store(ANNOUNCED, self.step)
        os.eventfd_write(self.doorbell, 1)
        return self.step

    def write(self, at: int, values) -> None:
        raw = np.asarray(values, "<i8").tobytes()
        self.memory[at : at + len(raw)] = raw

    def wait(self, step: int, num_tokens: int) -> np.ndarray:
        """The rows of a step, as bytes [num_tokens, token_bytes]; raises StepFailedError, RefusedError or TimeoutError."""
        slot, deadline = step % self.slots, time.monotonic() + self.limit_s
        wanted = self.epoch << 48 | step
        for block in range(max(1, -(-num_tokens * self.rows // 256))):
            at = self.flags_at + (slot * self.blocks + block) * 8
            while (flag := self.word(at)) != wanted:
                if flag == wanted | 1 << 47:
                    while self.receive(0) is not None:  # the reason came before the flag
                        pass
                    raise StepFailedError(self.failed.get(step, ""))
                self.receive(0)  # raises when the worker has gone
                if time.monotonic() > deadline:
                    raise TimeoutError(f"step {step}, heartbeat {struct.unpack_from('<Q', self.heartbeat)[0]}")
                self.sleep(at)
        at = self.outputs_at + slot * self.output_bytes
        raw = self.memory[at : at + num_tokens * self.token_bytes]
        return np.frombuffer(raw, np.uint8).reshape(num_tokens, self.token_bytes)

    def sleep(self, at: int) -> None:
        """Sleep until the flag changes, at most 20 ms."""
        self.store(WAITERS, 1)
        seen = self.word(at)
        if seen != self.epoch << 48 | self.step:
            nap = (ctypes.c_int64 * 2)(0, 20_000_000)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, at))
            word, naught = ctypes.c_uint32(seen & 0xFFFFFFFF), ctypes.c_void_p()
            ctypes.CDLL(None).syscall(FUTEX, ctypes.c_void_p(address), 0, word, ctypes.byref(nap), naught, 0)
        self.store(WAITERS, 0)

    def release(self, step: int) -> None:
        self.store(RELEASED, step)

    def close(self) -> None:
        self.send({"type": "Goodbye"})
        self.sock.close()
        os.close(self.doorbell)


def connect(address: str, limit_s: float = 10.0) -> socket.socket:
    path = address.removeprefix("unix:")
    deadline = time.monotonic() + limit_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(limit_s)
        try:
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            return sock
        except OSError as error:
            sock.close()
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:  # its queue is full
                raise
        time.sleep(0.01)


def send(sock: socket.socket, packet: bytes, *descriptors: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([packet], rights)
