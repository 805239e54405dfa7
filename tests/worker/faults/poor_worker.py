"""A spawned worker on a host with 1 MiB of memory left."""

import sys

from ple_offload.memory import limits
from ple_offload.worker import __main__ as worker

if __name__ == "__main__":
    limits.available_memory = lambda root="/": limits.MemoryReport(
        1 << 20, "MemAvailable", 8 << 30, 1 << 20, None, None
    )
    sys.exit(worker.main())
