"""Route `ipc`: the worker copies rows into this GPU's memory itself, and the model waits there.

Everything is as in route `staged`, except where flags and rows are: in one driver allocation on the GPU, which the worker
opens by its IPC handle and writes in the order of a stream of its own, each block before its flag. The worker needs a CUDA
context for that, and both processes the right to share the GPU's memory; in return nothing in the forward reads host memory
but the poison word.
"""

from __future__ import annotations

from ple_offload.connector.staged import StagedRoute
from ple_offload.ipc.region import Layout


class IpcRoute(StagedRoute):
    """See the module. `transport` is connected, with a `SharedMemory`, and is closed by the caller after this route."""

    name = "ipc"

    def _outputs(self) -> tuple[int, Layout]:
        memory = self._transport.memory
        assert memory is not None  # the connector gave it, for this route
        return memory.address, memory.layout
