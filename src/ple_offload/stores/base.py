"""What a store is: where the bytes of row r are. It knows nothing of token ids or dtypes.

A store maps the rows of one table into this process, read-only, and hands out their addresses as a `RowMap`, which the
compiled gathers read (formats/gather.py). The addresses stay valid until `close`. A store allocates nothing per lookup and
may be read by any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ple_offload.checkpoint.reader import Stamp


@dataclass(frozen=True)
class Segment:
    """Rows [first_row, first_row + num_rows) of a table lie in `path`, in order, from byte `offset` on.

    stamp: the file's when its header was read; None where nobody read one.
    """

    path: Path
    offset: int
    first_row: int
    num_rows: int
    stamp: Stamp | None = None


@dataclass(frozen=True)
class Part:
    """Rows of a table behind one read-only descriptor of a store, which the store closes; fit for another process."""

    fd: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class RowMap:
    """The addresses of a table's rows."""

    bases: npt.NDArray[np.uint64]  # (segments,) the address of each segment's first row
    starts: npt.NDArray[np.int64]  # (segments + 1,) the first row of each segment, then the number of rows
    step: int  # rows per segment where all are equal (the last may be short), else 0

    @classmethod
    def of(cls, bases: Sequence[int], counts: Sequence[int]) -> RowMap:
        """Segments of `counts` rows each, in row order, from the addresses `bases`."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        equal = len(set(counts[:-1])) <= 1 and counts[-1] <= counts[0]
        return cls(np.array(bases, np.uint64), starts, counts[0] if equal else 0)


class Store(Protocol):
    """The rows of one table, addressable."""

    tier: str
    rows: RowMap

    def ranges(self) -> list[tuple[int, int]]:
        """The mapped ranges that hold the rows, as (address, bytes), for whoever registers them with a device."""

    def parts(self) -> list[Part]:
        """What another process maps to read the same memory."""

    def bring_in(self, threads: int) -> None:
        """Read into memory what is not there yet, for whoever is about to page-lock it."""

    def absent_bytes(self) -> int:
        """How much of the rows is not in memory, as far as the kernel tells; all of it where it does not."""

    def check(self) -> None:
        """Raise StoreError when the rows can no longer be trusted (their file was cut, or changed in place)."""

    def describe(self) -> dict[str, object]:
        """Facts for `doctor` and logs: bytes held, who shares them, how much sits on huge pages."""

    def close(self) -> None:
        """Unmap; safe to call twice. No lookup may be running."""
