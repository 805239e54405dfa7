"""Where this process's cgroup limits are: version 2, version 1, and systems that have both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's cgroup for a controller ("cpu", "memory"), then of each of its parents.

    root: where /proc and /sys are looked up. In a container the folder that /proc/self/cgroup names may be one of the host
    and not be there; the top of the mount, which then is the container's own cgroup, is always among them.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            version, top = 2, root / "sys/fs/cgroup"
            # on a hybrid system version 2 is mounted beside the version 1 controllers
            if not (top / "cgroup.controllers").exists() and (top / "unified").is_dir():
                top = top / "unified"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top / name.lstrip("/")
        while folder != top:
            if folder.is_dir():
                yield version, folder
            folder = folder.parent
        yield version, top
