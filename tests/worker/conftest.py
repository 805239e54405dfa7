"""One worker process for the tests that may not harm it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import tiny
from ple_offload.worker.spawn import SpawnedWorker
from worker.peers import GoodSession


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_default(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def worker(tiny_checkpoint: Path) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(tiny_checkpoint, tier="ram", threads=1) as started:
        yield started


@pytest.fixture
def good(worker: SpawnedWorker) -> Iterator[GoodSession]:
    """A session beside the test: its rows must be right before and after it, each within two seconds."""
    session = GoodSession(worker.address)
    session.step()
    yield session
    session.step()
    assert session.slowest_s < 2
    session.close()
