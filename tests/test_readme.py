"""The README's Python runs as it stands, and prints what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples need torch")
pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs a transformers that has Qwen4Exp")

from ple_offload.cli.demo import CHECKPOINT
from ple_offload.worker.spawn import SpawnedWorker

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SOCKET = "unix:/tmp/ple/socket"
# each with the output that follows it
EXAMPLES = re.findall(r"```python\n([^`]*)```\n\n```\n([^`]*)```", README)


@pytest.fixture(scope="module")
def folder(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run: it has what `demo --keep demo-model` writes."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "demo-model").symlink_to(make_checkpoint(**CHECKPOINT))
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(folder / "demo-model") as worker:
        yield worker


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3
    assert SOCKET in EXAMPLES[-1][0]


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=["lookup", "transformers", "engine"])
def test_example(code: str, output: str, folder: Path, worker: SpawnedWorker) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code.replace(SOCKET, worker.address)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
