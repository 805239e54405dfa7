"""Print the row numbers that each token reads. The tokens are one request, --context what came before."""

from __future__ import annotations

import argparse

from ple_offload.cli.common import (
    add_context,
    add_json,
    add_layer,
    add_path,
    one_request,
    parse_tokens,
    print_json,
)

HELP = "print the row numbers of each token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--tokens", metavar="IDS", required=True, help="token ids, as in 1,2,3")
    add_layer(parser)
    add_context(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    parse_tokens(args)  # wrong usage is told before anything is opened
    import ple_offload

    # Row numbers need no rows, so the tier that copies nothing is the right one.
    with ple_offload.open_table(args.path, layer=args.layer, tier="file", skip_memory_check=True) as table:
        request = one_request(args, table.spec.family)
        numbers = table.row_numbers(**request).tolist()
    if args.json:
        print_json(numbers)
        return
    for token, row in zip(request["input_ids"], numbers, strict=True):
        print(f"{token}: {' '.join(map(str, row))}")
