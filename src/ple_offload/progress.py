"""One line on stderr for work that takes long: how much is done, how fast, how long still."""

from __future__ import annotations

import sys
import threading
import time


class ByteProgress:
    """Counts bytes from any thread and redraws one line at most ten times a second; `close` ends the line."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._done = what, total_bytes, 0
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._drawn = 0.0

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._drawn >= 0.1 or self._done == self._total:
                self._drawn = now
                self._draw(now)

    def _draw(self, now: float) -> None:
        rate = self._done / max(1e-9, now - self._start)
        left_s = (self._total - self._done) / rate if rate else 0.0
        sys.stderr.write(
            f"\r{self._what}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s, "
            f"{left_s:.0f} s left  "
        )
        sys.stderr.flush()

    def close(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()
