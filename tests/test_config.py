"""Environment variables: strict values, known names, and where each value came from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ple_offload import UsageError, config


def test_defaults_when_nothing_is_set() -> None:
    found = config.settings({})
    assert found == config.Settings(threads=None, skip_memory_check=False, log="warning", nvtx=False)
    assert set(found.origins.values()) == {"default"}


def test_values_and_their_origins() -> None:
    found = config.settings({"PLE_OFFLOAD_THREADS": "3", "PLE_OFFLOAD_SKIP_MEMORY_CHECK": "1", "OTHER": "x"})
    assert (found.threads, found.skip_memory_check, found.log) == (3, True, "warning")
    assert dict(found.origins) == {
        "threads": "PLE_OFFLOAD_THREADS",
        "skip_memory_check": "PLE_OFFLOAD_SKIP_MEMORY_CHECK",
        "log": "default",
        "nvtx": "default",
    }


def test_empty_means_unset() -> None:
    assert config.settings({"PLE_OFFLOAD_THREADS": ""}) == config.Settings()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PLE_OFFLOAD_THREADS", "0", "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_THREADS", "-1", "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_THREADS", "two", "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_THREADS", "4097", "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_THREADS", "9" * 5000, "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_THREADS", "\N{SUPERSCRIPT TWO}", "a whole number from 1 to 4096"),
        ("PLE_OFFLOAD_SKIP_MEMORY_CHECK", "yes", "0 or 1"),
        ("PLE_OFFLOAD_LOG", "loud", "one of debug, info, warning, error"),
    ],
)
def test_a_bad_value_names_variable_expected_and_found(name: str, value: str, expected: str) -> None:
    with pytest.raises(UsageError) as error:
        config.settings({name: value})
    for part in (name, expected, repr(value)):
        assert part in str(error.value)


def test_a_variable_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"PLE_OFFLOAD_THREAD: not known; expected .*PLE_OFFLOAD_THREADS"):
        config.settings({"PLE_OFFLOAD_THREAD": "2"})


def test_num_threads_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLE_OFFLOAD_THREADS", "7")
    assert config.num_threads() == 7
    monkeypatch.delenv("PLE_OFFLOAD_THREADS")
    assert config.num_threads() == config.usable_cpus()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        # a parent's quota counts, and so does one that sits deeper
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 4),
        # version 1, joint controllers, no limit and a limit
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        # in a container: the host's path does not exist, the mount's top is the container's own group
        (
            {
                "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
                "sys/fs/cgroup/cpu.max": "500000 100000",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 8),
    ],
)
def test_usable_cpus_obeys_the_cpu_quota(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert config.usable_cpus(write(tmp_path, files)) == cpus


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 2), (8, 7), (15, 14), (16, 14), (128, 112)])
def test_a_worker_leaves_cores_to_the_engines(cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "usable_cpus", lambda: cpus)
    assert config.worker_threads() == threads
    monkeypatch.setenv("PLE_OFFLOAD_THREADS", "3")
    assert config.worker_threads() == 3
