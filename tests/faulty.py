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
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ple_offload import Table, open_table, table
from ple_offload.memory import sigbus
from ple_offload.spec import inspect
from ple_offload.worker import server
from ple_offload.worker.rank import Rank
from ple_offload.worker.session import Lane

PLACES: dict[str, tuple[Any, str]] = {
    "ready": (Lane, "begin"),  # all ranks have said Hello, none has been told to begin
    "doorbell": (server.PleOffloadWorker, "_serve"),
    "inputs": (Rank, "inputs"),  # before they are copied
    "row_numbers": (server, "_row_numbers"),  # after they were computed
    "block": (Table, "gather_into"),  # before its rows are read; the second block comes after the first one's flag
    "flag": (Rank, "publish"),  # the block's rows are written
}


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
