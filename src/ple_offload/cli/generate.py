"""Generate text with transformers while the n-gram table stays outside the model. Decoding is greedy."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ple_offload.cli.common import (
    add_json,
    add_path,
    add_tier,
    add_worker,
    parse_tokens,
    print_json,
    refuse_loading_options,
    require_transformers,
    show_progress,
)
from ple_offload.config import worker_kind
from ple_offload.errors import UsageError

if TYPE_CHECKING:
    import torch

HELP = "generate text with the table outside the model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="text to continue; needs the checkpoint's tokenizer")
    given.add_argument("--tokens", metavar="IDS", help="token ids to continue, as in 1,2,3")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--device", default="cpu", help="device of the model as torch spells it (default: cpu)")
    parser.add_argument(
        "--route",
        default="auto",
        metavar="R",
        help="how rows reach a GPU: direct (the GPU reads the tables in host memory), staged (the worker gathers, the GPU "
        "drains), ipc (the worker copies into the GPU's memory), host (a lookup on the CPU and a copy), auto (what works "
        "and is faster, default)",
    )
    add_tier(parser)
    add_worker(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens: expected at least 1, found {args.max_new_tokens}")
    tokens = [] if args.tokens is None else parse_tokens(args)  # wrong usage is told before anything is opened
    worker_kind(args.worker)
    refuse_loading_options(args)
    require_transformers("generate")
    quiet_transformers()
    device = usable_device(args.device)
    if device.type != "cuda" and args.route not in ("auto", "host"):
        raise UsageError(f"--route {args.route}: expected a GPU, found --device {args.device}; add --device cuda")
    import ple_offload

    spec = ple_offload.inspect(args.path)
    tokenizer = None
    if args.tokens is None:
        tokenizer = load_tokenizer(spec.path)
        tokens = tokenizer(args.prompt)["input_ids"]
    check_ids(tokens, spec.tables[0].family.vocab_size, "--prompt" if args.tokens is None else "--tokens")

    from ple_offload.engines import transformers as engine

    model = engine.from_pretrained(
        spec.path,
        tier=args.tier,
        worker=args.worker,
        route=args.route,
        progress=show_progress() and worker_kind(args.worker) != "unix",
        skip_memory_check=args.skip_memory_check or None,
    )
    with contextlib.closing(model.ple_offload):
        new_tokens, seconds = greedy(model.to(device), tokens, args.max_new_tokens)
    text = None if tokenizer is None else tokenizer.decode(new_tokens)
    if args.json:
        print_json({"prompt_tokens": tokens, "new_tokens": new_tokens, "text": text, "generate_s": round(seconds, 4)})
    elif text is not None:
        print(args.prompt + text)
    else:
        print(",".join(map(str, new_tokens)))


def check_ids(tokens: list[int], vocab_size: int, option: str) -> None:
    """Refuse no ids, or one outside the vocabulary: the model's word embedding would fail less clearly."""
    if not tokens:
        raise UsageError(f"{option}: expected at least one token, found none")
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UsageError(f"{option}: id {token} at position {position}: expected an id from 0 to {vocab_size - 1}")


def greedy(model: Any, tokens: list[int], max_new_tokens: int) -> tuple[list[int], float]:
    """The tokens after `tokens`, most likely first choice each, and the seconds that took."""
    import torch

    ids = torch.tensor([tokens], device=model.device)
    start_s = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
        )
    return out[0, len(tokens) :].tolist(), time.perf_counter() - start_s


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises UsageError when torch cannot put a tensor there."""
    import torch

    try:
        device = torch.empty(0, device=name).device
        torch.ones(1, device=device).item()  # the meta device has no values
        return device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise UsageError(f"--device {name}: torch cannot use it here: {error}".splitlines()[0]) from error


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice out of a pipe."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not show_progress():
        logging.disable_progress_bar()


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--prompt: {folder}: no tokenizer could be loaded from there; add its files or pass --tokens"
        ) from error
