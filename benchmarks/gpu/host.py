"""What the GPU figures were measured on, the rate of the bus included."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch

from ple_offload.cuda import kernel_driver_version

COPY_BYTES = 1 << 30
ASKED = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,memory.total"


def describe(folder: Path) -> dict[str, Any]:
    """The machine, its GPU, and the free space of the disk that `folder` is on."""
    free = shutil.disk_usage(folder).free
    return {
        **machine.describe(),
        "available_gib": _available_gib(),
        "disk_free_gib": round(free / (1 << 30), 1),
        "gpu": torch.cuda.get_device_name(),
        "driver": kernel_driver_version(),
        "cuda": torch.version.cuda,
        "triton": machine._version("triton"),
        "nvidia_smi": _nvidia_smi(),
        "pcie_h2d_gb_per_s": round(host_to_device_gb_per_s(), 2),
    }


def host_to_device_gb_per_s(rounds: int = 7) -> float:
    """Of one large copy from page-locked memory, the median of some: what no lookup can beat."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return COPY_BYTES / 1e9 / float(np.median(times))


def _available_gib() -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return round(int(lines["MemAvailable"].split()[0]) / (1 << 20), 1)


def _nvidia_smi() -> str:
    try:
        command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error}"
