"""Processes for tests of faults: engines and workers that may be killed, all gone after the test."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import tiny
from engine import Engine
from faulty import Fault
from ple_offload import Table, open_table

_names = itertools.count()
QUICK = {"no_progress_s": 1.0, "hard_cap_s": 10.0, "connect_s": 5.0, "answer_s": 2.0, "ready_s": 5.0}
SHAPE = {"max_num_tokens": 4096, "max_num_reqs": 8, "limits": QUICK}
BIG = 2500  # tokens; with 4 rows each three blocks


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, of finite values: NaN is always a step that failed."""
    folder = tmp_path_factory.mktemp("faults") / "tiny"
    data = np.arange(tiny.ROWS * tiny.ROW_DIM, dtype=np.float32) + 1
    return tiny.write_default(folder, data=(data.view(np.uint32) >> 16).astype(np.uint16).tobytes())


@pytest.fixture(scope="session")
def table(checkpoint: Path) -> Iterator[Table]:
    """The reference."""
    with open_table(checkpoint, tier="file", threads=1) as opened:
        yield opened


class Worker:
    """A worker process at an address of its own."""

    def __init__(self, path: Path, log: Path, address: str | None, **options: Any) -> None:
        self.address = address or f"unix:@ple-offload-test-{os.getpid()}-{next(_names)}"
        self.log = log
        self.process = Engine()
        self.pid = self.process.pid
        self.process.begin("serve", str(path), self.address, log=str(log), **options)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.kill(number)
        if number == signal.SIGKILL:
            assert self.process.exit_status() == -signal.SIGKILL

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.process.kill(number)
        self.process.close()


@pytest.fixture
def start_worker(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """start_worker(fault=None, path=checkpoint): a worker, ended after the test; see `faulty.serve`."""
    started: list[Worker] = []

    def start(
        fault: Fault | None = None, path: Path = checkpoint, address: str | None = None, **options: Any
    ) -> Worker:
        started.append(Worker(path, tmp_path / f"worker{len(started)}.log", address, fault=fault, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """start_engine(address, **config): an engine with a connector (none without an address), ended after the test."""
    with contextlib.ExitStack() as ended:

        def start(address: str | None = None, **config: Any) -> Engine:
            engine = ended.enter_context(Engine())
            if address is not None:
                engine.connect(address, **{**SHAPE, **config})
            return engine

        yield start


def wait_until(what: Callable[[], object], limit_s: float = 5.0) -> None:
    """Poll until `what()` is true."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def regions(pid: int) -> int:
    """How many regions a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:ple-offload region")
