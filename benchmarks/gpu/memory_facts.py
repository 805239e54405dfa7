"""What processes and the host hold, as the kernel counts it; all in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

KIB = 1024
PAGE = 4096
HOST = ("MemAvailable", "Cached", "Shmem", "AnonPages", "Unevictable", "Mlocked", "Dirty")


def process(pid: int | str = "self") -> dict[str, int]:
    """Proportional shares by kind: memory that n processes map counts an n-th in each. And what is resident."""
    wanted = ("Rss", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
    return _kib(Path(f"/proc/{pid}/smaps_rollup"), wanted)


def host() -> dict[str, int]:
    """Of the whole host; `pinned` counts a page once for every process and driver that has it pinned."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    pinned = int(counts.get("nr_foll_pin_acquired", 0)) - int(counts.get("nr_foll_pin_released", 0))
    return {**_kib(Path("/proc/meminfo"), HOST), "pinned": pinned * PAGE}


def change(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: after[key] - before[key] for key in before}


def total(shares: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sum of several processes' shares."""
    found: dict[str, int] = {}
    for share in shares:
        for key, value in share.items():
            found[key] = found.get(key, 0) + value
    return found


def gpu_descriptors(pid: int) -> list[str]:
    """What a process has open of the GPU's driver: nothing, unless it has used the GPU."""
    targets = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
    return sorted(str(target) for target in targets if "nvidia" in str(target))


def _kib(path: Path, wanted: Iterable[str]) -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {key: int(lines[key].split()[0]) * KIB for key in wanted if key in lines}
