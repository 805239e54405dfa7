"""Show what decides whether and how fast a table can be served here, and what to change.

Send this output along with a question or a report.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ple_offload import __version__
from ple_offload.cli import gpu, host
from ple_offload.cli.common import add_json, gib, print_facts, print_json
from ple_offload.config import default_socket, num_threads, settings, usable_cpus, variable
from ple_offload.errors import MemoryLimitError, PleOffloadError

HELP = "memory, limits, huge pages, disk, GPU; which tier and route would be chosen, why, and what to change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="?", help="a checkpoint to judge as well")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    report, advice = collect(args.path)
    if args.json:
        print_json({**report, "advice": advice})
        return
    print(f"ple-offload {__version__}")
    for title, facts in report.items():
        print_facts(title, {label: spell(label, value) for label, value in facts.items()})
    print("\nwhat to change")
    for line in advice or ["nothing: no problem found"]:
        print(f"  * {line}")


def collect(path: str | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Facts by section, and sentences about what to change."""
    report: dict[str, dict[str, Any]] = {}
    advice: list[str] = []
    report["versions"] = dict(host.versions())
    report["settings"] = settings_facts()
    report["memory"] = memory_facts(advice)
    report["huge pages"] = huge_page_facts(advice)
    report["processors"] = processor_facts(advice)
    report["compiled code"] = compiled_code_facts(advice)
    report["workers"] = worker_facts(advice)
    report.update(gpu.sections(advice))
    if path is not None:
        report.update(checkpoint_facts(path, advice))
    return report, advice


def settings_facts() -> dict[str, Any]:
    found = settings()
    values = {name: getattr(found, name) for name in found.origins}
    values["threads"] = values["threads"] or usable_cpus()
    return {
        variable(name): f"{value} ({'default' if found.origins[name] == 'default' else 'from the environment'})"
        for name, value in values.items()
    }


def memory_facts(advice: list[str]) -> dict[str, Any]:
    from ple_offload.memory.limits import available_memory

    found = available_memory()
    if found.limited_by != "MemAvailable":
        advice.append(
            f"memory: {found.limited_by} allows {gib(found.available_bytes)} more, while the host has "
            f"{gib(found.mem_available_bytes)}; raise that limit if a table does not fit"
        )
    return {
        "total": gib(found.mem_total_bytes),
        "available": gib(found.mem_available_bytes),
        "cgroup limit": "none" if found.cgroup_limit_bytes is None else gib(found.cgroup_limit_bytes),
        "a table may take": f"{gib(found.available_bytes)}, limited by {found.limited_by}",
    }


def checkpoint_facts(path: str, advice: list[str]) -> dict[str, dict[str, Any]]:
    """One section for the place of the checkpoint and one for each table."""
    import ple_offload
    from ple_offload.memory.limits import require_memory
    from ple_offload.table import OVERHEAD_BYTES

    spec = ple_offload.inspect(path)
    report = {str(spec.path): filesystem_facts(spec.tables[0].segments[0].path, advice)}
    for table in spec.tables:
        # the rule of tier="auto"
        try:
            require_memory(table.size_bytes + OVERHEAD_BYTES, f"table {table.name}")
            tier, why = "ram", "it fits"
        except MemoryLimitError as error:
            tier, why = "file", str(error)
            advice.append(
                f"memory: table {table.name} would be read from its files; rows that are not in the page "
                "cache cost a disk read each"
            )
        report[f"layer {table.layer}"] = {
            "table": f"{table.num_rows:,} rows x {table.row_dim} {table.format.name}",
            "size": gib(table.size_bytes),
            "tier auto means": tier,
            "because": why,
        }
    return report


def huge_page_facts(advice: list[str]) -> dict[str, Any]:
    collapse = host.can_collapse(os.uname().release)
    found = host.huge_pages()
    if not collapse and found["shmem_enabled"] not in ("always", "advise", "within_size", "force"):
        advice.append(
            "huge pages: this kernel has no MADV_COLLAPSE (Linux 6.1) and shmem_enabled is off, so the ram "
            "tier uses small pages and lookups of many rows take up to twice as long: "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        )
    return {
        "anonymous memory": found["enabled"],
        "shared memory": found["shmem_enabled"],
        "MADV_COLLAPSE": "yes" if collapse else "no, needs Linux 6.1",
    }


def processor_facts(advice: list[str]) -> dict[str, Any]:
    nodes = host.numa_nodes()
    if nodes is not None and nodes > 1:
        advice.append(
            f"NUMA: memory lies on {nodes} nodes; start with `numactl --interleave=all` so that a table in "
            "the ram tier is spread over them"
        )
    return {
        "in the machine": os.cpu_count(),
        "usable here": f"{usable_cpus()} (affinity {len(os.sched_getaffinity(0))}, cgroup quota counted)",
        "NUMA nodes": nodes,
    }


def compiled_code_facts(advice: list[str]) -> dict[str, Any]:
    try:
        import numba

        from ple_offload import native
    except Exception as error:  # whatever a broken installation raises: doctor is for just that
        advice.append(f"compiled code: numba cannot be imported ({error}); run pip install --upgrade ple-offload")
        return {"threading layer": None, "wake-up": None, "cache": None}

    wake_up_us = native.wake_up_us(
        max(2, num_threads())
    )  # runs a parallel kernel: only then is the threading layer chosen
    layer = numba.threading_layer()
    if layer == "workqueue":
        advice.append(
            "threads: numba found no OpenMP and uses its own `workqueue`, whose threads wake up slowly; "
            "install the system's libgomp (Debian: apt install libgomp1)"
        )
    problem = native.cache_problem()
    if problem:
        advice.append(
            "compiled code: it cannot be cached, so every process compiles anew for some seconds; set "
            "NUMBA_CACHE_DIR to a folder that can be written"
        )
    return {
        "threading layer": layer,
        "wake-up": f"{wake_up_us:.0f} us until all threads run",
        "cache": problem or "works",
    }


def worker_facts(advice: list[str]) -> dict[str, Any]:
    """Which kinds of worker would work here, and who listens at the daemon's usual place."""
    from ple_offload.ipc.channel import Channel
    from ple_offload.ipc.messages import PROTOCOL_VERSION, Ask, Facts, Refused
    from ple_offload.memory import memfd

    try:
        os.close(memfd.seal_against_new_writers(memfd.create("ple-offload doctor", 4096), "doctor's memory"))
        os.close(os.eventfd(0))
        processes = "works"
    except (OSError, PleOffloadError, AttributeError) as error:
        processes = f"no: {error}"
        advice.append(
            f"workers: shared memory between processes does not work here ({error}), so only worker 'inline' can be used"
        )
    address = f"unix:{default_socket()}"
    daemon = "nobody listens"
    try:
        channel = Channel.connect(address, 0)
        try:
            channel.send(Ask(PROTOCOL_VERSION, ""))
            answer, _ = channel.receive(2) or (None, ())
        finally:
            channel.close()
        if isinstance(answer, Facts):
            daemon = f"worker process {answer.pid}, tables of layers {sorted(facts.layer for facts in answer.layers)}"
        elif isinstance(answer, Refused):
            daemon = f"a worker answers: {answer.reason}"
        else:
            daemon = "somebody listens and does not answer"
            advice.append(f"workers: {address}: somebody listens and does not answer; stop that process")
    except PleOffloadError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            daemon = str(error)
    return {"inline": "works", "spawn": processes, "serve": processes, "default socket": address, "there now": daemon}


def filesystem_facts(path: Path, advice: list[str]) -> dict[str, Any]:
    found = host.filesystem(path)
    if found is None:
        return {"filesystem": None}
    if found.is_network:
        advice.append(
            f"disk: the checkpoint lies on {found.type}, where reading single rows is slow; use tier ram, or "
            "copy the checkpoint to a local disk for tier file"
        )
    if found.rotational:
        advice.append("disk: the checkpoint lies on a hard disk, where reading single rows is slow; use tier ram")
    return {
        "filesystem": f"{found.type} at {found.mount_point} ({found.source})",
        "disk": {True: "hard disk", False: "solid state", None: None}[found.rotational],
        "free": gib(found.free_bytes),
    }


def spell(label: str, value: Any) -> str:
    if value is None:
        return "not known" if label not in host.PACKAGES else "not installed"
    return str(value)
