"""A spawned worker ends with the process that started it, however that ends, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Engine, all_nan, same
from ple_offload import Table
from ple_offload.errors import ConnectionLostError, ForkError, MemoryLimitError
from ple_offload.worker import spawn
from ple_offload.worker.spawn import SpawnedWorker
from worker.faults.conftest import wait_until

Start = Callable[..., Engine]

SPAWN = """
from ple_offload.worker.spawn import SpawnedWorker
engine.worker = SpawnedWorker(path, tier="file", threads=1)
result = engine.worker.pid, engine.worker.address, str(engine.worker.log_path)
"""
FORK = """
import os, signal
pid = os.fork()
if pid == 0:
    signal.pause()
result = pid
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")  # nobody may be there to reap an orphan


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def my_logs() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"ple-offload-worker-{os.getpid()}-*"))


def assert_nothing_left(pid: int, address: str, log: str) -> None:
    wait_until(lambda: not is_alive(pid), 2.0)
    assert address.removeprefix("unix:") not in Path("/proc/net/unix").read_text()
    assert not Path(log).exists()
    assert not list(Path("/dev/shm").glob("*ple*"))


def step_for_ever(engine: Engine, table: Table) -> None:
    while True:
        step = engine.prepare([1, 2, 3])
        assert same(rows := engine.take(), table.lookup([1, 2, 3])) or all_nan(rows)
        engine.check(step)
        engine.release()


@pytest.mark.parametrize("forked", [False, True])
def test_the_parent_is_killed(forked: bool, start_engine: Start, checkpoint: Path, table: Table) -> None:
    """Also when it has forked a child that lives on, and while another engine keeps the worker busy."""
    parent, other = start_engine(), start_engine()
    pid, address, log = parent.run(SPAWN, path=str(checkpoint))
    child = parent.run(FORK) if forked else None
    other.connect(address, max_num_tokens=64, max_num_reqs=1)
    try:
        parent.kill()
        parent.exit_status()
        with pytest.raises(ConnectionLostError, match=r"its parent has gone|died, or was ended"):
            step_for_ever(other, table)
        assert_nothing_left(pid, address, log)
    finally:
        if child is not None:
            os.kill(child, 9)


def test_the_parent_is_killed_while_the_worker_loads(start_engine: Start, checkpoint: Path) -> None:
    parent = start_engine()
    started = """
import threading, time
from ple_offload.worker import spawn
spawn.MODULE = "worker.faults.loading_worker"
threading.Thread(target=spawn.SpawnedWorker, args=(path,), daemon=True).start()
while not (workers := [w for w in spawn._alive if hasattr(w, "_process")]):
    time.sleep(0.01)
[worker] = workers
while b"loading_worker" not in open(f"/proc/{worker.pid}/cmdline", "rb").read():
    time.sleep(0.01)
result = worker.pid, worker.address, str(worker.log_path)
"""
    pid, address, log = parent.run(started, path=str(checkpoint))
    assert is_alive(pid)
    parent.kill()
    wait_until(lambda: not is_alive(pid), 5.0)  # the interpreter must start first
    assert_nothing_left(pid, address, log)


def test_a_forked_child_leaves_its_parents_worker_alone(start_engine: Start, checkpoint: Path, table: Table) -> None:
    """In the child the connector raises ForkError and writes nothing; the parent's step in flight and its worker go on."""
    engine = start_engine()
    pid, address, log = engine.run(SPAWN, path=str(checkpoint))
    engine.connect(address, max_num_tokens=64, max_num_reqs=1)
    step = engine.prepare([1, 2, 3])
    source = """
import os
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    said = []
    for call in (lambda: connector._transport.inputs(1), lambda: connector._transport.publish(1, 1, 3), connector.check):
        try:
            rows = engine.take()  # NaN, and kept for check
            call()
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)
    connector.close()
    engine.worker.close()
    os.write(writer, " ".join(said).encode())
    os._exit(0)
os.waitpid(pid, 0)
result = os.read(reader, 1000).decode()
"""
    assert engine.run(source).split() == [ForkError.__name__] * 3
    assert Path(log).exists()
    assert is_alive(pid)
    for ids in ([1, 2, 3], [4, 5, 6]):
        assert same(engine.take(), table.lookup(ids))
        engine.check(step)
        engine.release()
        step = engine.prepare([4, 5, 6])


def test_the_interpreter_ends_with_a_batch_in_flight(checkpoint: Path) -> None:
    """Nothing was closed: it ends at once, with status 0, says nothing, and the worker goes with it."""
    source = f"""
import torch
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.layer import PleOffloadLayer
from ple_offload.worker.spawn import SpawnedWorker
worker = SpawnedWorker({str(checkpoint)!r}, tier="file", threads=1)
ids, starts, context = torch.zeros(8, dtype=torch.int64), torch.tensor([0, 8]), torch.full((1, 2), 7)
connector = PleOffloadConnector(ConnectorConfig(8, 1), PleOffloadLayer(1, 64), "cpu", worker.address,
    input_ids_source=ids, query_start_loc_source=starts, ngram_context_source=context)
connector.prepare_forward(1, 8)
print(worker.pid, worker.address, worker.log_path)
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    pid, address, log = ended.stdout.split()
    assert_nothing_left(int(pid), address, log)


def test_too_little_memory_is_refused_with_the_figures(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "MODULE", "worker.faults.poor_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    logs = my_logs()
    with pytest.raises(
        MemoryLimitError, match=r"tier 'ram': needs 0\.063 GiB of memory, 0\.001 GiB is available"
    ) as raised:
        SpawnedWorker(checkpoint, tier="ram", threads=1)
    assert re.search("Use tier 'file'.*--skip-memory-check", str(raised.value))
    assert my_logs() == logs


def test_a_worker_that_cannot_be_started_leaves_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before, logs = num_descriptors(), my_logs()
    with pytest.raises(ConnectionLostError, match=r"could not be started.*/nowhere/python"):
        SpawnedWorker(checkpoint)
    assert num_descriptors() == before
    assert my_logs() == logs


def test_a_worker_that_dies_while_starting_is_told_with_its_log(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "MODULE", "worker.faults.no_such_module")
    with pytest.raises(ConnectionLostError, match=r"died while starting \(exit status 1\).*No module named") as raised:
        SpawnedWorker(checkpoint)
    Path(re.findall(r"log, (\S+), ends", str(raised.value))[0]).unlink()
