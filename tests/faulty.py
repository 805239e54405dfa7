"""A worker that dies, stops or dawdles at a chosen place: the product's own worker, with that one place wrapped.

PLACES are in the order of a step's service. At the `nth` time that a worker comes to the place, and for "slow" each time
from then on, it does one of

    kill     SIGKILL to itself
    stop     SIGSTOP to itself; whoever sends SIGCONT lets it go on where it was
    slow     sleep for `seconds`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ple_offload import open_table, table
from ple_offload.formats.gather import GATHERED, Gather, Readers
from ple_offload.memory import sigbus
from ple_offload.spec import inspect
from ple_offload.worker import server
from ple_offload.worker.rank import Rank
from ple_offload.worker.session import Lane

faulty_module = sys.modules[__name__]

PLACES: dict[str, tuple[Any, str]] = {
    "ready": (Lane, "begin"),  # all ranks have said Hello, none has been told to begin
    "doorbell": (server.PleOffloadWorker, "_serve"),
    "inputs": (Rank, "inputs"),  # before they are copied
    "row_numbers": (server, "_row_numbers"),  # after they were computed
    "block": (faulty_module, "before_piece"),  # before its rows are read; the second comes after the first one's flags
    "flag": (faulty_module, "before_flags"),  # the piece's rows are written
}
PIECE_ROWS = 4096  # a multiple of a block: compiled code gathers a step whole, here it does so in pieces


def before_piece() -> None:
    """A place."""


def before_flags() -> None:
    """A place."""


def gather_in_pieces(
    self: Gather, rows: np.ndarray, values: np.ndarray, shares: int, readers: Readers | None = None
) -> int:
    """`Gather.run`, with the two places between."""
    if readers is None:
        return gather_whole(self, rows, values, shares)
    width = values.shape[1] * values.itemsize
    for first in range(0, max(1, readers.total), PIECE_ROWS):
        last = min(readers.total, first + PIECE_ROWS)
        part, blocks = rows[first:last], first // readers.block_rows
        faulty_module.before_piece()
        gather_whole(self, part, values[first : first + part.size], 1)
        faulty_module.before_flags()
        moved = readers.addresses + np.array([first * width, 8 * blocks, 0, 0], np.uint64)
        piece = Readers(moved, readers.shared, readers.block_rows, last - first)
        done = gather_whole(self, part, values[first:last], 1, piece)
        if done != GATHERED:
            return done
    return GATHERED


gather_whole = Gather.run


@dataclass(frozen=True)
class Fault:
    place: str
    do: str
    nth: int = 1
    seconds: float = 0.0


def arm(fault: Fault) -> None:
    """Wrap the place, in this process."""
    owner, name = PLACES[fault.place]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **options) if fault.place == "row_numbers" else None
        if fault.do == "slow" and calls >= fault.nth:
            time.sleep(fault.seconds)
        elif calls == fault.nth:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.do])
        return result if fault.place == "row_numbers" else original(*args, **options)

    setattr(owner, name, wrapped)
    server.PleOffloadWorker._rehearse = lambda *_: None  # type: ignore[method-assign]  # it comes to the same places
    if owner is faulty_module:
        Gather.run = gather_in_pieces  # type: ignore[method-assign]


def serve(
    path: str,
    address: str,
    *,
    tier: str = "file",
    fault: Fault | None = None,
    log: str = "",
    guard: bool = False,
    check_interval_s: float = table.CHECK_INTERVAL_S,
) -> None:
    """Serve a checkpoint until told to stop (SIGTERM). guard: against SIGBUS, as every worker process has it."""
    table.CHECK_INTERVAL_S = check_interval_s
    if guard:
        sigbus.install()  # compiles for a second, so only where it matters
    tables = {spec.layer: open_table(path, spec.layer, tier, threads=1) for spec in inspect(path).tables}
    worker = server.PleOffloadWorker([server.Served(inspect(path).path, tables)], log_path=log)
    worker.listen(address)
    if fault is not None:
        arm(fault)
    worker.run()
