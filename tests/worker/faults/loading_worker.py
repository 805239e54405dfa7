"""A spawned worker that loads for a minute."""

import sys
import time

from ple_offload.worker import __main__ as worker

if __name__ == "__main__":
    worker.open_tables = lambda *args, **options: time.sleep(60)
    sys.exit(worker.main())
