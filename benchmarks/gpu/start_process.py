"""One engine's start in a process of its own: `python start_process.py FOLDER WARM_FOLDER`.

The GPU's context, the kernels and the imports are warm: a small table (WARM_FOLDER) was opened and looked up before. Then
it opens the table of FOLDER in tier `file`, connects route `direct` and looks a token up; says how long that took and
whether the rows are right; and holds everything until its input ends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import numpy as np
import torch
from children import answer
from memory_facts import process
from random_table import LAYER, ROW_DIM, ROWS_PER_TOKEN
from shards import expected_rows

from ple_offload import open_table
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.layer import PleOffloadLayer
from ple_offload.table import Table

MAX_TOKENS = 8192


class Start:
    """A table opened, connected and looked up once; what it took."""

    def __init__(self, folder: str, token: int) -> None:
        began_s = time.perf_counter()
        self.table: Table = open_table(folder, LAYER, "file")
        opened_s = time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.ids = torch.full((MAX_TOKENS,), token, dtype=torch.int32, device=self.device)
        self.starts = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        self.context = torch.full((1, 2), token, dtype=torch.int32, device=self.device)
        self.layer = PleOffloadLayer(LAYER, ROWS_PER_TOKEN * ROW_DIM)
        self.connector = PleOffloadConnector(
            ConnectorConfig(MAX_TOKENS, 1, session="start"),
            self.layer,
            self.device,
            "inline",
            input_ids_source=self.ids,
            query_start_loc_source=self.starts,
            ngram_context_source=self.context,
            tables={LAYER: self.table},
        )
        connected_s = time.perf_counter()
        step = self.connector.prepare_forward(1, 1)
        hidden = torch.empty((1, 1), device=self.device)
        found = self.layer(hidden, self.ids[:1], self.starts, self.context)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.connector.check(step)
        self.connector.release_outputs()
        done_s = time.perf_counter()
        self.found = found.view(torch.int16).cpu().numpy()[0]
        self.seconds = {
            "open_s": opened_s - began_s,
            "connect_s": connected_s - opened_s,
            "lookup_s": done_s - connected_s,
            "first_row_s": done_s - began_s,
        }

    def right(self) -> bool:
        """Whether the row's values are those that were written, by plain NumPy and not by way of the files."""
        rows = self.table.row_numbers(self.ids[:1].cpu().numpy(), self.starts.cpu().numpy(), self.context.cpu().numpy())
        raw = expected_rows(rows)
        expected = self.table.spec.format.decode_reference(raw, "bf16").view(np.int16).reshape(-1)
        return bool((expected == self.found).all())

    def close(self) -> None:
        self.connector.close()
        self.table.close()


def main(folder: str, warm_folder: str) -> None:
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    Start(warm_folder, 1).close()
    warm = process()
    start = Start(folder, 12_345)
    found: dict[str, Any] = {
        **{key: round(value, 3) for key, value in start.seconds.items()},
        "right": start.right(),
        "device_bytes": start.connector.device_bytes,
        "before": warm,
    }
    answer(found)
    for _ in sys.stdin:  # every line asks for the memory it holds now
        answer(process())
    start.close()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"[:2000]})
        raise
