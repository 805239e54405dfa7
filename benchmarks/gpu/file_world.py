"""A table in a checkpoint's own files, read through the page cache: what `World` is to contenders that take a `Table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import random_table
import shards
from load import cached_share
from random_table import Made
from start import plain_read_rate
from world import decoded

from ple_offload.table import open_table
from ple_offload.worker.spawn import SpawnedWorker


class FileWorld:
    """See the module; closed as a context manager."""

    def __init__(self, made: Made, facts: dict[str, Any]) -> None:
        self._made, self._facts = made, facts
        self.table = open_table(made.folder, random_table.LAYER, "file")
        self.spec = self.table.spec

    @classmethod
    def make(cls, folder: Path, rows: int, budget_s: float) -> FileWorld:
        """Write the checkpoint, or find it, and bring all of it into the page cache.

        It has fewer rows where the disk has no room, or takes longer than `budget_s` to write them.
        """
        made, facts = shards.write(folder, rows, budget_s)
        if cached_share(made.files) < 1:
            plain_read_rate(made.files)
        return cls(made, facts)

    def rows_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As of World."""
        return self.table.row_numbers(ids)

    def reference(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """As of World, from the rule that the bytes were written by and not from the files."""
        return decoded(self.spec.format, shards.expected_rows(rows)).reshape(len(rows), -1)

    def worker(self) -> SpawnedWorker:
        """Start a process that serves this checkpoint."""
        return SpawnedWorker(self._made.folder, tier="file")

    def describe(self) -> dict[str, Any]:
        return {
            "format": self.spec.format.name,
            "num_rows": self.spec.num_rows,
            "row_bytes": self.spec.row_bytes,
            "cached_share": round(cached_share(self._made.files), 4),
            **self._facts,
            **self.table.store.describe(),
        }

    def close(self) -> None:
        self.table.close()

    def __enter__(self) -> FileWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
