"""What `doctor` reads about this host. Every reader takes `root`, where /proc and /sys are looked for.

A fact that cannot be read is None, never an error: doctor runs where things are broken.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
PACKAGES = ("numpy", "numba", "ml_dtypes", "torch", "transformers", "safetensors", "triton", "cuda-bindings")
NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "gpfs"})


def versions() -> dict[str, str | None]:
    """Package -> installed version, or None. Nothing is imported."""
    found: dict[str, str | None] = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def huge_pages(root: Path = ROOT) -> dict[str, str | None]:
    """The chosen word of each setting of transparent huge pages: anonymous memory, shared memory (memfd)."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    return {name: _chosen(_read(folder / name)) for name in ("enabled", "shmem_enabled")}


def can_collapse(release: str) -> bool:
    """Whether this kernel has MADV_COLLAPSE (Linux 6.1), which makes huge pages of a filled memfd."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return match is not None and (int(match[1]), int(match[2])) >= (6, 1)


def numa_nodes(root: Path = ROOT) -> int | None:
    """How many NUMA nodes have memory."""
    text = _read(root / "sys/devices/system/node/has_memory")
    if not text:
        return None
    spans = (span.partition("-") for span in text.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


@dataclass(frozen=True)
class Filesystem:
    """Where a path lies."""

    mount_point: str
    type: str  # as in /proc/self/mountinfo: ext4, xfs, overlay, nfs4, ...
    source: str
    rotational: bool | None  # a hard disk; None where nothing tells (overlay, network, a virtual disk)
    free_bytes: int

    @property
    def is_network(self) -> bool:
        return self.type in NETWORK_FILESYSTEMS or self.type.startswith("fuse")


def filesystem(path: Path, root: Path = ROOT) -> Filesystem | None:
    """The filesystem that holds `path` (followed to where it really lies)."""
    real = path.resolve()
    best: tuple[str, str, str, str] | None = None
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        # Of equal mount points the later one lies on top.
        if real.is_relative_to(mount_point) and (best is None or len(mount_point) >= len(best[0])):
            best = (mount_point, rest[0], rest[1], fields[2])
    if best is None:
        return None
    mount_point, kind, source, device = best
    usage = os.statvfs(real)
    # Virtual disks call themselves rotational, whatever is behind them.
    virtual = Path(source).name.startswith(("vd", "xvd"))
    rotational = None if virtual else _rotational(device, root)
    return Filesystem(mount_point, kind, source, rotational, usage.f_bavail * usage.f_frsize)


def _rotational(device: str, root: Path) -> bool | None:
    block = root / "sys/dev/block" / device
    for queue in (block / "queue", block / ".." / "queue"):  # a partition's queue is its disk's
        text = _read(queue / "rotational")
        if text is not None:
            return text == "1"
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets: "always [madvise] never" -> "madvise"."""
    match = re.search(r"\[(.+?)\]", text or "")
    return match[1] if match else None
