"""Is anybody else using the processors? A benchmark beside other work measures the other work.

`Calm` compares the processors' busy time (/proc/stat) with the time this process used. A measurement starts when the
others have been idle for a moment, and is thrown away and repeated when they were not idle while it ran. Only what others
did decides, never how long ours took. When the patience is used up, everything is kept; the result says how much was.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

WINDOW_S = 0.1
MAX_OTHERS = 0.1  # share of all processors' time
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # what /proc/stat counts in
TICKS_BLUR = 3  # its ticks are samples: so many may be missing or too many


@dataclass
class Calm:
    patience_s: float
    kept: int = 0
    thrown_away: int = 0
    kept_disturbed: int = 0
    _cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def wait(self) -> None:
        """Return when the others were idle for WINDOW_S, or the patience is used up."""
        while self.patience_s > 0:
            mark = Mark.now()
            time.sleep(WINDOW_S)
            if not self._disturbed(mark):
                return
            self.patience_s -= WINDOW_S

    def keep(self, since: Mark) -> bool:
        """Whether what was measured since then counts."""
        disturbed = self._disturbed(since)
        if disturbed and self.patience_s > 0:
            self.patience_s -= time.perf_counter() - since.wall_s
            self.thrown_away += 1
            return False
        self.kept += 1
        self.kept_disturbed += disturbed
        return True

    def describe(self) -> dict[str, object]:
        return {"kept": self.kept, "thrown_away": self.thrown_away, "kept_though_disturbed": self.kept_disturbed}

    def _disturbed(self, since: Mark) -> bool:
        now = Mark.now()
        others_s = (now.busy_s - since.busy_s) - (now.own_s - since.own_s)
        return others_s > MAX_OTHERS * self._cores * (now.wall_s - since.wall_s) + TICKS_BLUR * TICK_S


@dataclass(frozen=True)
class Mark:
    wall_s: float
    busy_s: float  # of all processors, time stolen by the host of a virtual machine included
    own_s: float  # of this process and its ended children

    @classmethod
    def now(cls) -> Mark:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        times = os.times()
        own_s = time.process_time() + times.children_user + times.children_system
        return cls(time.perf_counter(), (user + nice + system + irq + softirq + steal) * TICK_S, own_s)
