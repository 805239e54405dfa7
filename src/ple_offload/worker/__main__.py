"""The process that `SpawnedWorker` starts: python -m ple_offload.worker JSON. For people there is `ple-offload serve`.

It ends when its parent does, also in the minutes in which it loads. If it ends by itself, it leaves nothing behind: its log
is for whoever wonders why it died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path

from ple_offload.errors import PleOffloadError
from ple_offload.worker.main import open_tables
from ple_offload.worker.server import PleOffloadWorker


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    options = json.loads(sys.argv[1])
    lifeline = socket.socket(fileno=options["lifeline"])

    def tell(**news: object) -> None:
        with contextlib.suppress(OSError):  # the parent may have gone
            lifeline.send(json.dumps(news).encode())

    lock, loaded, told = threading.Lock(), 0, 0.0

    def progress(num_bytes: int) -> None:
        nonlocal loaded, told
        with lock:
            loaded += num_bytes
            if time.monotonic() - told >= 0.5:
                told = time.monotonic()
                tell(loaded_bytes=loaded)

    loading = threading.Event()
    loading.set()
    threading.Thread(target=_end_with_parent, args=(lifeline.fileno(), loading, options["log"]), daemon=True).start()
    try:
        served = open_tables(
            options["paths"],
            tier=options["tier"],
            threads=options["threads"],
            skip_memory_check=options["skip_memory_check"],
            progress=progress,
        )
        worker = PleOffloadWorker(served, log_path=options["log"])
        worker.listen(options["address"])
    except PleOffloadError as error:
        tell(kind=type(error).__name__, error=str(error))
        logging.getLogger(__name__).error("%s", error)
        return 1
    loading.clear()
    worker.watch_parent(lifeline.fileno())
    tell(listening=True)
    worker.run()
    Path(options["log"]).unlink(missing_ok=True)
    return 0


def _end_with_parent(lifeline_fd: int, loading: threading.Event, log: str) -> None:
    """Until the worker's loop watches the lifeline, this thread does; the parent sends nothing, so it can only end."""
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    while loading.is_set():
        if poll.poll(100) and loading.is_set():
            Path(log).unlink(missing_ok=True)
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
