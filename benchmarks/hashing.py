"""One core, in a process that does nothing else: token ids to row numbers, and to bf16 values (tier `ram`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from calm import Calm
from ids import Stream
from random_table import LAYER, Made
from timing import Plan, interleave, spread

from ple_offload import open_table

TOKENS = (1, 64, 4096)


def run(made: Made, streams: dict[str, Stream], calm: Calm, *, toy: bool) -> dict[str, Any]:
    results = []
    with open_table(made.folder, LAYER, "ram", threads=1) as table:
        for num_tokens in TOKENS:
            rows = np.empty((num_tokens, table.rows_per_token), np.int64)
            values = np.empty((num_tokens, table.embed_dim), ml_dtypes.bfloat16)
            plan = Plan(rounds=2, calls=1, warm_calls=0) if toy else Plan(rounds=25, calls=50, warm_calls=5)
            for kind, stream in streams.items():
                blocks = interleave(
                    {
                        "hash": lambda ids, rows=rows: lambda: table.row_numbers(ids, out=rows),
                        "ids to values": lambda ids, values=values: lambda: table.lookup(ids, out=values),
                    },
                    partial(stream.take, num_tokens),
                    plan,
                    calm,
                )
                us = {name: spread(times) for name, times in blocks.items()}
                results.append({"ids": kind, "tokens": num_tokens, "us": us})
    return {"results": results}
