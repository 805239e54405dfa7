"""What stands against a route, in words; and what was chosen, with its reasons.

Every refusal that a GPU, a driver, the memory or the call itself can bring to `direct` is found here before anything is
registered. An explicit request raises it; `auto` takes another route and says it once. What this process can find against
`ipc` is found here too; the rest the worker finds, and refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ple_offload.config import settings, variable
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.shared_memory import PIECE_BYTES
from ple_offload.cuda import Cuda, kernel_driver_version
from ple_offload.errors import CudaError, UsageError
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.memory.limits import GIB, available_memory
from ple_offload.table import Table

# Before this driver, unregistering page cache marked every page dirty, even if it was registered for reading only.
MIN_DRIVER_FOR_FILES = (570, 0)
# A table of which less than this part is missing counts as being in memory: another process may have page-locked it.
NEARLY_ALL = 1 / 20
EVERY_SIZE = 1 << 22  # steps of as many tokens as a step can have


@dataclass(frozen=True)
class Timing:
    """The median time of one eager step, from its ids on the device to its rows there, by both routes."""

    num_tokens: int
    direct_us: float
    staged_us: float


@dataclass(frozen=True)
class RouteReport:
    """Which route a connector takes, why, and what was measured for that."""

    route: str  # "host", "direct", "staged", "ipc", or "auto": both, by the size of a step
    why: str
    direct_tokens: int = 0  # of "auto": steps of up to this many tokens go `direct`
    timings: tuple[Timing, ...] = ()
    seconds: float = 0.0  # that measuring took, once the kernels were compiled

    def __str__(self) -> str:
        text = f"route {self.route}: {self.why}"
        if self.timings:
            times = ", ".join(f"{t.num_tokens}: {t.direct_us:.0f} / {t.staged_us:.0f}" for t in self.timings)
            text += f"; us by number of tokens, direct / staged: {times}; measured in {self.seconds:.2f} s"
        return text


def require_triton() -> None:
    """UsageError where the kernels of the GPU routes cannot be compiled."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UsageError("GPU routes need Triton: pip install 'ple-offload[cuda]'.") from error


def why_not_direct(
    cuda: Cuda, config: ConnectorConfig, tables: Mapping[int, Table], sources_on_cpu: bool
) -> str | None:
    """A sentence that says why a device cannot read these tables itself, or None where it can."""
    if config.request == "rows" and sources_on_cpu:
        return "request 'rows' takes row numbers from row_numbers sources on the device, these are on the CPU."
    for table in tables.values():
        family = table.spec.family
        if config.request == "tokens" and not isinstance(family, QwenPle):
            return f"the row rule of family {family.name!r} has no GPU kernel."
    return why_not_registered(cuda, "ram") or _why_no_files(
        cuda, config, [table for table in tables.values() if table.tier == "file"]
    )


def why_not_registered(cuda: Cuda, tier: str) -> str | None:
    """Why a device cannot read memory of this tier, whichever table it is; or None."""
    if cuda.reads_host_memory:
        return None
    if not cuda.attribute("read_only_host_register"):
        return f"{cuda.device} cannot register host memory for reading only."
    found = kernel_driver_version()
    if tier == "file" and found is not None and found < MIN_DRIVER_FOR_FILES:
        return (
            f"NVIDIA driver {found[0]}.{found[1]} marks every page of a registered file dirty, expected "
            f"{MIN_DRIVER_FOR_FILES[0]} or later: use tier 'ram' or a newer driver."
        )
    return None


def why_not_ipc(cuda: Cuda) -> str | None:
    """Why this device's memory cannot be shared with another process, found by trying it with a small piece; or None."""
    try:
        address = cuda.allocate(PIECE_BYTES)
        try:
            cuda.share(address)
        finally:
            cuda.free(address)
    except CudaError as error:
        return str(error)
    return None


def _why_no_files(cuda: Cuda, config: ConnectorConfig, tables: list[Table]) -> str | None:
    if not tables or cuda.reads_host_memory:
        return None
    reason = why_not_registered(cuda, "file")
    skip = settings().skip_memory_check if config.skip_memory_check is None else config.skip_memory_check
    if reason is not None or skip:
        return reason
    needed = 0
    for table in tables:
        absent = table.store.absent_bytes()
        needed += absent if absent < NEARLY_ALL * table.spec.size_bytes else table.spec.size_bytes
    report = available_memory()
    if needed <= report.available_bytes:
        return None
    return (
        f"{needed / GIB:.3f} GiB of page cache would be page-locked, {report.available_bytes / GIB:.3f} GiB is available "
        f"(limited by {report.limited_by}): raise that limit, or set {variable('skip_memory_check')}=1 if you know better."
    )
