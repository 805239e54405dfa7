"""Route `auto`: small steps go `direct`, large ones `staged`; the border was measured on this machine and this table.

A GPU that reads single rows is bound by address translation; a worker's gather is not, but costs a way through another
process. So the first wins for few tokens, the second for many. `prepare_forward` decides for the forward that follows, by
the number of tokens alone: all TP ranks agree on the border when they connect, so none waits for a step that nobody
published.

A captured graph cannot change its route: inside capture it is always `direct`. A replay of a step that went to the worker
all the same is right: its rows come direct, its slot is released in stream order.

When the worker is gone, every step goes `direct`, and this is logged once. Dummies run both routes, so that the kernels of
both are compiled, and deliver zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ple_offload.connector.base import Route
from ple_offload.connector.sources import Sources
from ple_offload.errors import PleOffloadError

log = logging.getLogger(__name__)


class AutoRoute:
    """See the module; the sources are on the device. gone: whether the worker has gone, cheap; it says so itself."""

    name = "auto"

    def __init__(self, direct: Route, staged: Route, direct_tokens: int, gone: Callable[[], bool]) -> None:
        self._direct, self._staged, self._direct_tokens = direct, staged, direct_tokens
        self._gone, self._is_gone = gone, False
        self._goes_direct = True  # the step that the next forward belongs to
        self._is_dummy = False
        self._started: set[int] = set()  # layers whose rows come direct

    @property
    def device_bytes(self) -> int:
        return self._direct.device_bytes + self._staged.device_bytes

    def asks_worker(self, step: int, num_tokens: int) -> bool:
        self._is_gone = self._is_gone or self._gone()
        self._goes_direct = self._is_gone or num_tokens <= self._direct_tokens
        return not self._goes_direct

    def make_room(self, step: int) -> None:
        self._staged.make_room(step)

    def stage(self, step: int, num_reqs: int, num_tokens: int, sources: Sources) -> None:
        self._staged.stage(step, num_reqs, num_tokens, sources)

    def begin(self, step: int, num_reqs: int, num_tokens: int, dummy: bool) -> None:
        self._is_dummy = dummy
        self._started.clear()  # by a forward that broke off: its rows are of another step
        self._direct.begin(step, num_reqs, num_tokens, dummy)  # always: the forward may be a replay
        if dummy or not self._goes_direct:
            self._staged.begin(step, num_reqs, num_tokens, dummy)

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        if self._goes_direct or self._is_dummy or torch.cuda.is_current_stream_capturing():
            self._direct.start(index, ids, query_start_loc, ngram_context)
            self._started.add(index)

    def finish(self, index: int, num_rows: int) -> torch.Tensor:
        rows = None
        if index in self._started:
            self._started.discard(index)
            rows = self._direct.finish(index, num_rows)
        if rows is None or (self._is_dummy and not torch.cuda.is_current_stream_capturing()):
            rows = self._staged.finish(index, num_rows)
        return rows

    def error(self, step: int) -> PleOffloadError | None:
        return self._direct.error(step) or self._staged.error(step)

    def release(self, step: int) -> None:
        self._staged.release(step)

    def close(self) -> None:
        self._staged.close()  # first: it ends what the GPU waits for
        self._direct.close()
