"""Transport to a worker process: inputs and outputs in shared memory, a doorbell, flags; no thread, no message in a step.

Every connection has a region of its own. When a worker is given up, because it died, said nothing for too long, or broke
the protocol, its region is dropped and never looked at again: a stopped worker that wakes up later writes into memory that
nobody reads. `deliver` fills the caller's own memory, so no row of an earlier step can be taken for one of this step.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ple_offload.connector.base import DeviceMemory, Inputs, PortSpec
from ple_offload.connector.config import ConnectorConfig
from ple_offload.errors import ConnectionLostError, ForkError, ProtocolError, StepError, UsageError
from ple_offload.formats import VALUE_DTYPES, RowFormat
from ple_offload.formats.gather import Gather
from ple_offload.ipc import region, words
from ple_offload.ipc.channel import Channel
from ple_offload.ipc.messages import (
    PROTOCOL_VERSION,
    Ask,
    Closing,
    Facts,
    Goodbye,
    Hello,
    LayerFacts,
    LayerWish,
    Message,
    RankLost,
    Ready,
    Refused,
    StepFailed,
    Welcome,
)
from ple_offload.ipc.region import BLOCK_ROWS, HEAD_WORDS, PAGE, Layout
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping, collapse
from ple_offload.metrics import ConnectorCounters

# Spinning costs the core, sleeping costs the waking (10 to 50 us, in a virtual machine): spin for about 100 us.
SPINS = 2000
SLICE_NS = 20_000_000  # between two looks at the socket and the heartbeat
TAKEN_ROWS = 4096  # taken over at once: a call for every block would cost more than its rows

_transports: weakref.WeakSet[RemoteTransport] = weakref.WeakSet()


class RemoteTransport:
    """See connector/base.py. The constructor returns once the session is ready, or raises and leaves nothing behind.

    step: the last one this rank has counted. `counted`: the last one any rank of its DP group has; steps go on from there.
    direct_tokens: steps of up to this many tokens this rank does without the worker, if all ranks of its DP group do;
    afterwards, the least of what they said.
    memory: of a GPU, where the worker is to bring rows and flags instead of the region; closed by this transport.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        ports: Sequence[PortSpec],
        address: str,
        step: int = 0,
        counters: ConnectorCounters | None = None,
        direct_tokens: int = 0,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.direct_tokens = direct_tokens
        self._config = config
        self._address = address
        self._limits = config.limits
        self._slots = config.max_concurrent_batches
        self._ports = list(ports)
        self._resources = contextlib.ExitStack()
        self._failed: dict[int, str] = {}  # step -> why, as the worker told
        self._lost: str | None = None
        self._forked = False
        self._closing: str | None = None
        self._counters = counters or ConnectorCounters()
        self.memory = memory
        self._waited_ns = 0  # on this connection
        self.worker = f"worker at {address}"
        try:
            self._connect(step)
        except OSError as error:  # no descriptor left, most likely
            self._resources.close()
            raise ConnectionLostError(f"{self.worker}: connecting failed in this process: {error.strerror}.") from error
        except BaseException:
            self._resources.close()
            raise

    # ---- connecting -----------------------------------------------------------------------------------------------

    def _connect(self, step: int) -> None:
        config = self._config
        self._channel = Channel.connect(self._address, self._limits.connect_s)
        self._resources.callback(self._channel.close)
        _transports.add(self)
        self._send(Ask(PROTOCOL_VERSION, config.checkpoint))
        answer, _ = self._await(Facts, "its facts", "answer_s")
        self.worker = f"worker {answer.pid} at {self._address}" + (f" (log: {answer.log})" if answer.log else "")
        by_layer = {facts.layer: facts for facts in answer.layers}
        missing = [port.layer for port in self._ports if port.layer not in by_layer]
        if missing:
            raise UsageError(f"{self.worker}: expected tables of layers {missing}, found {sorted(by_layer)}.")
        self.facts: list[LayerFacts] = [by_layer[port.layer] for port in self._ports]
        rows_per_token = tuple(facts.rows_per_token for facts in self.facts)
        hello = Hello(
            version=PROTOCOL_VERSION,
            checkpoint=config.checkpoint,
            session=config.session,
            step=step,
            worker_id=config.worker_id,
            dp_rank=config.dp_rank,
            dp_size=config.dp_size,
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            request=config.request,
            layers=[self._wish(port) for port in self._ports],
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            slots=self._slots,
            context_len=self.facts[0].context_len if config.request == "tokens" else 0,
            rows_per_token=rows_per_token[0] if config.request == "rows" else 0,
            direct_tokens=self.direct_tokens,
        )
        self._formats = [RowFormat(facts.format, facts.row_dim, facts.scale) for facts in self.facts]
        token_bytes = tuple(
            facts.rows_per_token * row_format.row_bytes
            if config.output == "stored"
            else port.embed_dim * VALUE_DTYPES[port.dtype].itemsize
            for port, facts, row_format in zip(self._ports, self.facts, self._formats, strict=True)
        )
        self.layout = Layout.of(hello, token_bytes, rows_per_token)
        if self.memory is not None:
            device, handle = self.memory.share(self.layout)
            self._resources.callback(self._close_memory, self.memory)
            hello = msgspec.structs.replace(hello, device=device, handle=handle)
        region_fd, doorbell_fd = self._make_region()
        if not self._channel.send(hello, (region_fd, doorbell_fd)):
            raise ConnectionLostError(f"{self.worker}: it does not take the Hello.")
        welcome, (heartbeat_fd,) = self._await(Welcome, "a Welcome", "answer_s")
        self._epoch = welcome.epoch
        try:
            heartbeat = Mapping(heartbeat_fd, PAGE, what="heartbeat")
        finally:
            os.close(heartbeat_fd)
        self._resources.callback(heartbeat.close)
        self._heartbeat = np.uint64(heartbeat.address)
        ready, _ = self._await(Ready, "every rank of the session", "ready_s")
        self.counted: int = ready.step
        self.direct_tokens = min(self.direct_tokens, ready.direct_tokens)
        self._prepare_readers()

    def _close_memory(self, memory: DeviceMemory) -> None:
        """Close the GPU's memory; the worker closes the connection once it has let go of it."""
        if not self._forked:  # else it is the parent's
            self._channel.end()
            memory.close(self._channel.peer_closed(self._limits.close_s))

    def _wish(self, port: PortSpec) -> LayerWish:
        output = "stored" if self._config.output == "stored" else port.dtype
        return LayerWish(port.layer, output, self._config.fingerprints.get(port.layer, ""))

    def _make_region(self) -> tuple[int, int]:
        """Allocate and map the region; returns its descriptor and the doorbell's, both closed by `close`."""
        num_bytes = self.layout.num_bytes
        fd = memfd.create("ple-offload region", num_bytes)
        self._resources.callback(os.close, fd)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # our pages, charged to us: too little memory shows here
        except OSError as error:
            raise ConnectionLostError(
                f"region of {num_bytes} bytes: {error.strerror}. Use a smaller max_num_tokens."
            ) from error
        memfd.seal_size(fd, "ple-offload region")
        self._region = Mapping(fd, num_bytes, writable=True, what="region")
        self._resources.callback(self._region.close)
        collapse(self._region.address, num_bytes)  # where it can: fewer translations for whoever reads and writes it
        self._doorbell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._resources.callback(os.close, self._doorbell_fd)
        return fd, self._doorbell_fd

    def _prepare_readers(self) -> None:
        base, layout, config = self._region.address, self.layout, self._config
        view = self._region.view()
        self._announced = np.uint64(base + region.WORD_ANNOUNCED)
        self._released = np.uint64(base + region.WORD_RELEASED)
        self._waiters = np.uint64(base + region.WORD_WAITERS)
        self._coming = np.uint64(base + region.WORD_COMING)
        self._expected = np.uint64(base + region.WORD_EXPECTED)
        self._watched = (-1, time.monotonic())  # the last heartbeat that `alive` saw, and when
        self._waited = view[region.WORD_WAITED : region.WORD_WAITED + 8].view(np.uint64)
        self._heads: list[npt.NDArray[np.uint64]] = []
        self._inputs: list[Inputs] = []
        nothing = np.empty(0, np.int64)
        for slot in range(self._slots if layout.has_inputs else 0):
            at = layout.input(slot)
            self._heads.append(view[at : at + HEAD_WORDS * 8].view(np.uint64))
            numbers = view[at + HEAD_WORDS * 8 : at + layout.input_bytes].view(np.int64)
            tokens, reqs = layout.max_num_tokens, layout.max_num_reqs
            if config.request == "tokens":
                context = numbers[tokens + reqs + 1 :][: reqs * layout.context_len].reshape(reqs, layout.context_len)
                self._inputs.append(Inputs(numbers[:tokens], numbers[tokens : tokens + reqs + 1], context, []))
            else:
                ends = np.cumsum([tokens * rows for rows in layout.rows_per_token])
                parts = np.split(numbers[: ends[-1]], ends[:-1])
                shaped = [part.reshape(tokens, -1) for part in parts]
                self._inputs.append(Inputs(nothing, nothing, nothing.reshape(0, 0), shaped))
        # One gather per layer and slot: the slot's bytes are the "table", its rows are read in order.
        self._gathers: list[list[Gather]] = []
        for i, (port, row_format) in enumerate(zip(self._ports, self._formats, strict=True)):
            rows = layout.max_num_tokens * layout.rows_per_token[i]
            starts = np.array([0, rows], np.int64)
            if config.output == "values":
                row_format = RowFormat(port.dtype, row_format.row_dim)
            bases = [np.array([base + layout.output(i, slot)], np.uint64) for slot in range(self._slots)]
            self._gathers.append([Gather(row_format, b, starts, rows, port.dtype) for b in bases])
            empty = np.empty((0, row_format.row_dim), VALUE_DTYPES[port.dtype])
            self._gathers[-1][0].run(np.empty(0, np.int64), empty, 1)
        self._order = np.arange(layout.max_num_tokens * max(layout.rows_per_token), dtype=np.int64)
        words.wait_flags(self._waiters, 1, np.uint64(0), self._waiters, 1, 0)  # compile now, not in a step
        words.publish_flag(self._waiters, np.uint64(0), self._waiters)

    def _send(self, message: Message) -> None:
        if not self._channel.send(message):
            raise ConnectionLostError(f"{self.worker}: it does not take a {type(message).__name__}.")

    def _await(self, kind: type[Any], what: str, limit: str) -> tuple[Any, tuple[int, ...]]:
        """The next message, which must be of this kind; a refusal is raised as what it is. limit: its name in `Limits`."""
        limit_s = getattr(self._limits, limit)
        received = self._channel.receive(limit_s)
        if received is None:
            config = self._config
            ranks = (
                f" Session {config.session!r} needs {config.dp_size} x {config.tp_size} ranks." if kind is Ready else ""
            )
            raise ConnectionLostError(f"{self.worker}: waited {limit_s:g} s (limit {limit}) for {what}.{ranks}")
        message, descriptors = received
        if isinstance(message, kind):
            return message, descriptors
        for fd in descriptors:
            os.close(fd)
        if isinstance(message, Refused):
            raise ProtocolError(f"{self.worker} refused: {message.reason}")
        if isinstance(message, Closing):
            raise ConnectionLostError(f"{self.worker} stops: {message.reason}")
        raise ProtocolError(f"{self.worker}: expected {kind.__name__}, found {type(message).__name__}.")

    # ---- steps ----------------------------------------------------------------------------------------------------

    def inputs(self, step: int) -> Inputs:
        self._raise_if_lost()  # after `close` the region is no longer mapped
        return self._inputs[step % self._slots]

    def publish(self, step: int, num_reqs: int, num_tokens: int) -> None:
        self._look()
        if self._closing is not None:
            self._give_up(f"it stops: {self._closing}")
        if not self.layout.has_inputs:
            return
        head = self._heads[step % self._slots]
        head[0], head[1], head[2] = step, num_reqs, num_tokens
        words.store_word(self._announced, np.uint64(step))
        os.eventfd_write(self._doorbell_fd, 1)

    # ---- for a device that reads and writes the region itself

    def region_range(self) -> tuple[int, int]:
        """(address, bytes) of the region."""
        return self._region.address, self.layout.num_bytes

    def travelling_format(self, layer: int) -> RowFormat:
        """The format in which a layer's rows lie in its output slots."""
        row_format = self._formats[layer]
        return (
            row_format if self._config.output == "stored" else RowFormat(self._ports[layer].dtype, row_format.row_dim)
        )

    def flag(self, step: int) -> int:
        """The word that says that a block of this step is there."""
        return words.flag(self._epoch, step)

    def released(self) -> int:
        """The last step whose slot may be written again, as the device, or `release`, has said."""
        return int(words.load_word(self._released))

    def expect(self, step: int, num_tokens: int) -> None:
        """A device will write this step's inputs and head into its slot, then the word that announces it."""
        self._look()
        if self._closing is not None:
            self._give_up(f"it stops: {self._closing}")
        words.store_word(self._expected, np.uint64(num_tokens))
        words.store_word(self._coming, np.uint64(step))
        self.ring()

    def ring(self) -> None:
        """Make the worker look at this rank's words."""
        if self._lost is None:
            os.eventfd_write(self._doorbell_fd, 1)

    def explain(self, step: int) -> None:
        """Raise what the worker said about a step that the device saw fail, or why the connection is over."""
        self._look()
        if step in self._failed:
            raise StepError(self._failed[step])
        if not self.alive():
            self._give_up(f"no sign of life for {self._limits.no_progress_s:g} s (limit no_progress_s) in step {step}")

    def alive(self) -> bool:
        """Whether the worker is there and its heart has beaten within no_progress_s; for a thread that watches.

        Reads nothing from the socket: what the worker said is for the thread that runs the steps.
        """
        if self._lost is not None:
            return False
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLRDHUP)
        if poll.poll(0):
            return False
        now, beat = time.monotonic(), int(words.load_word(self._heartbeat))
        if beat != self._watched[0]:
            self._watched = (beat, now)
        return now - self._watched[1] <= self._limits.no_progress_s

    def deliver(self, layer: int, step: int, num_tokens: int, out: npt.NDArray[Any]) -> None:
        self._raise_if_lost()
        if step in self._failed:
            raise StepError(self._failed[step])
        rows = num_tokens * self.layout.rows_per_token[layer]
        slot, gather = step % self._slots, self._gathers[layer][step % self._slots]
        values = out.reshape(rows, self._formats[layer].row_dim)
        expected = np.uint64(words.flag(self._epoch, step))
        self._counters.waits += 1
        for first in range(0, max(1, rows), TAKEN_ROWS):
            last = min(rows, first + TAKEN_ROWS)
            # a step without rows has a flag as well: it may have failed
            blocks = max(1, -(-(last - first) // BLOCK_ROWS))
            address = self._region.address + self.layout.flag(layer, slot, first // BLOCK_ROWS)
            started = time.monotonic_ns()
            try:
                self._wait(address, blocks, expected, step)
            finally:
                self._count_wait(time.monotonic_ns() - started)
            gather.run(self._order[first:last], values[first:last], 1)

    def _count_wait(self, waited_ns: int) -> None:
        self._waited_ns += waited_ns
        self._counters.wait_s += waited_ns / 1e9

    def _wait(self, address: int, blocks: int, expected: np.uint64, step: int) -> None:
        """Wait for a row of flags, looking at the worker between slices; raises when it is gone, silent or slow."""
        there = self._flags_there(address, blocks, expected, SPINS, step)
        if there == blocks:
            return
        limits, started = self._limits, time.monotonic()
        beat, moved = int(words.load_word(self._heartbeat)), started
        while True:
            self._look()
            if step in self._failed:
                raise StepError(self._failed[step])
            there += self._flags_there(address + 8 * there, blocks - there, expected, 0, step)
            if there == blocks:
                return
            now, heard = time.monotonic(), int(words.load_word(self._heartbeat))
            if heard != beat:
                beat, moved = heard, now
            if now - moved > limits.no_progress_s:
                self._give_up(f"no sign of life for {limits.no_progress_s:g} s (limit no_progress_s) in step {step}")
            if now - started > limits.hard_cap_s:
                self._give_up(f"step {step} not delivered within {limits.hard_cap_s:g} s (limit hard_cap_s)")

    def _flags_there(self, address: int, blocks: int, expected: np.uint64, spins: int, step: int) -> int:
        """How many of these flags are raised, in order, after at most one slice of waiting; raises if the step failed."""
        there = int(words.wait_flags(np.uint64(address), blocks, expected, self._waiters, spins, SLICE_NS))
        if there < blocks:
            word = int(words.load_word(np.uint64(address + 8 * there)))
            if word == int(expected) | words.FAILED:
                self._raise_step_failed(step)
        return there

    def _look(self) -> None:
        """Hear what the worker has said meanwhile."""
        self._raise_if_lost()
        try:
            while (received := self._channel.receive(0)) is not None:
                message, descriptors = received
                for fd in descriptors:
                    os.close(fd)
                if isinstance(message, StepFailed):
                    self._failed[message.step] = message.reason
                elif isinstance(message, RankLost):
                    self._give_up(
                        f"TP rank {message.tp_rank} of DP rank {message.dp_rank} has gone or connected anew: "
                        "all ranks of its group must reconnect"
                    )
                elif isinstance(message, Closing):
                    self._closing = message.reason
                elif isinstance(message, Refused):
                    self._give_up(f"it cut the connection: {message.reason}")
                else:
                    self._give_up(f"it sent a {type(message).__name__} in the middle of the steps")
        except ConnectionLostError as error:
            if self._lost is None:
                what = str(error).removeprefix(f"{self._channel.peer}: ").rstrip(".") + " (it died, or was ended)"
                self._give_up(what if self._closing is None else f"it stopped: {self._closing}")
            raise

    def _raise_step_failed(self, step: int) -> None:
        """The flag says that the step failed; the reason was sent before the flag was set."""
        self._look()
        raise StepError(self._failed.get(step, f"{self.worker}: step {step} failed; its log says why."))

    def give_up(self, reason: str) -> None:
        """End the connection: whatever the worker writes from now on, nobody reads."""
        if self._lost is None:
            self._lost = (
                f"{self.worker}: {reason}. Every step in flight has failed; `reconnect` starts a new connection."
            )
            self._channel.end()

    def _give_up(self, reason: str) -> None:
        """`give_up`, and raise it."""
        self.give_up(reason)
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise (ForkError if self._forked else ConnectionLostError)(self._lost)

    def forget(self, step: int) -> None:
        """Nobody will ask any more why a step up to this one failed."""
        self._failed = {s: why for s, why in self._failed.items() if s > step}

    def release(self, step: int) -> None:
        self.forget(step)
        if self._lost is None:
            self._waited[0] = self._waited_ns
            words.store_word(self._released, np.uint64(step))
            if self._config.tp_size > 1:  # the worker may be holding a step back until this rank has room
                os.eventfd_write(self._doorbell_fd, 1)

    def close(self) -> None:
        if self._lost is None:
            self._channel.send(Goodbye())
            self._lost = f"{self.worker}: this connector was closed"
        self._resources.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the connection and its memory are the parent's; drop them without a word to the worker."""
        self._forked = True
        self._lost = f"{self.worker}: this connection was made by process {os.getppid()}. Make a connector in this one."
        self._channel.abandon()
        self._resources.close()


def _close_inherited() -> None:
    """A forked child must neither write into its parent's steps nor hold connections open after the parent's death."""
    for transport in list(_transports):
        transport.leave_to_parent()


os.register_at_fork(after_in_child=_close_inherited)
