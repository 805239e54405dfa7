"""One worker for every test here: it serves a tiny checkpoint of each format, and a zeroed twin of the BF16 one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connector.rig import Made, Rank, make
from ple_offload import open_table
from ple_offload.worker.spawn import SpawnedWorker


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Checkpoints with two PLE layers each, by the dtype of their rows; "zero" claims to be BF16 and holds zeros."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = {dtype: make(folder / dtype, dtype, num_layers=2) for dtype in ("BF16", "F16", "F32", "F8_E4M3")}
    return {**checkpoints, "zero": make(folder / "zero", num_layers=2, zero=True)}


@pytest.fixture(scope="session")
def worker(made: dict[str, Made]) -> Iterator[SpawnedWorker]:
    """A worker process that no test may harm."""
    with SpawnedWorker(*(checkpoint.path for checkpoint in made.values()), tier="file", threads=1) as started:
        yield started


@pytest.fixture(params=["inline", "worker"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rank(request: pytest.FixtureRequest, made: dict[str, Made], transport: str) -> Iterator[Callable[..., Rank]]:
    """rank("BF16", **options): a rank of that checkpoint, closed after the test. Sessions are named apart."""
    opened: list[Any] = []

    def start(stored: str = "BF16", **options: Any) -> Rank:
        checkpoint = made[stored]
        options.setdefault("session", f"{request.node.name[:150]} {len(opened)}")
        if transport == "inline":
            tables = {t.layer: open_table(checkpoint.path, t.layer, "file", threads=1) for t in checkpoint.spec.tables}
            opened.extend(tables.values())
            options["opened"] = tables
        address = "inline" if transport == "inline" else request.getfixturevalue("worker").address
        opened.append(Rank.of(checkpoint, address, **options))
        return opened[-1]

    yield start
    for item in reversed(opened):
        item.close()
