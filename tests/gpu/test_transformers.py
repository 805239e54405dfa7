"""transformers on a GPU with the table outside: the ordinary model's output bit for bit, by every route.

Run with `make test-gpu` on a machine with an NVIDIA GPU and transformers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs a transformers that has Qwen4Exp")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from engines.test_transformers import CACHE, TABLE, fused, generate, ids  # noqa: E402
from ple_offload import cuda  # noqa: E402
from ple_offload.cli import main  # noqa: E402
from ple_offload.connector import registry  # noqa: E402
from ple_offload.connector.config import Limits  # noqa: E402
from ple_offload.engines import transformers as engine  # noqa: E402
from ple_offload.errors import ConnectionLostError, CudaError, StepError, StoreError, UsageError  # noqa: E402
from ple_offload.worker.spawn import SpawnedWorker  # noqa: E402

# warnings of the engine and of torch's compiler differ from release to release
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE: dict[str, Any] = {"ple_embed_dim": 2560}  # rows as wide as the released model's; a table of 10 MiB
TWO_LAYERS: dict[str, Any] = {**WIDE, "ple_layer_ids": [2, 3]}
KINDS: dict[str, dict[str, Any]] = {
    "inline, ram": {"tier": "ram", "route": "direct"},
    "inline, file": {"tier": "file", "route": "direct"},
    "inline, auto": {"tier": "file"},
    "spawn, staged": {"worker": "spawn", "tier": "ram", "route": "staged"},
    "spawn, auto": {"worker": "spawn", "tier": "file"},
    "inline, host": {"tier": "file", "route": "host"},
    "spawn, host": {"worker": "spawn", "tier": "file", "route": "host"},
}
ON_GPU = [kind for kind in KINDS if "host" not in kind]
Make = Callable[..., Any]


@contextlib.contextmanager
def opened(folder: Path, dtype: Any = BF16, **options: Any) -> Iterator[Any]:
    model = engine.from_pretrained(folder, dtype=dtype, **options)
    with contextlib.closing(model.ple_offload):
        yield model.to("cuda")


@pytest.fixture(scope="module")
def ordinary(make_checkpoint: Make) -> Iterator[Make]:
    """ordinary(dtype, **options): transformers' own model of `make_checkpoint(**options)` on the GPU."""
    made: dict[str, Any] = {}

    def make(dtype: Any = BF16, **options: Any) -> Any:
        key = f"{dtype} {options}"
        if key not in made:
            made[key] = AutoModelForCausalLM.from_pretrained(make_checkpoint(**options), dtype=dtype).to("cuda")
        return made[key]

    yield make
    made.clear()


def embedding(model: Any, layer: int = 1) -> Any:
    return model.model.layers[layer].ple.ple_embedding


def padded(batch: int, length: int) -> dict[str, Any]:
    """Ids and a mask with left padding of 0, 1, 2, ... tokens."""
    tokens = ids(batch, length).cuda()
    mask = torch.ones_like(tokens)
    for i in range(batch):
        mask[i, :i] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def chunked(model: Any) -> Any:
    """Logits of a prompt in chunks through a cache, then two tokens one by one."""
    tokens, cache, logits = ids(3, 12).cuda(), None, []
    for chunk in (tokens[:, :1], tokens[:, 1:9], tokens[:, 9:10], tokens[:, 10:]):
        out = model(chunk, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


USES: dict[str, Callable[[Any], Any]] = {
    "logits": lambda model: model(**padded(4, 12)).logits,
    "one token": lambda model: model(ids(1, 1).cuda()).logits,
    "chunked prefill": chunked,
    "greedy": lambda model: generate(model, **padded(1, 9)),
    "greedy, four with padding": lambda model: generate(model, **padded(4, 9)),
    "beams": lambda model: generate(model, **padded(2, 9), num_beams=3),
    "static cache": lambda model: generate(model, **padded(2, 9), cache_implementation="static", disable_compile=True),
}


def assert_same(ordinary: Any, model: Any, names: Any = tuple(USES)) -> None:
    with torch.no_grad():
        for name in names:
            expected = USES[name](ordinary)
            assert torch.equal(expected, USES[name](ordinary)), f"{name}: the ordinary model itself varies"
            found = USES[name](model)
            assert not found.isnan().any(), name
            assert torch.equal(expected, found), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model:
        assert_same(ordinary(**WIDE), model)
        places = {connector.device.type for connector in model.ple_offload.source.connectors}
        assert ("cuda" in places) == (kind in ON_GPU)
        assert all(connector.metrics.failures == 0 for connector in model.ple_offload.source.connectors)


@pytest.mark.parametrize("kind", ["inline, file", "spawn, staged"])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_other_dtypes(kind: str, dtype: Any, ordinary: Make, make_checkpoint: Make) -> None:
    with opened(make_checkpoint(**WIDE), dtype, **KINDS[kind]) as model:
        assert_same(ordinary(dtype, **WIDE), model, ["logits", "greedy"])


@pytest.mark.parametrize("kind", ["inline, ram", "inline, file", "spawn, staged"])
@pytest.mark.parametrize(
    "options", [{}, {"ngram_size": 2}, {"ngram_size": 4, "heads_per_ngram": 4, "ple_embed_dim": 96}], ids=str
)
def test_other_tables(kind: str, options: dict[str, Any], ordinary: Make, make_checkpoint: Make) -> None:
    """Rows of a few bytes, and other orders of n-grams."""
    with opened(make_checkpoint(**options), **KINDS[kind]) as model:
        assert_same(ordinary(**options), model, ["logits", "chunked prefill", "greedy"])


@pytest.mark.parametrize("kind", ["inline, ram", "inline, file", "spawn, staged", "spawn, auto"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fp8_table(kind: str, dtype: Any, make_checkpoint: Make, tmp_path: Path) -> None:
    """transformers cannot load it, so its table is set to row.to(dtype) * scale.to(dtype)."""
    source, scale = make_checkpoint(**WIDE), torch.tensor([0.0123])
    shutil.copy(source / "config.json", tmp_path)
    tensors: dict[str, Any] = {}
    for file in source.glob("*.safetensors"):
        tensors.update(load_file(file))
    for name, tensor in list(tensors.items()):
        if ".shard_" in name:
            tensors[name] = (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name.partition(TABLE)[0] + TABLE + "weight_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (table,) = (tensor for name, tensor in fused(tensors).items() if name.endswith(TABLE + "weight"))
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    with torch.no_grad():
        embedding(reference).ngram_embedding.weight.copy_(table.to(dtype) * scale.to(dtype))
    with opened(tmp_path, dtype, **KINDS[kind]) as model:
        assert_same(reference.to("cuda"), model, ["logits", "chunked prefill", "greedy, four with padding"])


def test_the_table_matters(ordinary: Make, make_checkpoint: Make) -> None:
    """Negative control: with the ordinary model's table zeroed, every comparison here would fail."""
    zeroed = copy.deepcopy(ordinary(**WIDE))
    with opened(make_checkpoint(**WIDE), **KINDS["inline, ram"]) as model, torch.no_grad():
        embedding(zeroed).ngram_embedding.weight.zero_()
        for name, use in USES.items():
            assert not torch.equal(use(zeroed), use(model)), name


@pytest.mark.parametrize("kind", ON_GPU)
def test_the_table_is_not_in_gpu_memory(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    with torch.no_grad():
        USES["logits"](ordinary(**WIDE))  # what torch's libraries allocate once
    gc.collect()
    before = torch.cuda.memory_allocated()
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        USES["logits"](model)
        gc.collect()
        own = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
        table = embedding(ordinary(**WIDE)).ngram_embedding.weight
        table_bytes = table.numel() * table.element_size()
        assert table_bytes > 10_000_000
        assert torch.cuda.memory_allocated() - before - own < table_bytes / 3
        assert not [name for name in model.state_dict() if TABLE in name]
        assert max(x.numel() for x in model.parameters()) < table.numel()


@pytest.mark.parametrize("kind", ["inline, file", "spawn, staged"])
def test_two_layers(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    """One step serves both; a layer called by itself, again, or with a buffer that was written to gets its own rows."""
    with opened(make_checkpoint(**TWO_LAYERS), **KINDS[kind]) as model, torch.no_grad():
        reference = ordinary(**TWO_LAYERS)
        assert torch.equal(model(ids(2, 13).cuda()).logits, reference(ids(2, 13).cuda()).logits)
        (connector,) = (c for c in model.ple_offload.source.connectors if c.device.type == "cuda")
        assert connector.metrics.steps == 1
        assert_same(reference, model, ["chunked prefill", "greedy"])
        pairs = [[embedding(made, layer) for made in (model, reference)] for layer in (1, 2)]
        tokens = ids(1, 9).cuda()
        for here, there in (pairs[1], pairs[1], *pairs, pairs[0]):
            assert torch.equal(here(tokens, None), there(tokens, None))
        pairs[0][0](tokens, None)
        tokens[0, 3] += 1
        assert torch.equal(pairs[1][0](tokens, None), pairs[1][1](tokens, None))


@pytest.mark.parametrize("kind", ["inline, ram", "spawn, staged"])
@pytest.mark.parametrize("shape", [(1, 8192), (2, 9000), (8193, 1), (2, 0)], ids=str)
def test_more_tokens_than_a_step_takes(
    kind: str, shape: tuple[int, int], ordinary: Make, make_checkpoint: Make
) -> None:
    tokens = ids(*shape).cuda()
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        found = embedding(model)(tokens, None)
        assert found.shape == (*shape, 2560)
        if tokens.numel():
            assert torch.equal(found, embedding(ordinary(**WIDE))(tokens, None))
        after = ids(3, 5).cuda()
        assert torch.equal(embedding(model)(after, None), embedding(ordinary(**WIDE))(after, None))


@pytest.mark.parametrize("kind", ON_GPU)
def test_a_bad_id_fails_its_lookup_only(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model:
        for _ in range(2):
            with pytest.raises(StepError, match=r"input_ids\[2\]"):
                embedding(model)(torch.tensor([[5, 6, 1000]], device="cuda"), None)
            assert_same(ordinary(**WIDE), model, ["logits"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_worker_lost_during_generate(number: signal.Signals, ordinary: Make, make_checkpoint: Make) -> None:
    """Killed or frozen in the middle: an exception in time, never tokens from NaN, and again until `reconnect`."""
    kind = {**KINDS["spawn, staged"], "limits": Limits(no_progress_s=0.5)}
    with opened(make_checkpoint(**WIDE), **kind) as model:
        process = model.ple_offload.remote.process
        model(ids(1, 9).cuda())
        (connector,) = (c for c in model.ple_offload.source.connectors if c.device.type == "cuda")
        begun = connector.metrics.steps

        def strike() -> None:
            while connector.metrics.steps < begun + 5:
                time.sleep(0.001)
            os.kill(process.pid, number)

        thread = threading.Thread(target=strike)
        thread.start()
        started = time.monotonic()
        with pytest.raises((ConnectionLostError, StepError)):
            model.generate(ids(1, 9).cuda(), max_new_tokens=450, min_new_tokens=450, do_sample=False, pad_token_id=0)
        assert time.monotonic() - started < 60
        thread.join()
        with pytest.raises(ConnectionLostError):
            model(ids(1, 9).cuda())
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
        model.ple_offload.reconnect()
        assert_same(ordinary(**WIDE), model, ["logits", "greedy"])
        process.log_path.unlink(missing_ok=True)


def test_two_models_on_one_daemon(ordinary: Make, make_checkpoint: Make) -> None:
    """Of different checkpoints, at the same time, one of them in two threads on streams of their own."""
    cases = {"one": WIDE, "two": TWO_LAYERS}
    expected = {key: generate(ordinary(**options), **padded(2, 9)) for key, options in cases.items()}
    found: list[tuple[str, Any]] = []

    def work(key: str, model: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.extend((key, generate(model, **padded(2, 9)).cpu()) for _ in range(5))

    with (
        SpawnedWorker(*(make_checkpoint(**options) for options in cases.values()), tier="ram") as worker,
        opened(make_checkpoint(**WIDE), worker=worker.address, route="staged") as one,
        opened(make_checkpoint(**TWO_LAYERS), worker=worker.address) as two,
    ):
        torch.cuda.synchronize()  # the threads' streams do not wait for the one that made the models
        threads = [threading.Thread(target=work, args=case) for case in (("one", one), ("two", two), ("two", two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
    assert sorted(key for key, _ in found) == ["one"] * 5 + ["two"] * 10
    for key, tokens in found:
        assert torch.equal(tokens, expected[key].cpu()), key


@pytest.mark.parametrize("kind", ["inline, ram", "spawn, staged"])
def test_threads_and_streams(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    """Lookups of one model from three threads, each on a stream of its own: everyone gets the rows of its own ids."""
    inputs = [[ids(2, 7, 100 * thread + i).cuda() for i in range(40)] for thread in range(3)]
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        expected = [[embedding(ordinary(**WIDE))(tokens, None).cpu() for tokens in own] for own in inputs]
        torch.cuda.synchronize()
        right: list[bool] = []

        def work(number: int) -> None:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for tokens, values in zip(inputs[number], expected[number], strict=True):
                    right.append(torch.equal(embedding(model)(tokens, None).cpu(), values))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert right == [True] * 120


@pytest.mark.parametrize("kind", ["inline, ram", "spawn, staged"])
def test_dtypes_and_copies(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    """A copy shares the tables; converted, it gets values of its dtype from the stored bytes; closed is closed."""
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        with torch.inference_mode():
            model(ids(1, 9).cuda())
        copied = copy.deepcopy(model).to(FP32)
        converted = copy.deepcopy(ordinary(**WIDE)).to(FP32)
        for _ in range(2):
            assert_same(converted, copied, ["logits"])
            assert_same(ordinary(**WIDE), model, ["logits"])
        assert sum(c.device.type == "cuda" for c in model.ple_offload.source.connectors) == 2
    for closed in (model, copied):
        with pytest.raises(StoreError, match="was closed"):
            closed(ids(1, 9).cuda())
    model.ple_offload.close()


def test_a_model_nobody_closed(make_checkpoint: Make) -> None:
    """When it is dropped, nothing of it stays: neither connector nor worker."""
    gc.collect()
    before = len(registry._served)
    model = engine.from_pretrained(make_checkpoint(**WIDE), dtype=BF16, **KINDS["spawn, staged"]).to("cuda")
    model(ids(1, 9).cuda())
    process = model.ple_offload.remote.process
    assert len(registry._served) > before
    del model
    gc.collect()
    assert process._process.wait(10) == 0
    assert len(registry._served) == before


def test_a_file_that_changed_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(make_checkpoint(**WIDE), folder)
    with opened(folder, **KINDS["inline, file"]) as model:
        embedding(model)(ids(1, 9).cuda(), None)
        for file in folder.glob("*.safetensors"):
            os.utime(file, ns=(1, 1))
        time.sleep(0.15)  # the table looks at its files ten times a second
        with pytest.raises(StoreError, match="changed while its table"):
            embedding(model)(ids(1, 9).cuda(), None)


class RefusingDriver:
    """Answers every call with an error."""

    CUdevice_attribute = int

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (1,)


@pytest.fixture
def refusing() -> Iterator[None]:
    before = cuda.set_driver(RefusingDriver())
    yield
    cuda.set_driver(before)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("worker", ["inline", "spawn"])
def test_a_driver_that_refuses(
    worker: str, ordinary: Make, make_checkpoint: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` takes the host and says once why; an explicit route is an error when the model is loaded."""
    with opened(make_checkpoint(**WIDE), worker=worker, tier="ram") as model:
        with caplog.at_level(logging.WARNING, "ple_offload.engines.tables"):
            assert_same(ordinary(**WIDE), model, ["logits", "greedy"])
        (said,) = (r.getMessage() for r in caplog.records if r.name == "ple_offload.engines.tables")
        assert re.search(r"route 'host'.* cu\w+\(.*\) on cuda:0", said)
    with pytest.raises(CudaError, match=r"cu\w+\(.*\) on cuda:0"):
        engine.from_pretrained(
            make_checkpoint(**WIDE), worker=worker, tier="ram", route="direct" if worker == "inline" else "staged"
        )


def test_a_route_that_inline_tables_do_not_have(make_checkpoint: Make) -> None:
    with pytest.raises(UsageError, match="route 'staged'"):
        engine.from_pretrained(make_checkpoint(**WIDE), route="staged")


@pytest.mark.parametrize("kind", ["inline, ram", "spawn, staged", "inline, host"])
def test_capturing_a_forward_is_refused(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        tokens = ids(2, 9).cuda()
        embedding(model)(tokens, None)
        torch.cuda.synchronize()
        with pytest.raises(UsageError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            embedding(model)(tokens, None)
        assert_same(ordinary(**WIDE), model, ["logits"])


@pytest.mark.parametrize("kind", ["inline, ram", "spawn, staged"])
def test_compiled_with_graphs_around_the_lookup(kind: str, ordinary: Make, make_checkpoint: Make) -> None:
    """`mode="reduce-overhead"`, as transformers compiles static caches: the lookup stays outside the CUDA graphs."""
    torch._dynamo.reset()
    with opened(make_checkpoint(**WIDE), **KINDS[kind]) as model, torch.no_grad():
        here, there = embedding(model), embedding(ordinary(**WIDE))
        compiled = torch.compile(lambda tokens: here(tokens * 1, None) * 2 + 1, mode="reduce-overhead")
        for seed in range(8):
            tokens = ids(2, 9, seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(tokens), there(tokens, None) * 2 + 1), seed
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [[], ["--route", "direct"], ["--worker", "spawn", "--route", "staged"]], ids=str)
def test_the_command(
    options: list[str], ordinary: Make, make_checkpoint: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]], device="cuda")
    tokens = ordinary(**WIDE).generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    arguments = ["generate", str(make_checkpoint(**WIDE)), "--tokens", "5,6,7,8", "--max-new-tokens", "12"]
    assert main([*arguments, "--device", "cuda", *options]) == 0
    assert capsys.readouterr().out == ",".join(map(str, tokens[0, 4:].tolist())) + "\n"
