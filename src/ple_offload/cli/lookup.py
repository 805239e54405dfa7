"""Write the values of each token's rows to a .npy file, shape [num_tokens, embed_dim].

NumPy files have no bfloat16: values of BF16 and FP8 tables are written as float32, which holds every bfloat16
exactly. Values of FP16 and FP32 tables keep their type.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ple_offload.cli.common import (
    add_context,
    add_json,
    add_layer,
    add_path,
    add_tier,
    one_request,
    parse_tokens,
    print_json,
    show_progress,
)
from ple_offload.errors import UsageError

HELP = "write the values of each token's rows to a .npy file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--tokens", metavar="IDS", required=True, help="token ids, as in 1,2,3")
    parser.add_argument("--out", metavar="FILE.npy", required=True, help="file to write (replaced if it exists)")
    add_layer(parser)
    add_context(parser)
    add_tier(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    parse_tokens(args)  # wrong usage is told before anything is opened
    out = Path(args.out)
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    import numpy as np

    import ple_offload

    with ple_offload.open_table(
        args.path,
        layer=args.layer,
        tier=args.tier,
        progress=show_progress(),
        skip_memory_check=args.skip_memory_check or None,
    ) as table:
        values = table.lookup(**one_request(args, table.spec.family))
        tier = table.tier
    stored = values.astype(np.float32) if values.dtype.name == "bfloat16" else values
    with out.open("wb") as file:  # np.save given a path would append .npy to it
        np.save(file, stored)
    if args.json:
        print_json({"out": str(out), "shape": list(stored.shape), "dtype": str(stored.dtype), "tier": tier})
    else:
        print(f"{out}: {stored.shape[0]} tokens x {stored.shape[1]} values, {stored.dtype}, from tier {tier}")
