"""Is anybody else using the processors? A benchmark beside other work measures the other work.

Two looks at /proc/stat: how many processes want a processor at this moment, and how much processor time went to others
since a mark. A block of calls starts when this process is the only one that runs; one whose time was shared all the same is
thrown away and repeated. Only what others did decides, never how long ours took. When the patience is used up,
everything is kept, and the result says how much was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NAP_S = 0.005
MAX_OTHERS = 0.1  # share of all processors' time
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # what /proc/stat counts in
TICKS_BLUR = 3  # its ticks are samples: so many may be missing or too many


@dataclass
class Calm:
    patience_s: float
    kept: int = 0
    thrown_away: int = 0
    kept_disturbed: int = 0
    ours: list[int] = field(default_factory=list)  # pids of processes that take part in what is measured

    def undisturbed(self, measure: Callable[[], float]) -> float:
        """Call `measure` until nobody disturbed it (or the patience is used up); returns what it gave then."""
        while True:
            self.wait()
            since = Mark.now(self.ours)
            found = measure()
            others_share = Mark.now(self.ours).others_share(since)
            time.sleep(NAP_S)  # our own threads fall asleep meanwhile, and are not taken for others
            disturbed = others_share > MAX_OTHERS or not alone()
            if not disturbed or self.patience_s <= 0:
                self.kept += 1
                self.kept_disturbed += disturbed
                return found
            self.patience_s -= time.perf_counter() - since.wall_s
            self.thrown_away += 1

    def wait(self) -> None:
        """Nap, at least once; return when nothing else runs, or the patience is used up."""
        time.sleep(NAP_S)
        while self.patience_s > 0 and not alone():
            time.sleep(NAP_S)
            self.patience_s -= NAP_S

    def describe(self) -> dict[str, int]:
        return {"kept": self.kept, "thrown_away": self.thrown_away, "kept_though_disturbed": self.kept_disturbed}


def alone() -> bool:
    """Whether this process is the only one that runs now (its own threads must be asleep)."""
    return "\nprocs_running 1\n" in Path("/proc/stat").read_text()


def cpu_s(pid: int) -> float:
    """Time that all threads of a process have had on a processor, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Mark:
    """A moment, in seconds of each kind."""

    wall_s: float
    busy_s: float  # of all processors, time stolen by the host of a virtual machine included
    own_s: float  # of this process, its ended children, and those that are said to be ours

    @classmethod
    def now(cls, ours: list[int]) -> Mark:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        times = os.times()
        own_s = time.process_time() + times.children_user + times.children_system + sum(map(cpu_s, ours))
        return cls(time.perf_counter(), (user + nice + system + irq + softirq + steal) * TICK_S, own_s)

    def others_share(self, since: Mark) -> float:
        """Share of all processors' time that others had, less what the ticks' coarseness may pretend."""
        others_s = (self.busy_s - since.busy_s) - (self.own_s - since.own_s) - TICKS_BLUR * TICK_S
        return others_s / (self.wall_s - since.wall_s) / (os.cpu_count() or 1)
