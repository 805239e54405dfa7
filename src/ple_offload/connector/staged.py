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
from collections.abc import Iterator, Sequence

import torch

from ple_offload.connector.base import PortSpec
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.direct import TORCH_DTYPES
from ple_offload.connector.drain_triton import POISONED, STEP_FAILED, TIMED_OUT, WHY_BITS, Drain
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.sources import Sources
from ple_offload.connector.stage_triton import Beginning, Source
from ple_offload.cuda import Cuda, Registration
from ple_offload.errors import ConnectionLostError, PleOffloadError, StepError
from ple_offload.ipc import region
from ple_offload.ipc.region import Layout

LOOK_EVERY_S = 0.02


class StagedRoute:
    """See the module. `transport` is connected; it is closed by the caller, after this route."""

    name = "staged"

    def __init__(
        self,
        config: ConnectorConfig,
        ports: Sequence[PortSpec],
        transport: RemoteTransport,
        sources: Sources,
        device: torch.device,
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
                errors = self._words.data_ptr() + 8
                self._error_words = self._words[1:].numpy().data  # to look at a word through torch takes microseconds
                self._beginning = Beginning(
                    transport.layout.rows_per_token,
                    self._region + region.WORD_ANNOUNCED,
                    int(config.limits.hard_cap_s * 1e9),
                    device,
                )
                self._drains = [
                    Drain(
                        transport.travelling_format(i),
                        stage=base + places.output(i, 0),
                        flags=base + places.flag(i, 0, 0),
                        poison=self._words.data_ptr(),
                        errors=errors,
                        slot_bytes=places.output(i, 1) - places.output(i, 0),
                        blocks_per_slot=places.blocks[i],
                        flag_rows=places.block_rows,
                    )
                    for i in range(len(ports))
                ]
                # compile and load now: to load a kernel may wait for those that run
                self._beginning.tell(0, 0, 0)
                for i in range(len(ports)):
                    self.finish(i, 1)
                if not sources.on_cpu() and config.tp_rank == 0:
                    self._stage(0, 0, 0, sources)
        except BaseException:
            self._resources.close()
            raise
        self.device_bytes = self._beginning.device_bytes
        if transport.memory is not None:  # route `ipc`
            self.device_bytes += transport.memory.num_bytes
        self._staged = 0  # the last step that `stage` began
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
        if step == self._staged and not dummy:  # `stage` did
            return
        slot = step % self._config.max_concurrent_batches
        if not dummy:
            self._busy.set()
        with self._cuda.current():
            self._beginning.tell(self._transport.flag(step), slot, 0 if dummy else num_tokens)

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
        """Copy device sources into the step's slot, announce it and begin it, all in stream order; never waits."""
        self._transport.expect(step, num_tokens)  # first: the worker wakes up meanwhile
        self._busy.set()
        self._stage(step, num_reqs, num_tokens, sources)
        self._staged = step

    def _stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        slot = step % self._config.max_concurrent_batches
        head = self._region + self._transport.layout.input(slot)
        at = head + 8 * region.HEAD_WORDS
        staged: list[Source] = []
        for source, room, count in self._wanted(sources, num_reqs, num_tokens):
            staged.append(Source(source, at, count))
            at += 8 * room
        with self._cuda.current():
            self._beginning.stage(
                staged,
                head=head,
                step=step,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                flag=self._transport.flag(step),
                slot=slot,
            )

    def _wanted(self, sources: Sources, num_reqs: int, num_tokens: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Each input of a step in the order of the slot: (source, integers of its full size, of this step)."""
        layout = self._transport.layout
        if self._config.request == "rows":
            for port, rows in zip(self._ports, layout.rows_per_token, strict=True):
                assert sources.row_numbers is not None  # checked when the connector was made
                yield sources.row_numbers[port.layer], layout.max_num_tokens * rows, num_tokens * rows
            return
        assert sources.input_ids is not None
        assert sources.query_start_loc is not None
        yield sources.input_ids, layout.max_num_tokens, num_tokens
        yield sources.query_start_loc, layout.max_num_reqs + 1, num_reqs + 1
        if sources.ngram_context is not None:
            width = layout.context_len
            yield sources.ngram_context, layout.max_num_reqs * width, num_reqs * width

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """The step was begun by `prepare_forward`."""

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        """The layer's rows [num_rows, embed_dim], written when the current stream comes here."""
        port, rows_per_token = self._ports[index], self._transport.layout.rows_per_token[index]
        with self._cuda.current():
            out = torch.empty((num_rows, port.embed_dim), dtype=TORCH_DTYPES[port.dtype], device=self._device)
            self._drains[index].run(self._beginning.control[index], out.view(-1, port.embed_dim // rows_per_token))
        return out

    def release(self, step: int) -> None:
        """Once the current stream comes here, the step's slot may be written again."""
        with self._cuda.current():
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._cuda.write_value(stream, self._region + region.WORD_RELEASED, step)
        self._transport.forget(step)
        self._transport.ring()

    def error(self, step: int) -> PleOffloadError | None:
        """Why a step that is done on the device delivered NaN, in the worker's words where it said any; or None."""
        slot = step % self._config.max_concurrent_batches
        failed, why = divmod(self._error_words[slot], 1 << WHY_BITS)
        if not why or failed != step:
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
