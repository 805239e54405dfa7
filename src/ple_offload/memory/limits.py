"""How much memory this process may still use, and a clear refusal before anything large is allocated.

Three limits count, and the smallest decides: MemAvailable of the host, the cgroup's memory limit (version 2, with every
parent up to the root; version 1 likewise), and nothing else: swap is not memory a lookup can wait for. Page cache that a
cgroup is charged with is counted as free when it is inactive or clean file memory, since the kernel reclaims it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ple_offload import cgroup
from ple_offload.errors import MemoryLimitError

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryReport:
    """What may still be used, in bytes, and what says so."""

    available_bytes: int
    limited_by: str  # "MemAvailable" or "cgroup <folder>"
    mem_total_bytes: int
    mem_available_bytes: int
    cgroup_limit_bytes: int | None  # the tightest limit among the process's cgroups
    cgroup_available_bytes: int | None


def available_memory(root: str | Path = "/") -> MemoryReport:
    """Read the limits of this process; `root` is where /proc and /sys are looked up (another folder in tests)."""
    root = Path(root)
    meminfo = _fields(root / "proc/meminfo", unit=1024)
    total, available = meminfo.get("MemTotal:", 0), meminfo.get("MemAvailable:", 0)
    best, limited_by, limit_bytes, cgroup_available = available, "MemAvailable", None, None
    for folder, limit, usage, reclaimable in _cgroups(root):
        free = max(0, limit - max(0, usage - reclaimable))
        if cgroup_available is None or free < cgroup_available:
            limit_bytes, cgroup_available = limit, free
        if free < best:
            best, limited_by = free, f"cgroup {folder}"
    return MemoryReport(best, limited_by, total, available, limit_bytes, cgroup_available)


def require_memory(needed_bytes: int, what: str, root: str | Path = "/") -> MemoryReport:
    """Return the report when `needed_bytes` are available, else raise MemoryLimitError with the figures."""
    report = available_memory(root)
    if needed_bytes > report.available_bytes:
        raise MemoryLimitError(
            f"{what}: needs {needed_bytes / GIB:.3f} GiB of memory, {report.available_bytes / GIB:.3f} GiB is available "
            f"(limited by {report.limited_by})."
        )
    return report


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    """The 'name number' lines of a kernel file; empty when it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {w[0]: int(w[1]) * unit for w in words if len(w) > 1 and w[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_PREFIX = {1: "total_", 2: ""}  # of the fields of memory.stat that count children too


def _cgroups(root: Path) -> Iterator[tuple[str, int, int, int]]:
    """(folder, limit, usage, reclaimable) in bytes of each limited memory cgroup of this process, up to the root."""
    for version, folder in cgroup.folders("memory", root):
        limit, usage = (_number(folder / name) for name in _FILES[version])
        if limit is None or usage is None or limit >= 1 << 60:  # version 1 writes "no limit" as about 2**63
            continue
        stat = _fields(folder / "memory.stat")
        cached = sum(stat.get(_PREFIX[version] + name, 0) for name in ("inactive_file", "active_file"))
        kept = stat.get("file_dirty", stat.get("total_dirty", 0))
        kept += stat.get("file_mapped", stat.get("total_mapped_file", 0))
        yield "/" + str(folder.relative_to(root)), limit, usage, max(0, cached - kept)
