"""Every environment variable, in one place. A bad value is an error, never ignored.

An argument wins over the environment, the environment over the default. `ple-offload doctor` prints each
value and where it came from.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ple_offload import cgroup
from ple_offload.errors import UsageError

PREFIX = "PLE_OFFLOAD_"
WORKER_KINDS = ("inline", "spawn", "unix")
MAX_THREADS = 4096
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Settings:
    """What the environment says. `origins` maps each field to "default" or to its variable's name."""

    # Threads for reading files and for large gathers; None: as many CPUs as this process may use.
    threads: int | None = None
    # Open a table even when the memory check says that it does not fit.
    skip_memory_check: bool = False
    # Level of the "ple_offload" logger.
    log: str = "warning"
    # Name what the host does for a step on a profiler's time line (profiling.py).
    nvtx: bool = False
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


def _positive(text: str) -> int:
    # the length first: Python refuses to read a number of thousands of digits
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_THREADS):
        raise ValueError(f"a whole number from 1 to {MAX_THREADS}")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _log_level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise ValueError("one of " + ", ".join(LOG_LEVELS))
    return text


# Field -> parser. A parser raises ValueError with what would have been accepted.
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "threads": _positive,
    "skip_memory_check": _switch,
    "log": _log_level,
    "nvtx": _switch,
}


def variable(name: str) -> str:
    """The environment variable of a field of `Settings`."""
    return PREFIX + name.upper()


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment. Read anew at each call, so that a test or a notebook can change it.

    Raises UsageError for a bad value, and for an unknown variable with our prefix (a typo must not pass).
    """
    environ = os.environ if environ is None else environ
    known = {variable(name) for name in _PARSERS}
    for unknown in sorted(key for key in environ if key.startswith(PREFIX) and key not in known):
        raise UsageError(f"environment variable {unknown}: not known; expected {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_PARSERS, "default")
    for name, parse in _PARSERS.items():
        text = environ.get(variable(name), "")
        if text == "":  # unset and empty mean the same, as in a shell
            continue
        try:
            values[name] = parse(text)
        except ValueError as error:
            raise UsageError(f"environment variable {variable(name)}: expected {error}, found {text!r}") from None
        origins[name] = variable(name)
    return Settings(**values, origins=MappingProxyType(origins))


def worker_kind(text: str) -> str:
    """ "inline", "spawn" or "unix" of a `worker` option: inline, spawn, or unix:/path of a daemon's socket."""
    kind = "unix" if text.startswith("unix:") else text
    if kind not in WORKER_KINDS:
        raise UsageError(
            f"worker: expected inline, spawn, or unix:/path as `ple-offload serve` prints it, found {text!r}"
        )
    return kind


def default_socket() -> Path:
    """Where `ple-offload serve` listens unless told otherwise; its folder is this user's alone."""
    uid = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime if runtime.startswith("/") else f"/run/user/{uid}")
    if os.access(folder, os.W_OK | os.X_OK) and folder.is_dir():
        return folder / "ple-offload" / "socket"
    return Path(tempfile.gettempdir()) / f"ple-offload-{uid}" / "socket"  # `serve` refuses a folder somebody else made


def num_threads() -> int:
    """How many threads to use: PLE_OFFLOAD_THREADS, else the CPUs this process may use."""
    return settings().threads or usable_cpus()


def worker_threads() -> int:
    """The same for a worker process: one core in eight, and at least one, is left to the engines beside it."""
    cpus = usable_cpus()
    return settings().threads or max(1, cpus - max(1, cpus // 8))


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs in this process's affinity, at most as many as the cgroup quota pays for (rounded up), never 0.

    `root` is where /proc and /sys are looked for.
    """
    affinity = len(os.sched_getaffinity(0))
    quotas = [quota for _, folder in cgroup.folders("cpu", root) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([affinity, *(-int(-quota // 1) for quota in quotas)]))


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time per period, or None for no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
