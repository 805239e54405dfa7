"""Serve the tables of one or more checkpoints to every engine process on this host, until SIGTERM or Ctrl-C.

Engines connect to the printed address: from_pretrained(..., worker="unix:/path"), or --worker unix:/path of this command
line. By default only this user and root may connect. A worker that is told to stop serves what was asked for, tells its
clients, prints what it did and ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ple_offload.cli.common import add_json, add_threads, add_tier, gib, print_facts, print_json, show_progress
from ple_offload.config import default_socket
from ple_offload.errors import UsageError

if TYPE_CHECKING:
    from ple_offload.worker.server import PleOffloadWorker, Served

HELP = "serve tables to every engine process on this host"

# What a session's line shows, and what each counter is called there. Times in seconds.
LAYER_COLUMNS = {
    "steps": "ple_offload_steps_total",
    "rows": "ple_offload_rows_total",
    "bytes": "ple_offload_bytes_total",
    "sampled_rows": "ple_offload_sampled_rows_total",
    "duplicate_rows": "ple_offload_duplicate_rows_total",
    "gather_s": "ple_offload_gather_seconds_total",
    "errors": "ple_offload_errors_total",
}
SESSION_COLUMNS = {
    "queue_s": "ple_offload_queue_seconds_total",
    "wait_s": "ple_offload_wait_seconds_total",
    "faults": "ple_offload_faults_total",
    "connections": "ple_offload_connections_total",
    "lost_ranks": "ple_offload_lost_ranks_total",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoint folders, or model ids in the local model cache"
    )
    add_tier(parser)
    add_threads(parser)
    parser.add_argument("--socket", metavar="S", help=f"socket file to listen at (default here: {default_socket()})")
    access = parser.add_mutually_exclusive_group()
    access.add_argument("--group", metavar="G", help="let the members of this group connect: a name or a number")
    access.add_argument(
        "--allow-uid", metavar="U", type=int, nargs="+", default=[], help="let these users connect as well: numbers"
    )
    parser.add_argument(
        "--metrics",
        metavar="ADDR",
        help="serve counters to Prometheus at HOST:PORT, or :PORT for this host only; needs prometheus_client",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    group = None if args.group is None else find_group(args.group)
    given = (args.socket or str(default_socket())).removeprefix("unix:")
    if "://" in given or given.startswith("@"):
        raise UsageError(f"--socket: expected the path of a socket, found {args.socket!r}")
    socket = Path(given).absolute()
    from ple_offload.ipc.channel import parse_address

    address = f"unix:{socket}"
    parse_address(address)  # wrong usage is told before minutes of loading
    if args.metrics is not None:
        from ple_offload.worker.exporter import parse_listen_address

        parse_listen_address(args.metrics)
    if args.socket is None:
        if args.group or args.allow_uid:
            raise UsageError("--group and --allow-uid need --socket: a path in a folder that those users may enter")
        make_private(socket.parent)
    else:
        require_way_to(socket, group, args.allow_uid)

    from ple_offload.worker.main import open_tables
    from ple_offload.worker.server import PleOffloadWorker

    served = open_tables(
        args.paths,
        tier=args.tier,
        threads=args.threads,
        skip_memory_check=args.skip_memory_check or None,
        progress=show_progress(),
    )
    # who may open a group's socket is the file system's decision
    worker = PleOffloadWorker(served, allow_uids=None if group is not None else frozenset(args.allow_uid))
    with contextlib.ExitStack() as exporter:
        url = None
        if args.metrics is not None:
            from ple_offload.worker.exporter import Exporter

            url = exporter.enter_context(Exporter(worker.samples, args.metrics)).url
        worker.listen(address, group=group)
        worker.run(ready=lambda: announce(served, address, url, as_json=args.json))
    summary = list(summarise(worker))
    with contextlib.suppress(OSError):  # the terminal is gone, as SIGHUP says
        if args.json:
            print_json({"sessions": summary})
        else:
            print("\n" + "\n".join(table_of(summary)), flush=True)


def find_group(name: str) -> int:
    """The id of a group, given as name or number."""
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(f"--group {name}: expected a group of this system, found none of that name.") from None


def make_private(folder: Path) -> None:
    """Make the default socket's folder, for this user alone; refuse one that somebody else has put there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder}: expected a folder of this user that nobody else can write, found mode {found.st_mode & 0o7777:o} "
            f"of uid {found.st_uid}. Remove it, or choose another place with --socket."
        )


def require_way_to(socket: Path, group: int | None, uids: list[int]) -> None:
    """Raise UsageError for a folder above the socket that those who may connect cannot enter."""
    for folder in [parent for parent in socket.parents if parent.is_dir()]:
        found = folder.stat()
        open_to_group = group is None or (found.st_gid == group and bool(found.st_mode & 0o010))
        if found.st_mode & 0o001 or (open_to_group and set(uids) <= {found.st_uid}):
            continue
        raise UsageError(
            f"--socket {socket}: those whom --group or --allow-uid lets in cannot enter {folder} (mode "
            f"{found.st_mode & 0o7777:o}). Choose a folder they can enter, or one that does not exist yet."
        )


def announce(served: list[Served], address: str, url: str | None, *, as_json: bool) -> None:
    """Say what is served and where; the last line says that clients may connect."""
    from ple_offload.memory.limits import available_memory

    available_bytes = available_memory().available_bytes
    if as_json:
        print_json(
            {
                "address": address,
                "metrics": url,
                "checkpoints": [
                    {"path": str(s.path), "tables": [table.describe() for table in s.tables.values()]} for s in served
                ],
                "available_bytes": available_bytes,
            }
        )
    else:
        for one in served:
            facts: dict[str, Any] = {}
            for layer, table in sorted(one.tables.items()):
                spec = table.spec
                facts[f"layer {layer}"] = (
                    f"{spec.num_rows:,} rows x {spec.row_dim} {spec.format.name}, {gib(spec.size_bytes)}, tier {table.tier}"
                )
            print_facts(str(one.path), facts)
        in_ram = sum(t.spec.size_bytes for s in served for t in s.tables.values() if t.tier == "ram")
        facts = {"address": address, "memory": f"{gib(in_ram)} for tables, {gib(available_bytes)} still available"}
        print_facts("worker", {**facts, **({"metrics": url} if url else {})})
        print(f"\nready: {address}")
    sys.stdout.flush()


def summarise(worker: PleOffloadWorker) -> Iterator[dict[str, Any]]:
    """One record a session: its own counters, and those of each of its layers."""
    sessions: dict[str, dict[str, Any]] = {}
    columns = {name: column for column, name in (LAYER_COLUMNS | SESSION_COLUMNS).items()}
    for name, labels, value in worker.samples():
        if name not in columns or "session" not in labels:
            continue
        session = sessions.setdefault(labels["session"], {"session": labels["session"], "layers": {}})
        place = session["layers"].setdefault(labels["layer"], {}) if "layer" in labels else session
        place[columns[name]] = value if columns[name].endswith("_s") else int(value)
    yield from sessions.values()


def table_of(summary: list[dict[str, Any]]) -> list[str]:
    """Lines of text; a session's own figures stand in the line of its first layer."""
    if not summary:
        return ["nobody connected"]
    lines = [
        ["session", "layer", "steps", "rows", "size", "dup.", "gather", "queue", "wait", "faults", "errors", "lost"]
    ]
    for session in summary:
        for i, (layer, found) in enumerate(session["layers"].items()):
            own = [f"{session['queue_s']:.3f} s", f"{session['wait_s']:.3f} s", str(session["faults"])]
            sampled = found["sampled_rows"]
            lines.append(
                [
                    session["session"] if i == 0 else "",
                    layer,
                    f"{found['steps']:,}",
                    f"{found['rows']:,}",
                    gib(found["bytes"]),
                    f"{100 * found['duplicate_rows'] / sampled:.0f} %" if sampled else "-",
                    f"{found['gather_s']:.3f} s",
                    *(own if i == 0 else ["", "", ""]),
                    f"{found['errors']:,}",
                    str(session["lost_ranks"]) if i == 0 else "",
                ]
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return ["  ".join(row).rstrip() for row in rows]
