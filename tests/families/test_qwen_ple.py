"""Row numbers of Qwen4Exp PLE: golden vectors, transformers' own class, and every way of cutting a sequence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_offload import native
from ple_offload.errors import CheckpointError
from ple_offload.families import find_tables
from ple_offload.families.qwen_ple import QwenPle, _modulo

VECTORS = json.loads((Path(__file__).parents[1] / "data/vectors.json").read_text())
CASES = [case for case in VECTORS["cases"] if case["family"] == "qwen4_exp_ple"]
EOS = 7
SMALL: dict[str, Any] = {"vocab_size": 50, "eos_token_id": EOS, "ngram_vocab_size_base": 100, "ngram_size": 3}


def family(layer_index: int = 0, **config: Any) -> QwenPle:
    return QwenPle.from_text_config({**SMALL, **config}, layer_index)


def compiled(rule: QwenPle, ids: Any, starts: Any, context: Any) -> np.ndarray:
    ids, starts = np.asarray(ids, np.int64), np.asarray(starts, np.int64)
    context = np.asarray(context, np.int64).reshape(starts.size - 1, rule.context_len)
    out = np.full((int(starts[-1]), rule.rows_per_token), -1, np.int64)
    assert rule.row_numbers(ids, starts, context, out) == -1
    assert np.array_equal(out, rule.row_numbers_reference(ids, starts, context))
    return out


def whole(rule: QwenPle, tokens: list[int]) -> np.ndarray:
    return compiled(rule, tokens, [0, len(tokens)], [rule.filler] * rule.context_len)


@settings(max_examples=500, deadline=None)  # it may have to compile
@given(
    size=st.one_of(st.integers(2, 100), st.integers(2, 2**62), st.sampled_from([2**31 - 1, 2**61 - 1, 20_000_003])),
    multiple=st.integers(0, 2**63),
    near=st.integers(-2, 2),
)
def test_the_modulus_without_a_division(size: int, multiple: int, near: int) -> None:
    """Around multiples of the size, where a quotient that is one off shows."""
    for x in (multiple, multiple // size * size + near, 2**63 - 1 + near):
        if 0 <= x < 2**63:
            found = _modulo(np.int64(x), np.int64(size), np.int64((2**64 - 1) // size))
            assert found == x % size


def test_no_product_of_a_multiplier_and_an_id_wraps() -> None:
    for vocab_size in (1, 2, 50, 248_320, 2**31 - 1):
        rule = family(vocab_size=vocab_size, eos_token_id=0, seed=2**64 - 1)
        assert max(rule.multipliers.tolist()) * (vocab_size - 1) < 2**63


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    config = dict(case["config"])
    rule = QwenPle.from_text_config(config, config.pop("ple_layer_index"))
    assert rule.multipliers.tolist() == case["derived"]["layer_multipliers"]
    assert rule.head_sizes.tolist() == case["derived"]["head_vocab_sizes"]
    assert rule.head_offsets.tolist() == case["derived"]["head_offsets"]
    assert rule.num_rows == case["derived"]["padded_rows"]
    for sequence in case["sequences"]:
        assert whole(rule, sequence["tokens"]).tolist() == sequence["rows"]


def test_the_four_golden_cases_are_there() -> None:
    assert len(CASES) == 4
    assert all(case["sequences"] for case in CASES)


tokens = st.lists(st.one_of(st.just(EOS), st.integers(0, 49)), min_size=1, max_size=24)
rules = st.builds(
    lambda n, h, layer: family(layer, ngram_size=n, heads_per_ngram=h),
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(0, 2),
)


@settings(deadline=None, max_examples=150)
@given(rule=rules, sequences=st.lists(tokens, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_cutting_and_batching_never_changes_a_row(rule: QwenPle, sequences: list[list[int]], seed: int) -> None:
    """Several sequences, each cut anywhere, run in steps of any mix: every row equals the uncut sequence's."""
    rng = np.random.default_rng(seed)
    expected = [whole(rule, sequence) for sequence in sequences]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        ids, starts, context, places = [], [0], [], []
        for i, sequence in enumerate(sequences):
            count = int(rng.integers(0, len(sequence) - done[i], endpoint=True))
            history = [rule.filler] * rule.context_len + sequence[: done[i]]
            context.append(history[len(history) - rule.context_len :])
            ids += sequence[done[i] : done[i] + count]
            places.append((i, done[i], count))
            starts.append(len(ids))
            done[i] += count
        rows = compiled(rule, [*ids, -1, -1], starts, context)  # two padded lanes, which nobody may look at
        for (i, first, count), start in zip(places, starts, strict=False):
            assert np.array_equal(rows[start : start + count], expected[i][first : first + count])


@settings(deadline=None, max_examples=80)
@given(
    n=st.integers(2, 4),
    h=st.integers(1, 3),
    layer=st.integers(0, 1),
    as_list=st.booleans(),
    batch=st.lists(tokens, min_size=1, max_size=3),
)
def test_equals_transformers(n: int, h: int, layer: int, as_list: bool, batch: list[list[int]]) -> None:
    """A left-padded batch through transformers' class gives the rows of the unpadded sequences."""
    torch = pytest.importorskip("torch", reason="the class of the comparison needs torch")
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    heads = (n - 1) * h
    options = {**SMALL, "ngram_size": n, "heads_per_ngram": h, "ple_embed_dim": 2 * heads, "ple_layer_ids": [2, 3]}
    options["eos_token_id"] = [EOS, 3] if as_list else EOS
    theirs = Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**options), 2 * heads, 1 + layer, layer)
    seen = []
    theirs.ngram_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    width = max(map(len, batch))
    padded = torch.tensor([[EOS] * (width - len(s)) + s for s in batch])  # the model masks padding to EOS
    theirs(padded, None)

    rule = QwenPle.from_text_config(options, layer)
    assert rule.num_rows == theirs.ngram_embedding.num_embeddings
    for rows, sequence in zip(seen[0].numpy(), batch, strict=True):
        assert np.array_equal(whole(rule, sequence), rows[width - len(sequence) :])


@pytest.mark.parametrize("bad", [-1, 50, 2**40, -(2**40)])
def test_a_bad_id_is_reported_by_its_place(bad: int) -> None:
    rule = family()
    starts = np.array([0, 2, 3])
    context = np.full((2, 2), EOS)
    out = np.zeros((3, rule.rows_per_token), np.int64)
    assert rule.row_numbers(np.array([1, bad, 2]), starts, context, out) == 1
    context[1, 0] = bad
    assert rule.row_numbers(np.array([1, 2, 2]), starts, context, out) == 3 + 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": 50}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"ngram_size": 1}, "ngram_size"),
        ({"ngram_size": True}, "ngram_size"),
        ({"heads_per_ngram": 2.0}, "heads_per_ngram"),
        ({"ple_layer_ids": []}, "no PLE table"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_embed_dim": 33}, "ple_embed_dim"),
        ({"model_type": "llama"}, "model_type"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change: dict[str, Any], word: str) -> None:
    good = {**SMALL, "model_type": "qwen4_exp_text", "ple_layer_ids": [2], "ple_embed_dim": 32}
    assert [table.layer for table in find_tables(good)] == [1]
    with pytest.raises(CheckpointError, match=word):
        find_tables({**good, **change})


def test_layers_are_sorted_and_counted_once() -> None:
    config = {**SMALL, "model_type": "qwen4_exp", "ple_layer_ids": [4, 2, 4], "ple_embed_dim": 32}
    tables = find_tables({"model_type": "qwen4_exp", "text_config": config})
    assert [table.layer for table in tables] == [1, 3]
    assert set(tables[0].family.head_sizes).isdisjoint(tables[1].family.head_sizes)


@given(lowest=st.sampled_from([1, 2, 3, 4, 9, 25, 4095, 20_000_000, 2**31 - 1]), count=st.integers(1, 400))
def test_head_sizes_are_the_next_primes(lowest: int, count: int) -> None:
    rule = QwenPle(1000, 7, 2, count, lowest, 128, 1234, 0)
    candidate = max(2, lowest)
    for size in rule.head_sizes[:20].tolist():
        while any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
            candidate += 1
        assert size == candidate
        candidate += 1
    assert len(set(rule.head_sizes.tolist())) == count
    assert rule.head_sizes.dtype == np.int64


@pytest.mark.timeout(20)
def test_many_layers_do_not_search_primes_for_ever() -> None:
    """By trial division these took hours."""
    config = {
        **SMALL,
        "model_type": "qwen4_exp_text",
        "ngram_vocab_size_base": 2**31 - 1,
        "heads_per_ngram": 32,
        "ple_embed_dim": 64,
    }
    assert len(find_tables({**config, "ple_layer_ids": list(range(1, 1001))})) == 1000
    config |= {"ngram_size": 64, "heads_per_ngram": 256, "ple_embed_dim": 63 * 256}
    with pytest.raises(CheckpointError, match="expected at most 65536 hash heads in all layers, found 16128000"):
        find_tables({**config, "ple_layer_ids": list(range(1, 1001))})


@pytest.mark.parametrize("shares", [2, 3, 7])
def test_many_threads_find_the_same_rows_and_the_same_bad_id(shares: int) -> None:
    """Also where a context is bad and a token of another thread's share: tokens come first."""
    rule = QwenPle.from_text_config({"vocab_size": 1000, "eos_token_id": 7, "ngram_vocab_size_base": 100}, 0)
    rng = np.random.default_rng(shares)
    starts = np.array([0, 0, 5, 5, 23, 40, 40])
    ids, context = rng.integers(0, 1000, 40), rng.integers(0, 1000, (6, 2))
    out = np.zeros((40, 16), np.int64)
    with native.parallel_turn(shares) as mine:
        assert mine == shares
        assert rule.row_numbers(ids, starts, context, out, shares) == -1
        assert np.array_equal(out, rule.row_numbers_reference(ids, starts, context))
        context[4, 1] = 1000
        assert rule.row_numbers(ids, starts, context, out, shares) == 40 + 4 * 2 + 1
        assert rule.row_numbers(ids, starts, context, out) == 40 + 4 * 2 + 1
        ids[[37, 39]] = -1
        assert rule.row_numbers(ids, starts, context, out, shares) == 37
        assert rule.row_numbers(ids, starts, context, out) == 37
