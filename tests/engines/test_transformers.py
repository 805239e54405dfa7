"""The transformers adapter: an ordinary model's output, bit for bit, with the table not in the model.

Whatever an offloaded model is compared with, the table decides the outcome: see `test_table_matters`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip(
    "transformers.models.qwen4_exp.modeling_qwen4_exp", reason="the adapter needs a transformers that has Qwen4Exp"
)

import transformers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling  # noqa: E402

from ple_offload.engines import transformers as engine  # noqa: E402
from ple_offload.errors import CheckpointError, StoreError, UsageError  # noqa: E402

EOS, VOCAB = 7, 1000
TABLE = "ngram_embedding."
CACHE = "cache" if "cache" in signature(modeling.Qwen4ExpForCausalLM.forward).parameters else "past_key_values"
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16

Make = Callable[..., Any]


def ids(batch: int, length: int, seed: int = 0) -> Any:
    """(batch, length) int64 with an EOS run and a lone EOS inside when long enough."""
    drawn = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    if length > 8:
        drawn[0, 2] = EOS
        drawn[-1, 4:7] = EOS
    return drawn


def generate(model: Any, **options: Any) -> Any:
    return model.generate(**options, max_new_tokens=8, do_sample=False, pad_token_id=0)


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors with each table's shards joined into one `ngram_embedding.weight`."""
    shards: dict[str, dict[int, Any]] = {}
    rest = {}
    for name, tensor in tensors.items():
        module, found, suffix = name.partition(TABLE + "shard_")
        if found:
            shards.setdefault(module + TABLE + "weight", {})[int(suffix.removesuffix(".weight"))] = tensor
        else:
            rest[name] = tensor
    return rest | {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in shards.items()}


@contextlib.contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Any]:
    """An offloaded model of its own for one test."""
    model = engine.from_pretrained(*args, **options)
    with contextlib.closing(model.ple_offload):
        yield model


# --- the same numbers ---


@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 17)])
def test_forward(make_pair: Make, dtype: Any, shape: tuple[int, int]) -> None:
    ordinary, offloaded = make_pair(dtype).both(lambda m: m(ids(*shape)).logits)
    assert offloaded.dtype == dtype
    assert torch.equal(ordinary, offloaded)


def test_table_matters(make_pair: Make) -> None:
    """Negative control: with the ordinary model's table zeroed, every comparison here would fail."""
    pair = make_pair(BF16)
    zeroed = copy.deepcopy(pair.ordinary)
    for module in zeroed.modules():
        if isinstance(module, modeling.Qwen4ExpTextNGramEmbedding):
            torch.nn.init.zeros_(module.ngram_embedding.weight)
    with torch.no_grad():
        assert not torch.equal(zeroed(ids(1, 12)).logits, pair.offloaded(ids(1, 12)).logits)
        assert not torch.equal(generate(zeroed, inputs=ids(1, 12)), generate(pair.offloaded, inputs=ids(1, 12)))


@pytest.mark.parametrize(
    "options",
    [
        {"ngram_size": 2},
        {"ngram_size": 4, "heads_per_ngram": 4, "ple_embed_dim": 96},
        {"ple_layer_ids": [2, 3]},
        {"eos_token_id": [EOS, 11]},
    ],
    ids=str,
)
def test_other_tables(make_pair: Make, options: dict[str, Any]) -> None:
    pair = make_pair(BF16, **options)
    ordinary, offloaded = pair.both(lambda m: m(ids(2, 13)).logits)
    assert torch.equal(ordinary, offloaded)
    ordinary, offloaded = pair.both(lambda m: generate(m, inputs=ids(1, 13)))
    assert torch.equal(ordinary, offloaded)


@pytest.mark.parametrize("options", [{}, {"ngram_size": 4, "heads_per_ngram": 4, "ple_embed_dim": 96}], ids=str)
def test_chunked_prefill(make_pair: Make, options: dict[str, Any]) -> None:
    """A prompt in two chunks, cut at every place, then two more tokens one by one."""

    def run(model: Any, cut: int) -> Any:
        tokens = ids(2, 11)
        chunks = [tokens[:, :cut], tokens[:, cut:9], tokens[:, 9:10], tokens[:, 10:]]
        cache, logits = None, []
        for chunk in chunks:
            out = model(chunk, use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    pair = make_pair(BF16, **options)
    for cut in range(1, 9):
        ordinary, offloaded = pair.both(lambda m: run(m, cut))  # noqa: B023
        assert torch.equal(ordinary, offloaded), f"cut at {cut}"


def test_cache_that_records(make_pair: Make) -> None:
    """While a cache keeps its past for a rollback, it holds more ids than the window; only the last ones count."""

    def run(model: Any) -> Any:
        cache = model(ids(2, 5), use_cache=True)[CACHE]
        takes = signature(cache.activate_past_recording).parameters  # nothing before 5.25
        cache.activate_past_recording(**({"recurrent_states_to_keep": 3} if takes else {}))
        steps = [model(ids(2, 3, seed), use_cache=True, **{CACHE: cache}).logits for seed in (1, 2, 3)]
        return torch.cat(steps, dim=1)

    ordinary, offloaded = make_pair(BF16).both(run)
    assert torch.equal(ordinary, offloaded)


def test_left_padding(make_pair: Make) -> None:
    tokens = ids(3, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, :1] = 0
    pair = make_pair(BF16)
    ordinary, offloaded = pair.both(lambda m: m(tokens, attention_mask=mask).logits)
    assert torch.equal(ordinary, offloaded)
    ordinary, offloaded = pair.both(lambda m: generate(m, inputs=tokens, attention_mask=mask))
    assert torch.equal(ordinary, offloaded)


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str
)
def test_generate(make_pair: Make, how: dict[str, Any]) -> None:
    tokens = ids(2, 9)
    ordinary, offloaded = make_pair(BF16).both(
        lambda m: generate(m, inputs=tokens, attention_mask=torch.ones_like(tokens), **how)
    )
    assert torch.equal(ordinary, offloaded)


def test_inputs_embeds(make_pair: Make) -> None:
    """The ids are found again from the embeddings, and may be given beside them."""
    tokens = ids(2, 10)
    pair = make_pair(BF16)
    expected = pair.both(lambda m: m(tokens).logits)[0]
    for extra in ({}, {"ple_input_ids": tokens}):
        ordinary, offloaded = pair.both(
            lambda m: m(inputs_embeds=m.get_input_embeddings()(tokens), **extra).logits  # noqa: B023
        )
        assert torch.equal(ordinary, offloaded)
        assert torch.equal(expected, offloaded)


def test_fused_table(make_pair: Make, checkpoint: Path, rewrite: Make) -> None:
    with opened(rewrite(checkpoint, fused), dtype=BF16) as model, torch.no_grad():
        assert torch.equal(model(ids(2, 12)).logits, make_pair(BF16).ordinary(ids(2, 12)).logits)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fp8_table(checkpoint: Path, rewrite: Make, dtype: Any) -> None:
    """transformers cannot load it, so its table is set to row.to(dtype) * scale.to(dtype)."""
    scale = torch.tensor([0.0123])

    def quantise(tensors: dict[str, Any]) -> dict[str, Any]:
        for name, tensor in list(tensors.items()):
            if ".shard_" in name:
                tensors[name] = (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                tensors[name.partition(TABLE)[0] + TABLE + "weight_scale"] = scale
        return tensors

    stored: dict[str, Any] = {}
    folder = rewrite(checkpoint, lambda tensors: stored.setdefault("all", quantise(tensors)))
    (table,) = (t for name, t in fused(stored["all"]).items() if name.endswith(TABLE + "weight"))
    ordinary = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    weight = ordinary.model.layers[1].ple.ple_embedding.ngram_embedding.weight
    with opened(folder, dtype=dtype) as model, torch.no_grad():
        assert not torch.equal(model(ids(2, 12)).logits, ordinary(ids(2, 12)).logits)
        weight.copy_(table.to(dtype) * scale.to(dtype))
        assert torch.equal(model(ids(2, 12)).logits, ordinary(ids(2, 12)).logits)


def test_conditional_generation(make_checkpoint: Make, tmp_path: Path) -> None:
    """The text path of the multimodal model, and the text model alone out of its checkpoint."""
    folder = tmp_path / "multimodal"
    text = json.loads((make_checkpoint() / "config.json").read_text())
    config = modeling.Qwen4ExpConfig(
        text_config={key: value for key, value in text.items() if key not in ("architectures", "dtype")},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
        image_token_id=990,
        video_token_id=991,
        vision_start_token_id=992,
        vision_end_token_id=993,
    )
    torch.manual_seed(0)
    model = modeling.Qwen4ExpForConditionalGeneration(config)
    ple = model.model.language_model.layers[1].ple
    torch.nn.init.normal_(ple.ple_embedding.ngram_embedding.weight)
    torch.nn.init.normal_(ple.conv1d.weight, std=0.5)
    model.to(BF16).save_pretrained(folder)

    for name in ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"):
        ordinary = getattr(modeling, name).from_pretrained(folder, dtype=BF16)
        with opened(folder, dtype=BF16, architecture=name) as offloaded, torch.no_grad():
            assert type(offloaded).__name__ == name
            assert torch.equal(ordinary(ids(2, 12)).logits, offloaded(ids(2, 12)).logits)
            assert torch.equal(generate(ordinary, inputs=ids(1, 9)), generate(offloaded, inputs=ids(1, 9)))
    with opened(folder) as offloaded:
        assert type(offloaded).__name__ == "Qwen4ExpForConditionalGeneration"


def test_compiled(checkpoint: Path) -> None:
    """torch.compile goes around the lookup instead of into it."""
    with opened(checkpoint, dtype=BF16) as model, torch.no_grad():
        embedding = model.model.layers[1].ple.ple_embedding
        compiled = torch.compile(lambda tokens: embedding(tokens, None) + 1, backend="eager")
        assert torch.equal(compiled(ids(2, 12)), embedding(ids(2, 12), None) + 1)


# --- the table stays out ---


def test_loader_never_reads_the_table(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' loader asks for a handle of every tensor, but reads none of the table's."""
    read: list[str] = []
    materialize = transformers.core_model_loading._materialize_copy
    names: dict[int, str] = {}
    safe_open = transformers.modeling_utils.safe_open

    class Recorder:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def get_slice(self, name: str) -> Any:
            handle = self.file.get_slice(name)
            names[id(handle)] = name
            kept.append(handle)
            return handle

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

    kept: list[Any] = []

    def record(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(names[id(tensor)])
        return materialize(tensor, *args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", Recorder)
    monkeypatch.setattr(transformers.core_model_loading, "_materialize_copy", record)
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=BF16)
    assert sum(TABLE in name for name in read) == 4  # the recorder sees the shards when they are read
    read.clear()
    model, report = engine.from_pretrained(checkpoint, dtype=BF16, output_loading_info=True)
    model.ple_offload.close()
    assert len(read) > 50
    assert not [name for name in read if TABLE in name]
    assert not any(report.values())  # nothing missing, unexpected, mismatched


MEMORY_PROBE = """
import sys, torch
from ple_offload.engines.transformers import from_pretrained

def kib(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

small, large = sys.argv[1:]
tokens = torch.randint(0, 1000, (1, 16))
from_pretrained(small, tier="file")(tokens)  # imports, compiled code
resident, own = kib("VmRSS"), kib("RssAnon")
model = from_pretrained(large, tier="file")
peak = kib("VmHWM")
model(tokens)
print(model.ple_offload.tables[1].spec.size_bytes >> 10, peak - resident, kib("RssAnon") - own)
"""


def test_memory(checkpoint: Path, make_checkpoint: Make) -> None:
    """With a 200 MiB table (tier "file"), loading has a small peak, and a forward allocates next to nothing.

    The forward maps pages that the system's file cache holds anyway, in units of up to 2 MiB; those are not ours.
    """
    large = make_checkpoint(ngram_vocab_size_base=100_000, ple_embed_dim=1024, max_shard_size="100MB")
    command = [sys.executable, "-c", MEMORY_PROBE, str(checkpoint), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table_kib, load_peak_kib, own_kib = map(int, done.stdout.split())
    assert table_kib > 190 << 10
    assert load_peak_kib < 24 << 10
    assert own_kib < 24 << 10


def test_state_dict(make_pair: Make, checkpoint: Path) -> None:
    pair = make_pair(BF16)
    missing = set(pair.ordinary.state_dict()) - set(pair.offloaded.state_dict())
    assert missing == {f"model.layers.1.ple.ple_embedding.{TABLE}weight"}
    assert set(pair.offloaded.state_dict()) <= set(pair.ordinary.state_dict())
    with opened(checkpoint, dtype=BF16) as model, torch.no_grad():
        expected = model(ids(1, 9)).logits
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        for parameter in model.parameters():
            parameter.zero_()
        saved.seek(0)
        model.load_state_dict(torch.load(saved), strict=True)
        assert torch.equal(model(ids(1, 9)).logits, expected)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_to_dtype(make_pair: Make, checkpoint: Path, dtype: Any) -> None:
    ordinary = copy.deepcopy(make_pair(BF16).ordinary).to(dtype)
    with opened(checkpoint, dtype=BF16) as model, torch.no_grad():
        model.to(dtype)
        assert model(ids(1, 9)).logits.dtype == dtype
        assert torch.equal(model(ids(1, 9)).logits, ordinary(ids(1, 9)).logits)


def test_save_pretrained(checkpoint: Path, tmp_path: Path) -> None:
    """It refuses; asked for the rest only, it writes what no loader takes for a whole checkpoint."""
    with opened(checkpoint, dtype=BF16) as model:
        with pytest.raises(UsageError, match="without_table=True") as caught:
            model.save_pretrained(tmp_path)
        assert str(checkpoint) in str(caught.value)
        assert not list(tmp_path.iterdir())
        model.save_pretrained(tmp_path, without_table=True)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen4ExpForCausalLM"]
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        engine.from_pretrained(tmp_path)


def test_deepcopy_and_pickle(checkpoint: Path) -> None:
    with opened(checkpoint, dtype=BF16) as model, torch.no_grad():
        copied = copy.deepcopy(model)
        assert copied.ple_offload is model.ple_offload
        assert torch.equal(copied(ids(1, 9)).logits, model(ids(1, 9)).logits)
        copied.float()
        assert model(ids(1, 9)).logits.dtype == BF16
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(model)
        with pytest.raises(UsageError, match="cannot be pickled"):
            torch.save(model, io.BytesIO())
    with pytest.raises(StoreError, match="was closed"):
        copied(ids(1, 9))


def test_training(checkpoint: Path) -> None:
    """The rest trains; the table has no gradient, and the first step says so."""
    with opened(checkpoint, dtype=FP32) as model:
        ple = model.model.layers[1].ple
        model.train()
        with pytest.warns(UserWarning, match="training leaves it as it is"):
            model(ids(1, 9), labels=ids(1, 9)).loss.backward()
        assert ple.key_proj.weight.grad.abs().sum() > 0
        assert not list(ple.ple_embedding.parameters())


# --- life of the tables ---


def test_two_models(make_pair: Make, make_checkpoint: Make) -> None:
    """Each has tables of its own, also of the same checkpoint; closing one, twice, leaves the other alone."""
    tokens = ids(1, 9)
    with (
        opened(make_checkpoint(), dtype=BF16) as first,
        opened(make_checkpoint(), dtype=BF16) as second,
        opened(make_checkpoint(ple_layer_ids=[2, 3]), dtype=BF16) as third,
        torch.no_grad(),
    ):
        assert list(first.ple_offload.tables) == [1]
        assert list(third.ple_offload.tables) == [1, 2]
        first.ple_offload.close()
        first.ple_offload.close()
        with pytest.raises(StoreError, match="was closed"):
            first(tokens)
        assert torch.equal(second(tokens).logits, make_pair(BF16).ordinary(tokens).logits)
        expected = make_pair(BF16, ple_layer_ids=[2, 3]).ordinary(tokens).logits
        assert torch.equal(third(tokens).logits, expected)


def test_ordinary_models_beside(checkpoint: Path) -> None:
    """While offloaded models load in other threads, ordinary ones stay ordinary.

    In FP32: transformers itself changes torch's default dtype while it loads, for all threads.
    """
    loaded: list[Any] = []

    def load(load_one: Callable[..., Any]) -> None:
        loaded.extend(load_one(checkpoint, dtype=FP32) for _ in range(3))

    loaders = [engine.from_pretrained, AutoModelForCausalLM.from_pretrained] * 2
    threads = [threading.Thread(target=load, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = [type(model.model.layers[1].ple.ple_embedding) for model in loaded]
    assert kinds.count(engine.TableLookup) == 6
    assert kinds.count(modeling.Qwen4ExpTextNGramEmbedding) == 6
    outputs = set()
    for model in loaded:
        with torch.no_grad():
            outputs.add(model(ids(1, 9)).logits.float().sum().item())
        if hasattr(model, "ple_offload"):
            model.ple_offload.close()
    assert len(outputs) == 1


def test_only_through_from_pretrained(checkpoint: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with pytest.raises(UsageError, match="can only be built by"):
        engine.Qwen4ExpForCausalLM(config)
    unbound = engine.Qwen4ExpForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(StoreError, match="has no table"):
        unbound(ids(1, 9))


# --- refusals ---


@pytest.mark.parametrize(
    "option",
    [
        {"disable_mmap": True},
        {"state_dict": {}},
        {"tp_plan": "auto"},
        {"gguf_file": "x.gguf"},
        {"revision": "main"},
    ],
    ids=str,
)
def test_refused_options(checkpoint: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        engine.from_pretrained(checkpoint, **option)


def test_refused_architectures(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Qwen4ExpModel.*architecture= one of Qwen4ExpForCausalLM"):
        engine.from_pretrained(checkpoint, architecture="Qwen4ExpModel")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="qwen4_exp"):
        engine.from_pretrained(other)


@pytest.mark.parametrize(
    "change", [{"eos_token_id": 8}, {"ngram_vocab_size_base": 3000}, {"ple_layer_ids": [3]}], ids=str
)
def test_config_of_another_table(checkpoint: Path, change: dict[str, Any]) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint, **change)
    with pytest.raises(CheckpointError, match="config="):
        engine.from_pretrained(checkpoint, config=config)


def test_unknown_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling.Qwen4ExpTextNGramEmbedding, "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(UsageError, match=transformers.__version__) as caught:
        engine.from_pretrained(checkpoint)
    assert engine.TESTED_VERSIONS in str(caught.value)


def test_a_path_that_is_not_utf8(checkpoint: Path, tmp_path: Path) -> None:
    link = tmp_path / os.fsdecode(b"mod\xe8le")
    link.symlink_to(checkpoint)
    with pytest.raises(UsageError, match="expected a path in UTF-8"):
        engine.from_pretrained(link)


@pytest.mark.parametrize(
    ("blocked", "said"),
    [
        ("transformers", "transformers is not installed: pip install 'ple-offload\\[transformers\\]'"),
        ("torch", "torch is not installed: pip install"),
        ("transformers.models.qwen4_exp", "has no Qwen4Exp model"),
        ("safetensors", "has no Qwen4Exp model that can be used .*safetensors"),
    ],
)
def test_without_the_engine(blocked: str, said: str) -> None:
    """`ple_offload.engines` can be imported, and the adapter says what to install."""
    code = f"import sys; sys.modules[{blocked!r}] = None; from ple_offload import engines; engines.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(f"UsageError: .*{said}", done.stderr), done.stderr


def test_engines_import_is_cheap() -> None:
    code = "import ple_offload.engines, sys; assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_index_that_transformers_cannot_read_is_named(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(CheckpointError, match="its index of safetensors files has no 'metadata'"):
        engine.from_pretrained(copy)
