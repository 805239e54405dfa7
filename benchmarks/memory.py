"""Memory of a process that has the table open in `ram`, beyond that of a process that only imported and warmed up.

Measured as PSS, after lookups of all sizes, and at its peak while the table loads, sampled from outside. The host's
MemAvailable is sampled as well: it would show a table standing in memory twice (in the page cache and in the memfd).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from child import pss_bytes
from random_table import Made

CHILD = str(Path(__file__).parent / "child.py")
SAMPLE_S = 0.02
ALLOWED_BYTES = 64 << 20


def run(made: Made) -> dict[str, Any]:
    baseline, _, _ = _sampled("baseline")
    found, peak_bytes, least_available_bytes = _sampled("ram", str(made.folder))
    beyond = found["pss_bytes"] - baseline["pss_bytes"] - made.table_bytes
    return {
        "table_bytes": made.table_bytes,
        "baseline_pss_bytes": baseline["pss_bytes"],
        "pss_bytes": found["pss_bytes"],
        "memfd_bytes": found["memfd_bytes"],
        "huge_page_bytes": found["huge_page_bytes"],
        "beyond_table_and_baseline_bytes": beyond,
        "within_64_mib": beyond <= ALLOWED_BYTES,
        "peak_beyond_table_and_baseline_bytes": peak_bytes - baseline["pss_bytes"] - made.table_bytes,
        "available_memory_used_at_peak_bytes": least_available_bytes,
    }


def _sampled(*job: str) -> tuple[dict[str, Any], int, int]:
    """(what the child says, its greatest PSS, the most MemAvailable that went while it ran) in bytes."""
    before = _available_bytes()
    peak = used = 0
    with subprocess.Popen([sys.executable, CHILD, *job], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                peak = max(peak, pss_bytes(process.pid))
            used = max(used, before - _available_bytes())
            time.sleep(SAMPLE_S)
        assert process.stdout is not None
        text = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"child {job} failed with status {process.returncode}")
    return json.loads(text), peak, used


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
