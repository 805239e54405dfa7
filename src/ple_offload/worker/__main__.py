"""The process that `SpawnedWorker` starts: python -m ple_offload.worker JSON. For people there is `ple-offload serve`."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time

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
    worker.watch_parent(lifeline.fileno())
    tell(listening=True)
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
