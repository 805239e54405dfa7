"""What a figure was measured on; stored with every result, because without it a figure means nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

QUIET_LOAD = 0.5


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def describe() -> dict[str, object]:
    """CPU, memory, kernel, huge-page settings, versions and the load at this moment."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = Path("/proc/meminfo").read_text()
    flags = set(_first(r"^(?:flags|Features)\s*: (.*)$", cpuinfo).split())
    pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "cpu": _first(r"^model name\s*: (.*)$", cpuinfo) or platform.machine(),
        "cpu_model": " ".join(_first(rf"^{key}\s*: (.*)$", cpuinfo) for key in ("cpu family", "model", "stepping")),
        "cpu_vectors": [flag for flag in ("avx2", "avx512f", "avx512bw", "asimd", "sve") if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "virtual": "hypervisor" in flags,
        "caches": _caches(),
        "memory_gib": round(int(_first(r"^MemTotal:\s*(\d+)", meminfo)) / (1 << 20), 1),
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen(pages / "enabled"),
        "shmem_huge_pages": _chosen(pages / "shmem_enabled"),
        "gives_free_memory_to_host": Path("/sys/module/page_reporting").exists(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("ple-offload", "numpy", "numba", "torch", "tokenizers")},
        "load_average_at_start": round(load_average(), 2),
    }


def warning() -> str | None:
    """What to say when the machine is too busy for its figures to be believed."""
    load = load_average()
    if load <= QUIET_LOAD:
        return None
    return f"load average {load:.2f} at start: other work ran at the same time, distrust absolute times"


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting."""
    with contextlib.suppress(OSError):
        return _first(r"\[(\w+)\]", path.read_text())
    return "unknown"


def _caches() -> dict[str, str]:
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            found[f"L{level} {kind.lower()}"] = size
    return found


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "source tree" if name == "ple-offload" else "not installed"
