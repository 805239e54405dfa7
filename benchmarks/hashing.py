"""The hash alone: token ids to row numbers, on one core."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from calm import Calm
from ids import Stream
from random_table import LAYER, Made
from timing import Plan, interleave, spread

from ple_offload import open_table

TOKENS = (1, 64, 4096)


def run(made: Made, streams: dict[str, Stream], calm: Calm, *, toy: bool) -> dict[str, Any]:
    results = []
    with open_table(made.folder, LAYER, "file", threads=1) as table:
        for num_tokens in TOKENS:
            out = np.empty((num_tokens, table.rows_per_token), np.int64)
            plan = Plan(rounds=2, calls=1, warm_calls=0) if toy else Plan(rounds=25, calls=50, warm_calls=5)
            for kind, stream in streams.items():
                blocks = interleave(
                    {"hash": lambda ids, out=out: lambda: table.row_numbers(ids, out=out)},
                    partial(stream.take, num_tokens),
                    plan,
                    calm,
                )
                results.append({"ids": kind, "tokens": num_tokens, "us": spread(blocks["hash"])})
    return {"results": results}
