"""How much time a run may take: what would not fit is left out and written down, so that what comes later still may."""

from __future__ import annotations

import time
from collections.abc import Callable

from record import Record


class Budget:
    """So many seconds from now on; None: as many as it takes."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def allows(self, seconds: float, record: Record, *place: str) -> bool:
        """Whether something that takes about so many seconds still fits; if not, it is recorded at skipped/<place>."""
        record.forget("skipped", *place)
        left = None if self._end is None else self._end - self._clock()
        if left is None or seconds <= left:
            return True
        record.put(f"it takes about {seconds:.0f} s, and {max(0.0, left):.0f} s were left", "skipped", *place)
        print(f"skipped: {' / '.join(place)}: about {seconds:.0f} s, {max(0.0, left):.0f} s left", flush=True)
        return False


UNLIMITED = Budget(None)
