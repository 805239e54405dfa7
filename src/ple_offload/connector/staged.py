"""Route `staged`: the worker gathers rows into page-locked memory, block by block, and a GPU kernel drains them.

The worker needs no CUDA context: its flags and rows are ordinary memory of the connection's region, which is registered
with the driver here. The model's wait is one kernel with a small grid (drain_triton.py), the same in eager mode and in a
captured graph, bounded by the GPU's own clock. What a step changes is in `control`, which `begin` writes in stream order.

From the first step on a thread looks at the worker's socket and heartbeat: a forward that waits on the GPU makes no host
call that could. It sets the poison word, nothing more; the kernel sees it and ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ple_offload.connector.base import PortSpec
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.direct import TORCH_DTYPES
from ple_offload.connector.drain_triton import CONTROL_WORDS, POISONED, STEP_FAILED, TIMED_OUT, Drain
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.sources import Sources
from ple_offload.cuda import Cuda, Registration
from ple_offload.errors import ConnectionLostError, PleOffloadError, StepError
from ple_offload.ipc import region
from ple_offload.ipc.region import Layout

LOOK_EVERY_S = 0.02
RING = 64  # control blocks on their way to the device; no more steps are in flight


@dataclass
class _Control:
    """One step's control words on their way to the device, and the event after which they may be written again."""

    words: torch.Tensor  # [layers, CONTROL_WORDS] int64, pinned
    array: np.ndarray  # the same memory, which is written in a tenth of the time
    event: torch.cuda.Event

    @classmethod
    def of(cls, layers: int) -> _Control:
        words = torch.zeros((layers, CONTROL_WORDS), dtype=torch.int64, pin_memory=True)
        return cls(words, words.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]


class StagedRoute:
    """See the module. `transport` is connected; it is closed by the caller, after this route."""

    name = "staged"

    def __init__(
        self, config: ConnectorConfig, ports: Sequence[PortSpec], transport: RemoteTransport, device: torch.device
    ) -> None:
        self._config, self._transport, self._device, self._ports = config, transport, device, list(ports)
        self._resources = contextlib.ExitStack()
        self._cuda = cuda = Cuda(device)
        slots = config.max_concurrent_batches
        try:
            address, num_bytes = transport.region_range()
            registration = Registration(cuda, address, num_bytes, read_only=False)
            self._resources.callback(registration.close)
            self._region = registration.device_address
            base, places = self._outputs()
            with cuda.current():
                # poison, then one error word per slot; written by the host and by the kernel
                self._words = torch.zeros(1 + slots, dtype=torch.int64, pin_memory=True)
                self._control = torch.zeros((len(ports), CONTROL_WORDS), dtype=torch.int64, device=device)
                self._ring = [_Control.of(len(ports)) for _ in range(RING)]
                self._drains = [
                    Drain(
                        transport.travelling_format(i),
                        stage=base + places.output(i, 0),
                        flags=base + places.flag(i, 0, 0),
                        poison=self._words.data_ptr(),
                        errors=self._words.data_ptr() + 8,
                        slot_bytes=places.output(i, 1) - places.output(i, 0),
                        blocks_per_slot=places.blocks[i],
                        flag_rows=places.block_rows,
                    )
                    for i in range(len(ports))
                ]
        except BaseException:
            self._resources.close()
            raise
        self._turn = 0
        self._slot_steps = [0] * slots  # the step whose error word a slot's is
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ple-offload-watch", daemon=True)
        self._watcher.start()

    def _outputs(self) -> tuple[int, Layout]:
        """Where the worker's flags and rows are, as the device sees it, and how they are laid out."""
        return self._region, self._transport.layout

    # ---- steps ----------------------------------------------------------------------------------------------------

    def asks_worker(self, step: int, num_tokens: int) -> bool:
        return True

    def begin(self, step: int, num_reqs: int, num_tokens: int, dummy: bool) -> None:
        """Tell the device what the next forward waits for; in stream order, before it."""
        entry = self._ring[self._turn % RING]
        self._turn += 1
        entry.event.synchronize()  # of the copy RING steps ago
        slot = step % self._config.max_concurrent_batches
        limit_ns = int(self._config.limits.hard_cap_s * 1e9)
        for i, rows_per_token in enumerate(self._transport.layout.rows_per_token):
            rows = 0 if dummy else num_tokens * rows_per_token
            entry.array[i] = (self._transport.flag(step), rows, slot, limit_ns)
        with self._cuda.current():
            stream = torch.cuda.current_stream(self._device)
            if not dummy:
                self._slot_steps[slot] = step
                # in stream order: the step before in this slot may still be waiting, and fail
                self._cuda.write_value(stream.cuda_stream, self._words.data_ptr() + 8 * (1 + slot), 0)
                self._busy.set()
            self._control.copy_(entry.words, non_blocking=True)
            entry.event.record(stream)

    def make_room(self, step: int) -> None:
        """Wait until the device has consumed what was in this step's slot: the host is about to write there.

        Device sources need none of this: they are copied in stream order, behind what reads the slot.
        """
        limits, began = self._config.limits, time.monotonic()
        while self._transport.released() < step - self._config.max_concurrent_batches:
            if time.monotonic() - began > limits.hard_cap_s or not self._transport.alive():
                raise ConnectionLostError(
                    f"step {step}: the step {self._config.max_concurrent_batches} before it is not consumed on "
                    f"{self._device} within {limits.hard_cap_s:g} s (limit hard_cap_s), or the worker has gone."
                )
            time.sleep(0)

    def stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        """Copy device sources into the step's slot and announce it, all in stream order; never waits."""
        slot = self._transport.inputs(step)
        with self._cuda.current():
            if self._config.request == "rows":
                for target, port in zip(slot.row_numbers, self._ports, strict=True):
                    _copy(target[:num_tokens], (sources.row_numbers or {})[port.layer][:num_tokens])
            else:
                assert sources.input_ids is not None  # checked when the connector was made
                assert sources.query_start_loc is not None
                _copy(slot.input_ids[:num_tokens], sources.input_ids[:num_tokens])
                _copy(slot.query_start_loc[: num_reqs + 1], sources.query_start_loc[: num_reqs + 1])
                if sources.ngram_context is not None:
                    _copy(slot.ngram_context[:num_reqs], sources.ngram_context[:num_reqs])
            stream = torch.cuda.current_stream(self._device).cuda_stream
            head = self._region + self._transport.layout.input(step % self._config.max_concurrent_batches)
            for i, value in enumerate((step, num_reqs, num_tokens)):
                self._cuda.write_value(stream, head + 8 * i, value)
            self._cuda.write_value(stream, self._region + region.WORD_ANNOUNCED, step)
            self._transport.expect(step)

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """The step was begun by `prepare_forward`."""

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        """The layer's rows [num_rows, embed_dim], written when the current stream comes here."""
        port, rows_per_token = self._ports[index], self._transport.layout.rows_per_token[index]
        out = torch.empty((num_rows, port.embed_dim), dtype=TORCH_DTYPES[port.dtype], device=self._device)
        self._drains[index].run(self._control[index], out.view(num_rows * rows_per_token, -1))
        return out

    def release(self, step: int) -> None:
        """Once the current stream comes here, the step's slot may be written again."""
        with self._cuda.current():
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._cuda.write_value(stream, self._region + region.WORD_RELEASED, step)
        self._transport.ring()

    def error(self, step: int) -> PleOffloadError | None:
        """Why a step that is done on the device delivered NaN, in the worker's words where it said any; or None."""
        slot = step % self._config.max_concurrent_batches
        why = int(self._words[1 + slot])
        if not why or self._slot_steps[slot] != step:
            return None
        limit_s = self._config.limits.hard_cap_s
        reasons = {
            TIMED_OUT: f"its rows did not come within {limit_s:g} s (limit hard_cap_s)",
            STEP_FAILED: "the worker could not deliver its rows",
            POISONED: "the worker has gone",
        }
        try:
            self._transport.explain(step)
        except PleOffloadError as reason:
            return reason
        return StepError(f"step {step}: {reasons.get(why, f'error word {why}')}; its output is NaN.")

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._busy.wait()
            if not self._ended.wait(LOOK_EVERY_S) and not self._transport.alive():
                self._words[0] = 1
                return

    def close(self) -> None:
        """End what waits on the device, then unregister."""
        self._words[0] = 1
        self._ended.set()
        self._busy.set()
        self._watcher.join(5.0)
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        self._resources.close()


def _copy(target: np.ndarray, source: torch.Tensor) -> None:
    """Copy a device tensor of int32 or int64 into page-locked int64 memory, in stream order."""
    torch.from_numpy(target).copy_(source.to(torch.int64), non_blocking=True)
