"""Show the tables of a checkpoint: layer, rows, format, size, and what each tier needs. Opens no table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ple_offload.cli.common import add_json, add_path, count, gib, print_facts, print_json

if TYPE_CHECKING:
    from ple_offload.spec import TableSpec

HELP = "show the tables of a checkpoint and what each tier needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    import ple_offload

    spec = ple_offload.inspect(args.path)
    if args.json:
        tables = [table_facts(table) for table in spec.tables]
        print_json({"path": str(spec.path), "model_type": spec.model_type, "tables": tables})
        return
    print(f"{spec.path}: {spec.model_type}, {count(len(spec.tables), 'table')}")
    for table in spec.tables:
        scale = "" if table.format.scale is None else f", scale {table.format.scale:.9g}"
        print_facts(
            f"layer {table.layer}",
            {
                "table": f"{table.num_rows:,} rows x {table.row_dim} {table.format.name}{scale}",
                "size": f"{gib(table.size_bytes)} in {count(len(table.segments), 'segment')}",
                "one token": f"reads {table.rows_per_token} rows x {table.row_bytes} B, gives {table.embed_dim} values",
                "row numbers": f"{table.family.name}, look back {count(table.family.context_len, 'token')}",
                "hash constants": "equal to the stored ones" if table.constants_stored else "none are stored",
                "tier ram": f"needs {gib(table.size_bytes)} of memory",
                "tier file": f"needs none of its own, is fast with {gib(table.size_bytes)} of page cache",
            },
        )


def table_facts(table: TableSpec) -> dict[str, Any]:
    return {
        "layer": table.layer,
        "family": table.family.name,
        "format": table.format.name,
        "scale": table.format.scale,
        "num_rows": table.num_rows,
        "row_dim": table.row_dim,
        "row_bytes": table.row_bytes,
        "rows_per_token": table.rows_per_token,
        "embed_dim": table.embed_dim,
        "context_len": table.family.context_len,
        "size_bytes": table.size_bytes,
        "num_segments": len(table.segments),
        "constants_stored": table.constants_stored,
    }
