"""Write the values of each token's rows to a .npy file, shape [num_tokens, embed_dim].

NumPy files have no bfloat16: values of BF16 and FP8 tables are written as float32, which holds every bfloat16
exactly. Values of FP16 and FP32 tables keep their type.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ple_offload.cli.common import (
    add_context,
    add_json,
    add_layer,
    add_path,
    add_tier,
    add_worker,
    one_request,
    parse_tokens,
    print_json,
    refuse_loading_options,
    show_progress,
)
from ple_offload.config import worker_kind
from ple_offload.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ple_offload.spec import TableSpec

HELP = "write the values of each token's rows to a .npy file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--tokens", metavar="IDS", required=True, help="token ids, as in 1,2,3")
    parser.add_argument("--out", metavar="FILE.npy", required=True, help="file to write (replaced if it exists)")
    add_layer(parser)
    add_context(parser)
    add_tier(parser)
    add_worker(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    parse_tokens(args)  # wrong usage is told before anything is opened
    out = Path(args.out)
    if out.is_dir():
        raise UsageError(
            f"--out {out}: expected a file to write, found a folder; name a file, as in {out / 'values.npy'}"
        )
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out}: expected a regular file or nothing there")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    kind = worker_kind(args.worker)
    refuse_loading_options(args)
    import numpy as np

    import ple_offload

    if kind == "inline":
        with ple_offload.open_table(
            args.path,
            layer=args.layer,
            tier=args.tier,
            progress=show_progress(),
            skip_memory_check=args.skip_memory_check or None,
        ) as table:
            values = table.lookup(**one_request(args, table.spec.family))
            tier, worker = table.tier, "inline"
    else:
        values, tier, worker = lookup_there(args, ple_offload.inspect(args.path).table(args.layer))
    stored = values.astype(np.float32) if values.dtype.name == "bfloat16" else values
    with out.open("wb") as file:  # np.save given a path would append .npy to it
        np.save(file, stored)
    if args.json:
        facts = {"shape": list(stored.shape), "dtype": str(stored.dtype), "tier": tier, "worker": worker}
        print_json({"out": str(out), **facts})
    else:
        where = f"tier {tier}" + ("" if worker == "inline" else f" of {worker}")
        print(f"{out}: {stored.shape[0]} tokens x {stored.shape[1]} values, {stored.dtype}, from {where}")


def lookup_there(args: argparse.Namespace, table: TableSpec) -> tuple[npt.NDArray[Any], str, str]:
    """The values as a worker process delivers them, its tier, and which worker."""
    from ple_offload.connector.client import lookup_once
    from ple_offload.worker.spawn import SpawnedWorker

    request = one_request(args, table.family)
    ids, context = request["input_ids"], request["ngram_context"]
    if worker_kind(args.worker) == "unix":
        values, facts = lookup_once(args.worker, table, ids, context)
        return values, facts.tier, f"the worker at {args.worker}"
    with SpawnedWorker(
        args.path, tier=args.tier, skip_memory_check=args.skip_memory_check or None, progress=show_progress()
    ) as worker:
        values, facts = lookup_once(worker.address, table, ids, context)
        return values, facts.tier, f"worker process {worker.pid}"
