"""`generate` and `demo`: the same tokens as the ordinary model, and a failure when they are not."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ple_offload
from ple_offload.cli import demo, main
from ple_offload.worker.spawn import SpawnedWorker

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def ordinary_tokens(checkpoint: Path) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_tokens_equal_the_ordinary_models(
    checkpoint: Path, tier: str, ordinary_tokens: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(checkpoint), "--tokens", "5,6,7,8", "--max-new-tokens", "12", "--tier", tier]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"], report["new_tokens"], report["text"]) == (PROMPT, ordinary_tokens, None)
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == ",".join(map(str, ordinary_tokens)) + "\n"
    assert printed.err == ""


def test_tokens_from_a_worker_process(
    checkpoint: Path, ordinary_tokens: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(checkpoint), "--tokens", "5,6,7,8", "--max-new-tokens", "12", "--worker"]
    assert main([*arguments, "spawn", "--tier", "file"]) == 0
    with SpawnedWorker(checkpoint, tier="file") as worker:
        assert main([*arguments, worker.address]) == 0
    printed = capsys.readouterr()
    assert printed.out == 2 * (",".join(map(str, ordinary_tokens)) + "\n")
    assert printed.err == ""


def test_a_prompt_uses_the_checkpoints_tokenizer(
    checkpoint: Path, ordinary_tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    copy = tmp_path / "with-tokenizer"
    shutil.copytree(checkpoint, copy)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(copy)
    assert main(["generate", str(copy), "--prompt", "w5 w6 w7 w8", "--max-new-tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"], report["new_tokens"]) == (PROMPT, ordinary_tokens)
    assert report["text"].split() == [f"w{token}" for token in ordinary_tokens]


def test_a_prompt_without_a_tokenizer(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "--prompt", "hello"]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_no_new_token_is_wrong_usage(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "--tokens", "5", "--max-new-tokens", "0"]) == 2
    assert "--max-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_a_device_that_is_not_there(device: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "--tokens", "5", "--device", device]) == 2
    printed = capsys.readouterr()
    assert f"--device {device}" in printed.err
    assert printed.err.count("\n") == 1


def test_routes(checkpoint: Path, ordinary_tokens: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Routes other than the host's are for a GPU."""
    arguments = ["generate", str(checkpoint), "--tokens", "5,6,7,8", "--max-new-tokens", "12", "--route"]
    assert main([*arguments, "host"]) == 0
    assert capsys.readouterr().out == ",".join(map(str, ordinary_tokens)) + "\n"
    assert main([*arguments, "staged"]) == 2
    assert "--route staged: expected a GPU, found --device cpu" in capsys.readouterr().err


def test_a_bad_token_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "--tokens", "5,1000"]) == 2
    assert "--tokens: id 1000 at position 1" in capsys.readouterr().err


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """Served by a worker process, and it says so."""
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    worker = re.search(r"worker process +pid (\d+), [\d.]+ MiB resident, has the table", text)
    assert worker is not None
    assert int(worker[1]) != os.getpid()
    assert not Path(f"/proc/{worker[1]}").exists()
    assert re.search(rf"model process +pid {os.getpid()}, [\d.]+ [GM]iB resident, without the table", text)
    assert f"yes, all {demo.MAX_NEW_TOKENS} tokens" in text
    assert "other text from new token" in text


def test_demo_fails_when_the_rows_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ple_offload.engines.remote import RemoteTables

    lookup = RemoteTables.lookup

    def zeros(tables: RemoteTables, *args: Any) -> Any:
        return lookup(tables, *args) * 0

    monkeypatch.setattr(RemoteTables, "lookup", zeros)
    assert main(["demo", "--json"]) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["offloaded_tokens"] == report["zeroed_tokens"] != report["ordinary_tokens"]
    assert "differ from new token" in printed.err


def test_demo_keeps_the_checkpoint_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept"
    assert main(["demo", "--keep", str(folder), "--tier", "file", "--worker", "inline", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tier"], report["worker"], report["worker_process"]) == ("file", "inline", None)
    assert ple_offload.inspect(folder).table().format.name == "bf16"
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # whoever may read one may read all
    assert main(["demo", "--keep", str(folder)]) == 2
    assert "--keep" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--worker", "unix:/nowhere"])
    assert "--worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(left: list[int], right: list[int], at: int | None) -> None:
    assert demo.first_difference(left, right) == at
