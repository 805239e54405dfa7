"""transformers over every kind of worker: an ordinary model's output bit for bit, and exceptions instead of hangs."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip(
    "transformers.models.qwen4_exp.modeling_qwen4_exp", reason="the adapter needs a transformers that has Qwen4Exp"
)

from ple_offload.connector.config import Limits  # noqa: E402
from ple_offload.engines import transformers as engine  # noqa: E402
from ple_offload.engines.tables import _pieces  # noqa: E402
from ple_offload.errors import (  # noqa: E402
    ConnectionLostError,
    ProtocolError,
    StepError,
    StoreError,
    UsageError,
)
from ple_offload.worker.spawn import SpawnedWorker  # noqa: E402

from .test_transformers import CACHE, generate, ids  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
TWO_LAYERS: dict[str, Any] = {"ple_layer_ids": [2, 3]}
Make = Callable[..., Any]


@contextlib.contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Any]:
    model = engine.from_pretrained(*args, **options)
    with contextlib.closing(model.ple_offload):
        yield model


@pytest.fixture(scope="module")
def daemon(make_checkpoint: Make) -> Iterator[str]:
    """A worker of two checkpoints, as a daemon's address; no test may harm it."""
    with SpawnedWorker(make_checkpoint(), make_checkpoint(**TWO_LAYERS), tier="ram") as worker:
        yield worker.address


@pytest.fixture(scope="module", params=["spawn", "unix", "unix, 7 tokens a step"])
def model(request: pytest.FixtureRequest, make_checkpoint: Make, daemon: str) -> Iterator[Any]:
    """An offloaded model of one PLE layer, served by another process."""
    if request.param == "spawn":
        options: dict[str, Any] = {"worker": "spawn", "tier": "file"}
    else:
        options = {"worker": daemon} | ({"max_num_tokens": 7} if "7" in request.param else {})
    with opened(make_checkpoint(), dtype=BF16, **options) as made:
        yield made


def test_the_same_numbers(model: Any, make_pair: Make) -> None:
    """Logits, greedy and beam search, left padding, chunked prefill: the ordinary model's, with any kind of worker."""
    tokens = ids(3, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, :1] = 0

    def chunked(made: Any) -> Any:
        cache, logits = None, []
        for chunk in (tokens[:, :1], tokens[:, 1:9], tokens[:, 9:10], tokens[:, 10:]):
            out = made(chunk, use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    uses: list[Callable[[Any], Any]] = [
        lambda made: made(tokens, attention_mask=mask).logits,
        lambda made: made(tokens[:1, :1]).logits,
        chunked,
        lambda made: generate(made, inputs=tokens, attention_mask=mask),
        lambda made: generate(made, inputs=tokens, attention_mask=torch.ones_like(tokens), num_beams=3),
    ]
    ordinary = make_pair(BF16).ordinary
    assert not model.ple_offload.tables
    with torch.no_grad():
        for use in uses:
            assert torch.equal(use(ordinary), use(model))
    (connector,) = model.ple_offload.remote.connectors
    assert connector.metrics.steps == connector.metrics.waits > 20
    assert connector.metrics.failures == 0
    assert 0 < connector.metrics.wait_s < 60


def test_two_layers(make_pair: Make, make_checkpoint: Make, daemon: str) -> None:
    """One step serves both layers; a layer called by itself, again, or after a broken-off forward gets its own rows."""
    pair = make_pair(BF16, **TWO_LAYERS)
    with opened(make_checkpoint(**TWO_LAYERS), dtype=BF16, worker=daemon) as model, torch.no_grad():
        assert torch.equal(model(ids(2, 13)).logits, pair.ordinary(ids(2, 13)).logits)
        (connector,) = model.ple_offload.remote.connectors
        assert (connector.metrics.steps, connector.metrics.waits) == (1, 2)
        assert torch.equal(generate(model, inputs=ids(1, 13)), generate(pair.ordinary, inputs=ids(1, 13)))
        embeddings = [[m.model.layers[i].ple.ple_embedding for m in (model, pair.ordinary)] for i in (1, 2)]
        tokens = ids(1, 9)
        for here, there in (embeddings[1], embeddings[1], *embeddings, embeddings[0]):
            assert torch.equal(here(tokens, None), there(tokens, None))
        embeddings[0][0](tokens, None)
        tokens[0, 3] += 1  # the caller's buffer, written after the first layer has seen it
        assert torch.equal(embeddings[1][0](tokens, None), embeddings[1][1](tokens, None))
    with opened(make_checkpoint(**TWO_LAYERS), dtype=BF16, worker=daemon, max_num_tokens=5) as model, torch.no_grad():
        assert torch.equal(model(ids(2, 13)).logits, pair.ordinary(ids(2, 13)).logits)


@pytest.mark.parametrize(("batch", "seq", "most"), [(1, 9, 4), (3, 4, 8), (5, 3, 7), (2, 8, 1), (4, 1, 3)])
def test_pieces_cover_every_token_once_behind_its_own_past(batch: int, seq: int, most: int) -> None:
    tokens = torch.arange(batch * seq).view(batch, seq)
    context = -1 - torch.arange(batch * 2).view(batch, 2)
    seen = torch.zeros_like(tokens)
    for rows, columns, before in _pieces(tokens, context, most):
        piece = tokens[rows, columns]
        assert piece.numel() <= most
        seen[rows, columns] += 1
        for row, first, past in zip(range(batch)[rows], piece[:, 0], before, strict=True):
            whole = [*context[row].tolist(), *tokens[row].tolist()]
            at = whole.index(int(first))
            assert past.tolist() == whole[at - 2 : at]
    assert torch.equal(seen, torch.ones_like(seen))


def test_no_tokens(model: Any, make_pair: Make) -> None:
    for made in (model, make_pair(BF16).offloaded):
        embedding = made.model.layers[1].ple.ple_embedding
        assert embedding(torch.zeros((2, 0), dtype=torch.int64), None).shape == (2, 0, 64)


def test_dtypes_and_copies(make_pair: Make, make_checkpoint: Make, daemon: str) -> None:
    """A copy shares the connection; converted, it gets values of its dtype from the stored bytes; pickle refuses."""
    ordinary = make_pair(BF16).ordinary
    with opened(make_checkpoint(), dtype=BF16, worker=daemon) as model, torch.no_grad():
        copied = copy.deepcopy(model).to(FP32)
        assert copied.ple_offload is model.ple_offload
        expected = copy.deepcopy(ordinary).to(FP32)(ids(1, 9)).logits
        for _ in range(2):
            assert torch.equal(copied(ids(1, 9)).logits, expected)
            assert torch.equal(model(ids(1, 9)).logits, ordinary(ids(1, 9)).logits)
        assert len(model.ple_offload.remote.connectors) == 2
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(model)
        with pytest.raises(UsageError, match="cannot be pickled"):
            torch.save(model, io.BytesIO())
    for closed in (model, copied):
        with pytest.raises(StoreError, match="was closed"):
            closed(ids(1, 9))
    model.ple_offload.close()
    assert "closed" in repr(model.ple_offload)


def test_two_models_in_two_threads(make_pair: Make, make_checkpoint: Make, daemon: str) -> None:
    """Models of different checkpoints on one daemon, one of them used by two threads at once."""
    expected = {
        key: generate(make_pair(BF16, **options).ordinary, inputs=ids(1, 9))
        for key, options in (("one", {}), ("two", TWO_LAYERS))
    }
    with (
        opened(make_checkpoint(), dtype=BF16, worker=daemon) as one,
        opened(make_checkpoint(**TWO_LAYERS), dtype=BF16, worker=daemon) as two,
    ):
        found: list[tuple[str, Any]] = []
        threads = [
            threading.Thread(target=lambda k=key, m=model: found.append((k, generate(m, inputs=ids(1, 9)))))
            for key, model in (("one", one), ("two", two), ("two", two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert sorted(key for key, _ in found) == ["one", "two", "two"]
        assert all(torch.equal(tokens, expected[key]) for key, tokens in found)


OTHER_PROCESS = """
import sys, torch
from ple_offload.engines.transformers import from_pretrained
torch.set_num_threads(1)
model = from_pretrained(sys.argv[1], worker=sys.argv[2], dtype=torch.bfloat16)
tokens = torch.arange(50, 59)[None]
while True:
    print(*model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist(), flush=True)
"""


def test_two_processes_on_one_daemon(make_pair: Make, make_checkpoint: Make, daemon: str) -> None:
    """Both generate at once, each its own text; when the other one is killed, this one goes on."""
    ordinary = make_pair(BF16).ordinary
    expected = " ".join(map(str, generate(ordinary, inputs=torch.arange(50, 59)[None])[0].tolist()))
    command = [sys.executable, "-c", OTHER_PROCESS, str(make_checkpoint()), daemon]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with opened(make_checkpoint(), dtype=BF16, worker=daemon) as model:
            assert other.stdout.readline().strip() == expected
            for seed in range(3):
                here = generate(model, inputs=ids(2, 9, seed))
                assert torch.equal(here, generate(ordinary, inputs=ids(2, 9, seed)))
                assert other.stdout.readline().strip() == expected
            other.kill()
            other.wait(20)
            assert torch.equal(generate(model, inputs=ids(2, 9)), generate(ordinary, inputs=ids(2, 9)))
    finally:
        other.kill()
        other.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda number: number.name)
def test_worker_lost_during_generate(number: signal.Signals, make_pair: Make, make_checkpoint: Make) -> None:
    """Killed, frozen or told to stop in the middle: an exception in time, and again until `reconnect`."""
    limits = Limits(no_progress_s=0.5)
    with opened(make_checkpoint(), dtype=BF16, worker="spawn", tier="file", limits=limits) as model:
        process = model.ple_offload.remote.process
        (connector,) = model.ple_offload.remote.connectors

        def strike() -> None:
            while connector.metrics.steps < 5:
                time.sleep(0.001)
            os.kill(process.pid, number)

        thread = threading.Thread(target=strike)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(ConnectionLostError, match=str(process.pid)):
            model.generate(ids(1, 9), max_new_tokens=400, do_sample=False, pad_token_id=0)
        assert time.monotonic() - begun < 20
        thread.join()
        with pytest.raises(ConnectionLostError):
            model(ids(1, 9))
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
        model.ple_offload.reconnect()
        with torch.no_grad():
            assert torch.equal(model(ids(1, 9)).logits, make_pair(BF16).ordinary(ids(1, 9)).logits)
        process.log_path.unlink(missing_ok=True)


def test_a_bad_id_fails_its_forward_only(model: Any, make_pair: Make) -> None:
    embedding = model.model.layers[1].ple.ple_embedding
    with pytest.raises(StepError, match=r"input_ids\[2\] = 1000"):
        embedding(torch.tensor([[5, 6, 1000]]), None)
    with torch.no_grad():
        assert torch.equal(model(ids(2, 9)).logits, make_pair(BF16).ordinary(ids(2, 9)).logits)


def test_a_model_nobody_closed(make_checkpoint: Make) -> None:
    """When it is dropped its worker ends, and takes its log with it."""
    model = engine.from_pretrained(make_checkpoint(), worker="spawn", tier="file")
    process = model.ple_offload.remote.process
    del model
    import gc

    gc.collect()
    assert process._process.wait(10) == 0
    assert not process.log_path.exists()


EXIT = """
import builtins, sys
from ple_offload.engines.transformers import from_pretrained
model = from_pretrained(sys.argv[1], worker="spawn", tier="file")
builtins.kept = model  # so that the interpreter's end does not delete it
print(model.ple_offload.remote.process.pid, model.ple_offload.remote.process.log_path)
"""


def test_a_process_that_ends_without_closing(make_checkpoint: Make) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(make_checkpoint())], capture_output=True, text=True, timeout=50, check=True
    )
    pid, log = done.stdout.split()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(log).exists()


# --- refusals ---


def test_another_checkpoints_tables(make_checkpoint: Make, daemon: str) -> None:
    """The worker's tables are compared with the checkpoint's, row by sampled row."""
    with pytest.raises(ProtocolError, match="expected one of the checkpoints"):
        engine.from_pretrained(make_checkpoint(seed=1), worker=daemon)


def test_nobody_listens(make_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLostError, match="ple-offload serve"):
        engine.from_pretrained(make_checkpoint(), worker=f"unix:{tmp_path}/none", limits=Limits(connect_s=0))


@pytest.mark.parametrize(
    "options",
    [
        {"worker": "daemon"},
        {"worker": "inline", "max_num_tokens": 5},
        {"worker": "spawn", "max_num_tokens": 0},
        {"worker": "unix:@nobody", "tier": "ram"},
        {"worker": "unix:@nobody", "threads": 2},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(make_checkpoint: Make, options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(UsageError, match=name):
        engine.from_pretrained(make_checkpoint(), **options)
