"""Memory limits, read from a fake root: cgroup version 2, version 1, hybrid, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ple_offload.errors import MemoryLimitError
from ple_offload.memory.limits import GIB, available_memory, require_memory


def root(tmp_path: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n", **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_cgroups_mem_available_decides(tmp_path: Path) -> None:
    report = available_memory(root(tmp_path, {}))
    assert (report.available_bytes, report.limited_by) == (8 * GIB, "MemAvailable")
    assert report.cgroup_limit_bytes is None


def test_version_2_counts_every_parent_and_reclaimable_cache(tmp_path: Path) -> None:
    """The parent's 4 GiB limit decides: 3 GiB used, of which 1 GiB is file cache that is neither mapped nor dirty."""
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"inactive_file {GIB}\nactive_file {GIB}\nfile_dirty 0\nfile_mapped {GIB}\n",
    }
    report = available_memory(root(tmp_path, files))
    assert (report.available_bytes, report.limited_by) == (2 * GIB, "cgroup /sys/fs/cgroup/pod")
    assert (report.cgroup_limit_bytes, report.cgroup_available_bytes) == (4 * GIB, 2 * GIB)


def test_in_a_container_the_mount_itself_is_the_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/path/of/the/host\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert available_memory(root(tmp_path, files)).available_bytes == GIB


def test_version_1_and_its_number_for_no_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/box\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/memory.usage_in_bytes": f"{5 * GIB}\n",
        f"{folder}/box/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{folder}/box/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    report = available_memory(root(tmp_path, files))
    assert (report.available_bytes, report.limited_by) == (GIB, "cgroup /sys/fs/cgroup/memory/box")


def test_a_use_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cgroup.controllers": "",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert available_memory(root(tmp_path, files)).available_bytes == 0


def test_the_refusal_has_the_figures(tmp_path: Path) -> None:
    fake = root(tmp_path, {})
    assert require_memory(8 * GIB, "table x", fake).available_bytes == 8 * GIB
    with pytest.raises(MemoryLimitError, match=r"table x: needs 48\.000 GiB .* 8\.000 GiB is available .*MemAvailable"):
        require_memory(48 * GIB, "table x", fake)
    with pytest.raises(
        MemoryLimitError, match=r"needs 8\.002 GiB .* 8\.000 GiB is"
    ):  # a refusal of little shows how little
        require_memory(8 * GIB + (2 << 20), "table x", fake)


def test_this_machine_has_some_memory() -> None:
    assert available_memory().available_bytes > 1 << 20
