"""One connected rank as the worker sees it: what it said in its Hello, and its region, mapped.

Nothing of the region is trusted: it belongs to the client, who may change any byte at any time. Sizes come from the Hello
and were checked; numbers read from the region are copied once, and the copy is checked and used.
"""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ple_offload.errors import ProtocolError
from ple_offload.ipc import region, words
from ple_offload.ipc.channel import Channel
from ple_offload.ipc.messages import Hello
from ple_offload.ipc.region import Layout
from ple_offload.memory import memfd
from ple_offload.memory.mapping import PAGE_BYTES, Mapping
from ple_offload.worker.device import DeviceOutput, Devices

_kept: list[Rank] = []  # for a GPU that may still read their regions, and write what the client would free


class Rank:
    """The region of one rank, and the words in it that both sides read and write."""

    def __init__(
        self,
        channel: Channel,
        hello: Hello,
        epoch: int,
        layout: Layout,
        region_fd: int,
        doorbell_fd: int,
        devices: Devices,
    ) -> None:
        """Maps the region, opens the memory on a GPU where the Hello names one, and keeps the doorbell.

        The caller still owns both descriptors if this raises.
        """
        self.channel = channel
        self.hello = hello
        self.epoch = epoch
        self.layout = layout
        _check_region(channel.peer, region_fd, layout.num_bytes)
        _check_doorbell(channel.peer, doorbell_fd)
        self._mapping = Mapping(region_fd, layout.num_bytes, writable=True, what=f"region of {channel.peer}")
        self.doorbell_fd = doorbell_fd
        base = self._mapping.address
        self._base = base
        self._announced = np.uint64(base + region.WORD_ANNOUNCED)
        self._waiters = np.uint64(base + region.WORD_WAITERS)
        self._waited_ns = 0
        self._row_numbers: dict[int, npt.NDArray[np.int64]] = {}
        self._flag_base = epoch << 48
        self._bytes = self._mapping.view()
        # memoryviews, since reading a word through them costs a tenth of what it costs through an array
        self._words = self._bytes[: region.WORDS_BYTES].data.cast("Q")
        slots = range(hello.slots if layout.has_inputs else 0)
        heads = [layout.input(slot) for slot in slots]
        self._heads = [self._bytes[at : at + region.HEAD_WORDS * 8].data.cast("Q") for at in heads]
        self._arrays = [self._views(slot) for slot in slots]
        self.served = 0  # the last step that was looked up, or failed; the first connection's steps begin at 1
        self._began_after = 0
        self.name = f"session {hello.session!r} DP {hello.dp_rank} TP {hello.tp_rank}"
        self.device: DeviceOutput | None = None
        if hello.device:
            try:
                self.device = DeviceOutput(devices, channel.peer, hello, epoch, layout, base)
            except BaseException:
                self._mapping.close()
                raise

    @property
    def announced(self) -> int:
        return self._words[region.WORD_ANNOUNCED // 8]

    @property
    def expected_tokens(self) -> int:
        """About how many tokens the coming step has; whatever it says, nothing but speed follows from it."""
        return self._words[region.WORD_EXPECTED // 8]

    @property
    def coming(self) -> int:
        return self._words[region.WORD_COMING // 8]

    @property
    def released(self) -> int:
        return max(self._began_after, self._words[region.WORD_RELEASED // 8])

    def begin(self, step: int) -> None:
        """The steps of this connection come after `step`."""
        self.served = self._began_after = step

    def take_wait_s(self) -> float:
        """Seconds that the reader says it has waited since the last call."""
        before, self._waited_ns = self._waited_ns, self._words[region.WORD_WAITED // 8]
        return max(0, self._waited_ns - before) / 1e9

    def next_step(self) -> int | None:
        """The oldest step that was announced and not served; steps that were dummies are none."""
        if self.announced <= self.served:
            return None
        announced = int(words.load_word(self._announced))  # acquire: the inputs were written before it
        steps = [head[0] for head in self._heads]
        return min((step for step in steps if self.served < step <= announced), default=None)

    def inputs(self, step: int) -> list[npt.NDArray[np.int64]]:
        """The input arrays of a step.

        tokens: copies of [input_ids, query_start_loc, ngram_context]; rows: one array [num_tokens, rows_per_token] per
        layer, in the client's memory: the gather copies each number before it checks it.
        Raises ProtocolError for numbers that do not fit the buffers.
        """
        layout, slot = self.layout, step % self.hello.slots
        found, num_reqs, num_tokens, *_ = self._heads[slot].tolist()  # a copy: what is checked is what is used
        if found != step or num_reqs > layout.max_num_reqs or num_tokens > layout.max_num_tokens:
            raise ProtocolError(
                f"step {step}: expected at most {layout.max_num_reqs} requests and {layout.max_num_tokens} tokens in slot "
                f"{slot}, found step {found} with {num_reqs} requests and {num_tokens} tokens."
            )
        arrays = self._arrays[slot]
        if layout.request == "rows":
            return [array[:num_tokens] for array in arrays]
        input_ids, query_start_loc, ngram_context = arrays
        return [
            input_ids[:num_tokens].copy(),
            query_start_loc[: num_reqs + 1].copy(),
            ngram_context[:num_reqs].copy(),
        ]

    def row_numbers(self, layer: int) -> npt.NDArray[np.int64]:
        """Memory for a layer's row numbers, [max_num_tokens, rows_per_token]; fresh pages would cost more than they do."""
        if layer not in self._row_numbers:
            shape = (self.layout.max_num_tokens, self.layout.rows_per_token[layer])
            self._row_numbers[layer] = np.zeros(shape, np.int64)
        return self._row_numbers[layer]

    def output(self, layer: int, step: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        """The output of `num_tokens` tokens of a layer (by its place in the Hello), as uint8 [num_tokens * token_bytes]."""
        at = self.layout.output(layer, step % self.hello.slots)
        return self._bytes[at : at + num_tokens * self.layout.token_bytes[layer]]

    def reader(self, layer: int, step: int) -> tuple[int, int, int, int]:
        """This rank as a reader of the gather of a layer's rows; see formats/gather.py."""
        slot = step % self.hello.slots
        flags = self._base + self.layout.flag(layer, slot, 0)
        return self._base + self.layout.output(layer, slot), flags, self._flag_base | step, int(self._waiters)

    @property
    def lost(self) -> str:
        """Why this rank's rows cannot be brought to it any more; "" while they can."""
        return self.device.lost if self.device is not None else ""

    def fail(self, step: int) -> None:
        """Say that a step's rows will not come, on every flag a reader could wait for."""
        if self.device is not None:
            self.device.fail(step)
            return
        for layer, blocks in enumerate(self.layout.blocks):
            for block in range(blocks):
                self._set_flag(layer, step, block, step | words.FAILED)

    def _set_flag(self, layer: int, step: int, block: int, low: int) -> None:
        address = self._base + self.layout.flag(layer, step % self.hello.slots, block)
        words.publish_flag(np.uint64(address), np.uint64(self._flag_base | low), self._waiters)

    def _views(self, slot: int) -> list[npt.NDArray[np.int64]]:
        """The input arrays of a slot, full size, in the client's memory."""
        layout = self.layout
        if layout.request == "rows":
            shapes: list[tuple[int, ...]] = [(layout.max_num_tokens, rows) for rows in layout.rows_per_token]
        else:
            shapes = [(layout.max_num_tokens,), (layout.max_num_reqs + 1,), (layout.max_num_reqs, layout.context_len)]
        at, views = layout.input(slot) + region.HEAD_WORDS * 8, []
        for shape in shapes:
            num_bytes = math.prod(shape) * 8
            views.append(self._bytes[at : at + num_bytes].view(np.int64).reshape(shape))
            at += num_bytes
        return views

    def close(self) -> None:
        """Unmap, and close the connection last: its end says that the rank's memory, on a GPU too, is no longer in use.

        Where a GPU does not come to the end of its copies, everything is kept until this process ends.
        """
        if self.device is not None:
            if not self.device.close():
                _kept.append(self)
                return
            self.device = None
        self._words, self._heads = memoryview(bytes(region.WORDS_BYTES)).cast("Q"), []
        self._arrays = []
        self._mapping.close()
        if self.doorbell_fd >= 0:
            os.close(self.doorbell_fd)
            self.doorbell_fd = -1
        self.channel.close()


class Nobody:
    """A rank that is not there: what is delivered to it nobody sees."""

    device = None

    def __init__(self) -> None:
        # where its rows would be, its flag, and the word that says whether it sleeps
        self._memory = np.zeros(3, np.uint64)

    def inputs(self, context_len: int) -> list[npt.NDArray[np.int64]]:
        """[input_ids, query_start_loc, ngram_context] of a step without tokens."""
        return [np.empty(0, np.int64), np.zeros(1, np.int64), np.empty((0, context_len), np.int64)]

    def output(self, layer: int, step: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)

    def reader(self, layer: int, step: int) -> tuple[int, int, int, int]:
        at = self._memory.ctypes.data
        return at, at + 8, 0, at + 16


def _check_region(peer: str, fd: int, num_bytes: int) -> None:
    """Refuse memory that could vanish or fault under us."""
    needed = memfd.F_SEAL_SHRINK
    try:
        seals = fcntl.fcntl(fd, memfd.F_GET_SEALS)
    except OSError:
        raise ProtocolError(f"{peer}: expected a memfd as region, found another kind of file.") from None
    if seals & needed != needed or seals & (memfd.F_SEAL_WRITE | memfd.F_SEAL_FUTURE_WRITE):
        raise ProtocolError(
            f"{peer}: expected a region sealed against shrinking and not against writing, found seals {seals:#x}."
        )
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ProtocolError(f"{peer}: expected a region that can be written, found a read-only descriptor.")
    stat = os.fstat(fd)
    if stat.st_size < num_bytes:
        raise ProtocolError(f"{peer}: expected a region of {num_bytes} bytes, found {stat.st_size}.")
    if os.fstatvfs(fd).f_bsize != PAGE_BYTES:
        raise ProtocolError(
            f"{peer}: expected a region on ordinary pages, found pages of {os.fstatvfs(fd).f_bsize} bytes."
        )
    if stat.st_blocks * 512 < num_bytes:
        raise ProtocolError(
            f"{peer}: expected a region with all its {num_bytes} bytes allocated (by its owner, who pays for them), "
            f"found {stat.st_blocks * 512}."
        )


def _check_doorbell(peer: str, fd: int) -> None:
    kind = str(Path(f"/proc/self/fd/{fd}").readlink())
    if kind != "anon_inode:[eventfd]":
        raise ProtocolError(f"{peer}: expected an eventfd as doorbell, found {Path(kind).name}.")
