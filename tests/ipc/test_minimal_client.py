"""docs/PROTOCOL.md is enough to write a client: one that imports nothing of the package gets every row right."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoint import tiny
from ipc import minimal_client
from ipc.minimal_client import Client, RefusedError, StepFailedError
from ple_offload.worker.spawn import SpawnedWorker
from worker.peers import TABLE, expected_rows


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint = tiny.write_default(tmp_path_factory.mktemp("tiny"))
    with SpawnedWorker(checkpoint, tier="file", threads=1) as worker:
        yield worker.address


def test_it_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(minimal_client.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith(("ple_offload", "worker", "checkpoint"))]


def test_rows_by_tokens(address: str) -> None:
    """Requests of any lengths, with and without context, in both slots, over several blocks of 4096 rows."""
    rng = np.random.default_rng(0)
    client = Client(address, layer=1, max_num_tokens=2000, max_num_reqs=5)
    for num_reqs, num_tokens in [(1, 1), (5, 64), (1, 1024), (2, 1025), (3, 2000), (1, 3)]:
        ids = rng.integers(0, 1000, num_tokens)
        starts = [0, *sorted(rng.integers(0, num_tokens + 1, num_reqs - 1)), num_tokens]
        context = rng.integers(0, 1000, (num_reqs, 2))
        step = client.publish(ids, starts, context)
        np.testing.assert_array_equal(client.wait(step, num_tokens), expected_rows(ids, starts, context))
        client.release(step)
    client.close()


def test_two_steps_in_flight(address: str) -> None:
    client = Client(address, layer=1, max_num_tokens=64)
    first, second = client.publish([1, 2, 3]), client.publish([4])
    np.testing.assert_array_equal(client.wait(second, 1), expected_rows([4]))
    np.testing.assert_array_equal(client.wait(first, 3), expected_rows([1, 2, 3]))
    client.close()


def test_rows_by_row_numbers(address: str) -> None:
    numbers = np.random.default_rng(2).integers(0, tiny.ROWS, (10, 4))
    client = Client(address, layer=1, max_num_tokens=64, request="rows")
    step = client.publish(numbers)
    np.testing.assert_array_equal(client.wait(step, 10), TABLE[numbers].reshape(10, 128))
    client.close()


def test_decoded_rows(address: str) -> None:
    client = Client(address, layer=1, max_num_tokens=64, output="fp32")
    step = client.publish([5, 6])
    values = client.wait(step, 2).view(np.float32)
    wanted = expected_rows([5, 6]).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))
    client.close()


def test_a_step_that_fails_is_told_from_one_that_comes(address: str) -> None:
    client = Client(address, layer=1, max_num_tokens=64)
    bad = client.publish([1, -1])
    with pytest.raises(StepFailedError, match=r"input_ids\[1\] = -1"):
        client.wait(bad, 2)
    client.release(bad)
    step = client.publish([1, 2])
    np.testing.assert_array_equal(client.wait(step, 2), expected_rows([1, 2]))
    client.close()


def test_it_is_told_why_it_is_refused(address: str) -> None:
    with pytest.raises(RefusedError, match="slots: expected 1 to 64, found 65"):
        Client(address, layer=1, max_num_tokens=64, slots=65)
