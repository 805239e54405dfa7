"""Pairs of models for the adapter's tests: transformers' own and the offloaded one of one checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip(
    "transformers.models.qwen4_exp.modeling_qwen4_exp", reason="the adapter needs a transformers that has Qwen4Exp"
)

from safetensors.torch import load_file, save_file  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are far too small to be shared out among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Pair:
    ordinary: Any
    offloaded: Any

    def both(self, use: Callable[[Any], Any]) -> tuple[Any, Any]:
        with torch.no_grad():
            return use(self.ordinary), use(self.offloaded)


@pytest.fixture(scope="session")
def make_pair(make_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Pair]]:
    """make_pair(dtype, **options): both models of `make_checkpoint(**options)`, shared by all tests."""
    from transformers import AutoModelForCausalLM

    from ple_offload.engines.transformers import from_pretrained

    made: dict[str, Pair] = {}

    def make(dtype: Any = torch.bfloat16, **options: Any) -> Pair:
        key = json.dumps([str(dtype), options], sort_keys=True)
        if key not in made:
            folder = make_checkpoint(**options)
            ordinary = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            made[key] = Pair(ordinary, from_pretrained(folder, tier="file", dtype=dtype))
        return made[key]

    yield make
    for pair in made.values():
        pair.offloaded.ple_offload.close()


@pytest.fixture
def rewrite(tmp_path: Path) -> Callable[..., Path]:
    """rewrite(folder, change): a copy of a checkpoint in one file, its tensors put through `change`."""

    def write(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
        out = tmp_path / "rewritten"
        out.mkdir()
        shutil.copy(folder / "config.json", out)
        tensors: dict[str, Any] = {}
        for file in folder.glob("*.safetensors"):
            tensors.update(load_file(file))
        save_file(change(tensors), out / "model.safetensors", metadata={"format": "pt"})
        return out

    return write
