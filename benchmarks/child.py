"""What a benchmark measures of a process of its own; started as `python child.py JOB [FOLDER]`, prints one JSON line.

Jobs: `baseline` imports and warms a kernel, `ram` opens a table and looks up, both then report their memory; `start`
times import, open and first lookup; `wake` times empty parallel regions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def pss_bytes(pid: int | str = "self") -> int:
    """Proportional share of memory, which counts a table that is shared or mapped once as what it takes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def baseline() -> dict[str, Any]:
    from ple_offload import config, native
    from ple_offload import table as _  # noqa: F401 (all that opening a table imports)

    native.wake_up_us(config.num_threads())
    return {"pss_bytes": pss_bytes()}


def ram(folder: str) -> dict[str, Any]:
    from ple_offload import open_table

    table = open_table(folder, tier="ram")
    rng = np.random.default_rng(0)
    for num_tokens in (1, 64, 4096, 4096):
        table.lookup(rng.integers(0, table.spec.family.vocab_size, num_tokens))
    return {
        "pss_bytes": pss_bytes(),
        "memfd_bytes": os.fstat(table.store.fd).st_blocks * 512,
        "table_bytes": table.spec.size_bytes,
        **table.store.describe(),
    }


def start(folder: str) -> dict[str, Any]:
    begin = time.perf_counter()
    from ple_offload import open_table

    imported = time.perf_counter()
    with open_table(folder, tier="file") as table:
        opened = time.perf_counter()
        table.lookup([1, 2, 3])
        return {
            "import_s": imported - begin,
            "open_s": opened - imported,
            "first_lookup_s": time.perf_counter() - opened,
        }


def wake(pauses_us: str, rounds: str, patience_s: str) -> dict[str, Any]:
    import numba
    from calm import Calm
    from timing import Plan, interleave, spread

    from ple_offload import native

    marks = np.zeros(numba.get_num_threads(), np.int64)
    native._mark(marks)
    found: dict[str, Any] = {"layer": numba.threading_layer(), "threads": marks.size, "after_pause_us": {}}
    calm = Calm(float(patience_s))
    for pause_us in map(int, pauses_us.split(",")):
        plan = Plan(rounds=int(rounds), calls=50, warm_calls=5, call_pause_s=pause_us / 1e6)
        blocks = interleave({"region": lambda _: lambda: native._mark(marks)}, lambda: None, plan, calm)
        found["after_pause_us"][pause_us] = spread(blocks["region"])
    found["wake_up_us"] = round(native.wake_up_us(marks.size), 1)
    return found


if __name__ == "__main__":
    job = {"baseline": baseline, "ram": ram, "start": start, "wake": wake}[sys.argv[1]]
    print(json.dumps(job(*sys.argv[2:])))
