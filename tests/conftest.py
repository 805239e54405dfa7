"""Fixtures for every test: a clean environment and small random Qwen4Exp checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Nothing in the tests may ask a hub; set before transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Without a GPU, Triton's kernels run in its interpreter; set before anything imports triton, torch.compile for one.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PLE_OFFLOAD_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint(**options): a folder with a small random model; the same options give the same folder.

    Options: `seed`, `max_shard_size`, anything of the text config (`ple_layer_ids=[1, 2]`, `ngram_size=4`).
    Do not write into the folder: copy it first (`shutil.copytree`).
    """
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        import torch

        from ple_offload.cli.random_checkpoint import write_random_checkpoint

        # Models this small spend their time waiting for torch's other threads, most of all on a busy machine.
        torch.set_num_threads(1)
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """The plain small checkpoint: one PLE layer (zero-based 1), 4 shards in several files, with an index."""
    return make_checkpoint()
