"""GPUs that a worker writes: contexts, and for each rank of route `ipc` the memory where its rows go.

Only a rank whose Hello names a device brings CUDA into the worker: a context of that GPU (400 to 700 MiB of its memory) is
made for the first such rank, which takes up to a second in which nobody is served, and is given back after the last one.

Rows are gathered into the rank's region as for any other, and copied from there: copy and flag are given to one stream of
the rank, so the flag is there only when the rows are. Nothing here waits for a copy but `close`, within a limit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ple_offload.cuda import Context, Registration, quietly
from ple_offload.errors import CudaError, ProtocolError
from ple_offload.ipc import words
from ple_offload.ipc.messages import Hello
from ple_offload.ipc.region import Layout

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 2.0  # for copies under way; a block takes less than a millisecond


class Devices:
    """A worker's contexts, by the UUID of their GPU."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Context, int]] = {}  # and how many ranks use it

    def enter(self, uuid: str) -> Context:
        """The context of a GPU, for one rank; raises as `Context` does."""
        context, users = self._open.get(uuid) or (Context(uuid), 0)
        self._open[uuid] = context, users + 1
        return context

    def leave(self, uuid: str) -> None:
        context, users = self._open.pop(uuid)
        if users > 1:
            self._open[uuid] = context, users - 1
        else:
            quietly(context.close)


class DeviceOutput:
    """One rank's memory on its GPU, and the stream that writes there.

    region: the address at which the rank's region is mapped; it stays mapped until `close`. Raises CudaError, or UsageError
    without cuda-bindings, when the GPU cannot be reached or its memory cannot be opened, ProtocolError when that memory is
    too small; it leaves nothing behind then.

    lost: why nothing can be written any more, "" while it can. A driver's refusal is kept there and never raised, since the
    step is also other ranks'.
    """

    def __init__(self, devices: Devices, peer: str, hello: Hello, epoch: int, layout: Layout, region: int) -> None:
        self._epoch, self._slots = epoch, hello.slots
        self._layout, self._places = layout, layout.on_device
        self._region = region
        self.lost = ""
        with contextlib.ExitStack() as made:
            self._cuda = cuda = devices.enter(hello.device)
            made.callback(devices.leave, hello.device)
            self._memory = cuda.open_shared(hello.handle)
            made.callback(quietly, cuda.close_shared, self._memory)
            found = cuda.num_bytes_from(self._memory)
            if found < self._places.num_bytes:
                raise ProtocolError(
                    f"{peer}: handle: expected at least {self._places.num_bytes} bytes on {cuda.device}, found {found}."
                )
            made.callback(Registration(cuda, region, layout.num_bytes, read_only=False).close)
            self._stream = cuda.make_stream()
            made.callback(quietly, cuda.end_stream, self._stream)
            self._resources = made.pop_all()

    def publish(self, layer: int, step: int, block: int, num_tokens: int) -> None:
        """Copy a block, as large as blocks on a GPU are, out of the region, then raise its flag; both in stream order."""
        slot, total = step % self._slots, num_tokens * self._layout.token_bytes[layer]
        block_bytes = self._places.block_rows * (self._layout.token_bytes[layer] // self._layout.rows_per_token[layer])
        first, end = block * block_bytes, min(total, (block + 1) * block_bytes)
        with self._noting():
            if end > first:
                target = self._memory + self._places.output(layer, slot) + first
                source = self._region + self._layout.output(layer, slot) + first
                self._cuda.copy_to_device(self._stream, target, source, end - first)
            self._set_flag(layer, slot, block, words.flag(self._epoch, step))

    def fail(self, step: int) -> None:
        """Say that a step's rows will not come, on every flag a reader could wait for."""
        with self._noting():
            for layer, blocks in enumerate(self._places.blocks):
                for block in range(blocks):
                    self._set_flag(layer, step % self._slots, block, words.flag(self._epoch, step) | words.FAILED)

    def _set_flag(self, layer: int, slot: int, block: int, word: int) -> None:
        self._cuda.write_value(self._stream, self._memory + self._places.flag(layer, slot, block), word)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            self.lost = self.lost or str(error)

    def close(self) -> bool:
        """Wait for the copies under way, then let go of memory, region and context; False when that took too long.

        Then the GPU may still write there: the client must not hear that its memory is free again.
        """
        done = True
        try:
            done = self._cuda.wait_for(self._stream, CLOSE_LIMIT_S)
        except CudaError as error:  # the stream is broken, nothing moves in it any more
            log.error("%s", error)
        if not done:
            log.error(
                "%s: copies took more than %g s; their rank's memory and the context are kept until the worker ends. "
                "Is the GPU hung?",
                self._cuda.device,
                CLOSE_LIMIT_S,
            )
            self._resources.pop_all()
        self._resources.close()
        return done
