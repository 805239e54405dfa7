"""Check shapes, scale, hash constants, and sampled rows.

The sampled rows, as the open table delivers them, are compared with a second, independent read of the files.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ple_offload.cli.common import (
    add_json,
    add_layer,
    add_path,
    add_tier,
    print_facts,
    print_json,
    show_progress,
)
from ple_offload.errors import CheckpointError, StoreError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ple_offload.spec import TableSpec
    from ple_offload.table import Table

HELP = "check shapes, scales, hash constants and sampled rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    add_layer(parser)
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="rows to sample per table (default: 4096)")
    parser.add_argument("--seed", type=int, default=0, help="which rows are sampled (default: 0)")
    add_tier(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    if args.rows < 1:
        raise UsageError(f"--rows: expected at least 1, found {args.rows}")
    if args.seed < 0:
        raise UsageError(f"--seed: expected 0 or more, found {args.seed}")
    import ple_offload

    # inspect() itself refuses wrong shapes, scales and hash constants.
    spec = ple_offload.inspect(args.path)
    tables = spec.tables if args.layer is None else (spec.table(args.layer),)
    reports = []
    for table_spec in tables:
        with ple_offload.open_table(
            args.path,
            layer=table_spec.layer,
            tier=args.tier,
            progress=show_progress(),
            skip_memory_check=args.skip_memory_check or None,
        ) as table:
            report = compare_rows(table, args.rows, args.seed)
        reports.append(report)
        if not args.json:
            print_facts(
                f"layer {report['layer']}, tier {report['tier']}",
                {
                    "shapes and scale": "as they must be",
                    "hash constants": "equal to the stored ones" if report["constants_stored"] else "none are stored",
                    "sampled rows": f"{report['rows_checked']:,} of {report['num_rows']:,}",
                    "different": report["rows_different"],
                    "NaN or infinity": report["rows_not_finite"],
                    "all zeros": report["rows_zero"],
                },
            )
    if args.json:
        print_json({"path": str(spec.path), "tables": reports})
    for report in reports:
        raise_if_wrong(report)


def raise_if_wrong(report: dict[str, Any]) -> None:
    where = f"layer {report['layer']}"
    if report["rows_different"]:
        raise StoreError(
            f"{where}: {report['rows_different']} of {report['rows_checked']} sampled rows differ from the "
            f"files (first: row {report['first_different']}); the files changed while the table was open, or "
            "memory is faulty: open the table again"
        )
    if report["rows_not_finite"]:
        raise CheckpointError(
            f"{where}: expected finite values, found NaN or infinity in {report['rows_not_finite']} of "
            f"{report['rows_checked']} sampled rows; the checkpoint is damaged: get it again"
        )
    if 2 * report["rows_zero"] > report["rows_checked"]:
        raise CheckpointError(
            f"{where}: expected values, found nothing but zeros in {report['rows_zero']} of {report['rows_checked']} "
            "sampled rows; was the file made and not filled, as by a download that did not end? Get it again"
        )


def compare_rows(table: Table, num_rows: int, seed: int) -> dict[str, Any]:
    """Compare sampled rows, and the first and last row of every segment, with a plain read of the files."""
    import numpy as np

    spec = table.spec
    generator = np.random.default_rng(seed)
    edges = [row for s in spec.segments for row in (s.first_row, s.first_row + s.num_rows - 1)]
    sampled = generator.integers(0, spec.num_rows, min(num_rows, spec.num_rows))
    rows = np.unique(np.concatenate([sampled, np.array(edges, np.int64)]))
    expected = spec.format.decode_reference(read_rows(spec, rows), spec.format.value_dtype)
    found = table.gather(rows)
    as_bits = f"u{expected.dtype.itemsize}"
    # NaN compares equal to NaN here: damage in the files is no difference between the table and the files.
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of the NaN that it is asked about
        both_nan = np.isnan(expected) & np.isnan(found)
        finite = np.isfinite(found.astype(np.float32))
    different = np.flatnonzero(((expected.view(as_bits) != found.view(as_bits)) & ~both_nan).any(axis=-1))
    return {
        "layer": spec.layer,
        "tier": table.tier,
        "constants_stored": spec.constants_stored,
        "num_rows": spec.num_rows,
        "rows_checked": len(rows),
        "rows_different": len(different),
        "first_different": int(rows[different[0]]) if len(different) else None,
        "rows_not_finite": int((~finite).any(axis=-1).sum()),
        "rows_zero": int((found == 0).all(axis=-1).sum()),
    }


def read_rows(spec: TableSpec, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Raw rows [len(rows), row_bytes] uint8, one pread each; `rows` must rise.

    Shares no code with the stores, on purpose.
    """
    import numpy as np

    raw = np.empty((len(rows), spec.row_bytes), np.uint8)
    for segment in spec.segments:
        first, last = np.searchsorted(rows, [segment.first_row, segment.first_row + segment.num_rows])
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for place in range(first, last):
                offset = segment.offset + (int(rows[place]) - segment.first_row) * spec.row_bytes
                data = os.pread(descriptor, spec.row_bytes, offset)
                if len(data) != spec.row_bytes:
                    raise StoreError(
                        f"{segment.path}: expected {spec.row_bytes} bytes at offset {offset}, "
                        f"found {len(data)}; the file was cut while it was read"
                    )
                raw[place] = np.frombuffer(data, np.uint8)
        finally:
            os.close(descriptor)
    return raw
