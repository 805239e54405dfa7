"""See it work: a small random Qwen4Exp model generates with its n-gram table in another process.

Writes a checkpoint, generates with the table served by a worker process, with the ordinary model, and with the table
zeroed. The first two must be the same token for token; the third must differ, or the comparison would prove nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from ple_offload.cli.common import TIERS, add_json, gib, print_facts, print_json, require_transformers
from ple_offload.cli.generate import greedy, quiet_transformers
from ple_offload.errors import StoreError, UsageError

HELP = "generate with a small random model and its table in another process, compare with the ordinary model"

# The table is most of the checkpoint, and all of it still runs in seconds on one core.
CHECKPOINT: dict[str, Any] = {"ngram_vocab_size_base": 20_000, "ple_embed_dim": 256, "max_shard_size": "4MB"}
PROMPT = [11, 42, 7, 42, 99, 500, 11, 42]  # 7 is the end-of-text id, which cuts the n-grams
MAX_NEW_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=TIERS, default="auto", help="where the rows live (default: auto)")
    parser.add_argument(
        "--worker", choices=("spawn", "inline"), default="spawn", help="who looks rows up (default: spawn)"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="write the checkpoint there and keep it")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    require_transformers("demo")
    quiet_transformers()
    if args.keep:
        folder = Path(args.keep)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--keep {folder}: expected a new or empty folder, found files in it")
        report = compare(folder, args.tier, args.worker)
    else:
        with tempfile.TemporaryDirectory(prefix="ple-offload-demo-") as temporary:
            report = {**compare(Path(temporary), args.tier, args.worker), "folder": None}  # gone behind this
    if args.json:
        print_json(report)
    else:
        show(report)
    differs_at = first_difference(report["offloaded_tokens"], report["ordinary_tokens"])
    if differs_at is not None:
        raise StoreError(
            f"the two models differ from new token {differs_at} on; this is a fault of ple-offload, please "
            "report it with the output of `ple-offload doctor`"
        )
    if report["ordinary_tokens"] == report["zeroed_tokens"]:
        raise StoreError("zeroing the table changed no token, so the comparison proves nothing; please report it")


def compare(folder: Path, tier: str, worker: str) -> dict[str, Any]:
    """Write the checkpoint to `folder`, run the three models, and return what happened."""
    import torch
    from transformers import AutoModelForCausalLM

    import ple_offload
    from ple_offload.cli.random_checkpoint import write_random_checkpoint
    from ple_offload.engines import transformers as engine

    # A model this small spends its time waiting for torch's other threads, most of all on a busy machine.
    torch.set_num_threads(1)
    table = ple_offload.inspect(write_random_checkpoint(folder, **CHECKPOINT)).table()

    model = engine.from_pretrained(folder, tier=tier, worker=worker)
    with contextlib.closing(model.ple_offload):
        offloaded_bytes = parameter_bytes(model)
        offloaded, offloaded_rate = timed(model)
        remote = model.ple_offload.remote
        tables = model.ple_offload.tables
        used_tier = tables[table.layer].tier if remote is None else remote.facts[table.layer].tier
        process = (
            None if remote is None else {"pid": remote.process.pid, "resident_bytes": resident(remote.process.pid)}
        )
        own_bytes = resident(os.getpid())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ordinary_bytes = parameter_bytes(model)
    ordinary, ordinary_rate = timed(model)

    with torch.no_grad():
        model.model.layers[table.layer].ple.ple_embedding.ngram_embedding.weight.zero_()
    zeroed, _ = greedy(model, PROMPT, MAX_NEW_TOKENS)
    return {
        "folder": str(folder),
        "tier": used_tier,
        "worker": worker,
        "worker_process": process,
        "model_process": {"pid": os.getpid(), "resident_bytes": own_bytes},
        "table": f"{table.num_rows:,} rows x {table.row_dim} {table.format.name}",
        "table_bytes": table.size_bytes,
        "prompt_tokens": PROMPT,
        "offloaded_tokens": offloaded,
        "ordinary_tokens": ordinary,
        "zeroed_tokens": zeroed,
        "offloaded_parameter_bytes": offloaded_bytes,
        "ordinary_parameter_bytes": ordinary_bytes,
        "offloaded_tokens_per_s": offloaded_rate,
        "ordinary_tokens_per_s": ordinary_rate,
    }


def timed(model: Any) -> tuple[list[int], float]:
    """The new tokens and how many came per second, the first use (which compiles) not counted."""
    greedy(model, PROMPT, 2)
    tokens, seconds = greedy(model, PROMPT, MAX_NEW_TOKENS)
    return tokens, round(len(tokens) / seconds, 1)


def resident(pid: int) -> int:
    """Bytes of memory that a process has mapped and touched."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0


def parameter_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first position, from 0, where two lists differ, a missing end included; None when equal."""
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def show(report: dict[str, Any]) -> None:
    offloaded, ordinary = report["offloaded_tokens"], report["ordinary_tokens"]
    differs_at = first_difference(offloaded, ordinary)
    zeroed_at = first_difference(ordinary, report["zeroed_tokens"])
    saved = report["ordinary_parameter_bytes"] - report["offloaded_parameter_bytes"]
    worker, own = report["worker_process"], report["model_process"]
    processes = {"model process": f"pid {own['pid']}, {gib(own['resident_bytes'])} resident"}
    if worker is not None:
        processes["model process"] += ", without the table"
        processes["worker process"] = f"pid {worker['pid']}, {gib(worker['resident_bytes'])} resident, has the table"
    print_facts(
        "A random Qwen4Exp model, its n-gram table "
        + ("outside the model" if worker is None else "in another process"),
        {
            "table": f"{report['table']}, {gib(report['table_bytes'])}, tier {report['tier']}",
            **processes,
            "prompt": spell(report["prompt_tokens"]),
            "table outside": spell(offloaded),
            "ordinary model": spell(ordinary),
            "the same?": f"yes, all {len(ordinary)} tokens" if differs_at is None else f"NO, from {differs_at} on",
            "table zeroed": "the same (!)" if zeroed_at is None else f"other text from new token {zeroed_at} on",
            "model parameters": f"{gib(report['offloaded_parameter_bytes'])} instead of "
            f"{gib(report['ordinary_parameter_bytes'])}: {gib(saved)} kept out of the model",
            "speed": f"{report['offloaded_tokens_per_s']:.0f} tokens/s, "
            f"ordinary model {report['ordinary_tokens_per_s']:.0f} tokens/s",
        },
    )


def spell(tokens: list[int], at_most: int = 16) -> str:
    return " ".join(map(str, tokens[:at_most])) + (" ..." if len(tokens) > at_most else "")
