"""Memory of a GPU that a client makes and a worker writes, for route `ipc`; knows neither torch nor Triton."""

from __future__ import annotations

import logging

from ple_offload.cuda import Cuda, quietly
from ple_offload.errors import CudaError
from ple_offload.ipc.region import Layout

log = logging.getLogger(__name__)

# The driver puts smaller allocations together, and a handle opens all that lie in one such piece.
PIECE_BYTES = 2 << 20
ZERO_LIMIT_S = 10.0


class SharedMemory:
    """The `DeviceMemory` of a connection (connector/base.py), under the caller's device. Flags begin as zeros.

    It is an allocation of the driver's own, since what torch's pool hands out is part of something larger.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.address = self.num_bytes = 0

    def share(self, layout: Layout) -> tuple[str, bytes]:
        self.layout = layout.on_device
        self.num_bytes = -(-self.layout.num_bytes // PIECE_BYTES) * PIECE_BYTES
        self.address = self._cuda.allocate(self.num_bytes)
        try:
            self._zero_flags()
            return self._cuda.uuid(), self._cuda.share(self.address)
        except BaseException:
            self.close(let_go=True)
            raise

    def _zero_flags(self) -> None:
        """An earlier connection's flags may lie there. In a stream of its own, since the model may keep others busy."""
        stream = self._cuda.make_stream()
        try:
            self._cuda.fill(stream, self.address, 0, self.layout.output(0, 0))
            if not self._cuda.wait_for(stream, ZERO_LIMIT_S):
                raise CudaError(
                    f"{self._cuda.device}: expected zeroed flags within {ZERO_LIMIT_S:g} s, found none. Is the GPU hung?"
                )
        finally:
            quietly(self._cuda.end_stream, stream)

    def close(self, let_go: bool) -> None:
        if not self.address:
            return
        if let_go:
            quietly(self._cuda.free, self.address)
        else:
            log.error(
                "route 'ipc': %d bytes of %s stay allocated until this process ends: the worker has not let go of them "
                "in time (limit close_s), and may still write there.",
                self.num_bytes,
                self._cuda.device,
            )
        self.address = 0
