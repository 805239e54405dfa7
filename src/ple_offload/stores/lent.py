"""A table that another process owns: its memory or its files, mapped here from read-only descriptors.

Nothing is copied. The memory stays as long as somebody maps it: the owner's end changes nothing here.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence

from ple_offload.errors import StoreError
from ple_offload.memory import memfd
from ple_offload.memory.mapping import MADV_COLLAPSE, MADV_RANDOM
from ple_offload.stores.base import Part
from ple_offload.stores.file import FileStore


class LentStore(FileStore):
    """Maps parts that hold every row once; closes their descriptors, also when this raises.

    Each part's segments have a path of their own, for messages: the descriptor is what is mapped.
    tier: "ram" for sealed memory, "file" for files. Raises StoreError for a descriptor that could be written through, is no
    file, is too small, or, in tier "ram", is not sealed.
    """

    def __init__(self, tier: str, parts: Sequence[Part], row_bytes: int, *, name: str) -> None:
        self.tier = tier
        self._mappings, self._files = [], {}  # for `close`, should this raise
        self._advice = MADV_COLLAPSE if tier == "ram" else MADV_RANDOM  # huge pages are there: only mapped so
        try:
            for part in parts:
                _check(part, tier)
        except BaseException:
            for part in parts:
                os.close(part.fd)
            raise
        files = {part.segments[0].path: part.fd for part in parts}
        segments = sorted((s for part in parts for s in part.segments), key=lambda s: s.first_row)
        super().__init__(segments, row_bytes, name=name, files=files)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "tier": self.tier, "shared_with": "the worker that lends it, and who borrows it"}


def _check(part: Part, tier: str) -> None:
    where = part.segments[0].path
    if fcntl.fcntl(part.fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise StoreError(f"{where}: expected a read-only descriptor, found one that can write.")
    if not stat.S_ISREG(os.fstat(part.fd).st_mode):
        raise StoreError(f"{where}: expected a file or memory, found something else.")
    if tier == "ram" and not memfd.is_sealed(part.fd):
        raise StoreError(f"{where}: expected memory that is sealed against every change, found memory that is not.")
