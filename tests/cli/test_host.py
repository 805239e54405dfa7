"""What doctor reads about the host, against folders that look like /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from ple_offload.cli import host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_huge_pages(tmp_path: Path) -> None:
    folder = "sys/kernel/mm/transparent_hugepage/"
    write(tmp_path, {folder + "enabled": "always [madvise] never\n"})
    assert host.huge_pages(tmp_path) == {"enabled": "madvise", "shmem_enabled": None}


@pytest.mark.parametrize(
    ("release", "can"),
    [
        ("6.1.0-18-amd64", True),
        ("6.18.44", True),
        ("5.15.0-105-generic", False),
        ("4.18", False),
        ("odd", False),
    ],
)
def test_can_collapse(release: str, can: bool) -> None:
    assert host.can_collapse(release) is can


@pytest.mark.parametrize(("text", "nodes"), [("0\n", 1), ("0-1\n", 2), ("0,2-3\n", 3), (None, None)])
def test_numa_nodes(text: str | None, nodes: int | None, tmp_path: Path) -> None:
    if text is not None:
        write(tmp_path, {"sys/devices/system/node/has_memory": text})
    assert host.numa_nodes(tmp_path) == nodes


MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / {folder} rw shared:2 master:1 - nfs4 server:/models rw,vers=4.2
32 21 253:0 / {folder}/virtual rw - ext4 /dev/vda rw
31 21 259:2 / {folder}/my\040disk rw - xfs /dev/nvme0n1p2 rw
"""


def test_filesystem_is_the_innermost_mount(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "my disk" / "checkpoint").mkdir(parents=True)
    (models / "virtual").mkdir()
    root = write(
        tmp_path / "root",
        {
            "proc/self/mountinfo": MOUNTS.format(folder=models),
            "sys/dev/block/8:1/queue/rotational": "1\n",
            "sys/dev/block/259:2/queue/rotational": "0\n",
            "sys/dev/block/253:0/queue/rotational": "1\n",
        },
    )
    places = (tmp_path, models, models / "my disk" / "checkpoint", models / "virtual")
    found = [host.filesystem(path, root) for path in places]
    assert [(f.type, f.source, f.rotational, f.is_network) for f in found if f] == [
        ("ext4", "/dev/sda1", True, False),
        ("nfs4", "server:/models", None, True),
        ("xfs", "/dev/nvme0n1p2", False, False),
        ("ext4", "/dev/vda", None, False),  # says that it is rotational, as virtual disks do
    ]


def test_a_host_without_proc_is_no_error(tmp_path: Path) -> None:
    assert host.filesystem(tmp_path, tmp_path / "nothing") is None
    assert host.huge_pages(tmp_path) == {"enabled": None, "shmem_enabled": None}


def test_versions_name_what_is_installed() -> None:
    found = host.versions()
    assert found["numpy"]
    assert set(host.PACKAGES) < set(found)
