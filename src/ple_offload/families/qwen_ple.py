"""Qwen4Exp n-gram PLE: which rows a token reads.

Fact source: transformers 5.24 `Qwen4ExpTextNGramEmbedding`; vLLM 0.33 and the released checkpoint agree with it.

The rule for the token at position t of a request, with n = ngram_size and h = heads_per_ngram:

1. Context. c[0] is the token itself, c[s] the token s places back. Before the request's start there is EOS, and once one
   token looked back at is EOS, everything older reads EOS too. The current token being EOS cuts nothing.
2. Mix. For every order g = 2..n: mix[g] = XOR over s < g of c[s] * multiplier[s], in int64.
3. Rows. Column (g - 2) * h + k, k < h: mix[g] mod size[column] + offset[column], with the floor modulus.

Multipliers are odd numbers drawn by splitmix64, bounded so that id * multiplier < 2**63. Sizes are consecutive primes
from `ngram_vocab_size_base` on, never shared between heads or layers. Offsets are the running sum of the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numba
import numpy as np

from ple_offload import native
from ple_offload.errors import CheckpointError
from ple_offload.families.base import FoundTable, Ints, whole_number
from ple_offload.native import multiply_high

_MASK = (1 << 64) - 1
# Heads of all layers; each needs a prime of its own. The released model has 16.
MAX_HEADS = 1 << 16
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class QwenPle:
    """The rule of one PLE layer; a `Family`. `layer_index` is the layer's place among the PLE layers, from 0."""

    vocab_size: int
    eos_token_id: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    divisible_by: int
    seed: int
    layer_index: int

    name = "qwen_ple"

    @property
    def context_len(self) -> int:
        return self.ngram_size - 1

    @property
    def filler(self) -> int:
        return self.eos_token_id

    @property
    def rows_per_token(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def num_rows(self) -> int:
        used = int(self.head_sizes.sum())
        return -(-used // self.divisible_by) * self.divisible_by

    @cached_property
    def multipliers(self) -> Ints:
        """[ngram_size] int64, odd; multipliers[0] belongs to the current token."""
        half = max(1, (2**63 - 1) // max(self.vocab_size, 1) // 2)
        base = self.seed + 10007 * self.layer_index
        draws = [_splitmix64(base + _GAMMA * (i + 1)) for i in range(self.ngram_size)]
        return np.array([2 * (draw % half) + 1 for draw in draws], np.int64)

    @cached_property
    def head_sizes(self) -> Ints:
        """[rows_per_token] int64: the primes that follow ngram_vocab_size_base - 1, past those of earlier layers."""
        skipped = self.layer_index * self.rows_per_token
        return _primes_from(self.ngram_vocab_size_base, skipped + self.rows_per_token)[skipped:].copy()

    @cached_property
    def head_offsets(self) -> Ints:
        """[rows_per_token] int64: the first row of each head."""
        return np.concatenate([[0], np.cumsum(self.head_sizes)[:-1]]).astype(np.int64)

    @cached_property
    def _columns(self) -> Ints:
        """[rows_per_token, 3] int64: of each head its size, floor((2^64 - 1) / size), and its first row."""
        inverses = [(2**64 - 1) // size for size in self.head_sizes.tolist()]  # a prime is at least 2: all below 2^63
        return np.stack([self.head_sizes, np.array(inverses, np.int64), self.head_offsets], axis=1)

    def numbers(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, int]) -> QwenPle:
        """The rule that `numbers` tells of; CheckpointError for numbers that make no rule."""
        wanted = {item.name for item in fields(cls)}
        if set(numbers) != wanted:
            raise CheckpointError(
                f"expected the numbers {', '.join(sorted(wanted))}, found {', '.join(sorted(numbers))}."
            )
        config = {**numbers, "make_ngram_vocab_size_divisible_by": numbers["divisible_by"]}
        rule = cls.from_text_config(config, whole_number(numbers, "layer_index", None, 0, MAX_HEADS))
        if (rule.layer_index + 1) * rule.rows_per_token > MAX_HEADS:
            raise CheckpointError(f"expected at most {MAX_HEADS} hash heads in all layers, found more.")
        return rule

    def row_numbers_reference(self, input_ids: Ints, query_start_loc: Ints, ngram_context: Ints) -> Ints:
        n, h = self.ngram_size, self.heads_per_ngram
        out = np.empty((int(query_start_loc[-1]), self.rows_per_token), np.int64)
        for request in range(len(query_start_loc) - 1):
            start, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
            history = np.concatenate([ngram_context[request], input_ids[start:end]])
            for t in range(start, end):
                here = t - start + n - 1  # position of token t in history
                context = [history[here]]
                cut = False
                for s in range(1, n):
                    cut = cut or history[here - s] == self.eos_token_id
                    context.append(self.eos_token_id if cut else history[here - s])
                for order in range(2, n + 1):
                    with np.errstate(over="ignore"):
                        mix = np.bitwise_xor.reduce(np.array(context[:order]) * self.multipliers[:order])
                    columns = slice((order - 2) * h, (order - 1) * h)
                    out[t, columns] = mix % self.head_sizes[columns] + self.head_offsets[columns]
        return out

    def row_numbers(
        self, input_ids: Ints, query_start_loc: Ints, ngram_context: Ints, out: Ints, shares: int = 1
    ) -> int:
        num_tokens = int(query_start_loc[-1])
        fixed = (
            input_ids,
            query_start_loc,
            ngram_context,
            self.vocab_size,
            self.eos_token_id,
            self.heads_per_ngram,
            self.multipliers,
            self._columns,
            out,
        )
        if shares > 1:
            return int(_row_numbers_parallel(*fixed, num_tokens, shares))
        return int(_row_numbers(*fixed, 0, num_tokens))

    @classmethod
    def from_text_config(cls, config: Mapping[str, Any], layer_index: int) -> QwenPle:
        """Read the rule of the `layer_index`-th PLE layer from a text config; defaults are transformers' own."""
        eos = config.get("eos_token_id")
        if isinstance(eos, list) and eos:
            eos = eos[0]  # as transformers does
        vocab_size = whole_number(config, "vocab_size", 248_320, 1)
        if isinstance(eos, bool) or not isinstance(eos, int) or not 0 <= eos < vocab_size:
            raise CheckpointError(
                f"config.json: 'eos_token_id': expected an id from 0 to {vocab_size - 1} (or a list that starts with "
                f"one), found {config.get('eos_token_id')!r}. It separates requests in the hash; fix the config."
            )
        return cls(
            vocab_size=vocab_size,
            eos_token_id=eos,
            ngram_size=whole_number(config, "ngram_size", 3, 2, 64),
            heads_per_ngram=whole_number(config, "heads_per_ngram", 8, 1, 256),
            ngram_vocab_size_base=whole_number(config, "ngram_vocab_size_base", 20_000_000, 1),
            divisible_by=whole_number(config, "make_ngram_vocab_size_divisible_by", 128, 1),
            seed=whole_number(config, "seed", 1234, 0, 2**64 - 1),
            layer_index=layer_index,
        )


def find_tables(text_config: Mapping[str, Any]) -> list[FoundTable]:
    """The PLE tables of a Qwen4Exp text config. `ple_layer_ids` counts from 1, tensors and `layer` from 0."""
    layer_ids = text_config.get("ple_layer_ids") or []
    if not isinstance(layer_ids, list) or not all(type(i) is int and 1 <= i <= 1000 for i in layer_ids):
        raise CheckpointError(
            f"config.json: 'ple_layer_ids': expected a list of layer numbers from 1 to 1000, found {layer_ids!r}."
        )
    if not layer_ids:
        raise CheckpointError(
            "config.json: 'ple_layer_ids' is empty: this Qwen4Exp model has no PLE table, there is nothing to offload."
        )
    tables = []
    for layer_index, layer_id in enumerate(sorted(set(layer_ids))):
        family = QwenPle.from_text_config(text_config, layer_index)
        if (layer_index + 1) * family.rows_per_token > MAX_HEADS:
            raise CheckpointError(
                f"config.json: 'ple_layer_ids', 'ngram_size', 'heads_per_ngram': expected at most {MAX_HEADS} hash heads "
                f"in all layers, found {len(set(layer_ids)) * family.rows_per_token}. Fix the checkpoint's config."
            )
        embed_dim = whole_number(text_config, "ple_embed_dim", text_config.get("hidden_size"), 1)
        if embed_dim % family.rows_per_token:
            raise CheckpointError(
                f"config.json: 'ple_embed_dim': expected a multiple of {family.rows_per_token} "
                f"((ngram_size - 1) * heads_per_ngram), found {embed_dim}."
            )
        constants = {
            "layer_multipliers": family.multipliers,
            "ngram_heads_vocab_sizes": family.head_sizes,
            "ngram_heads_offsets": family.head_offsets,
        }
        tables.append(
            FoundTable(
                layer=layer_id - 1,
                family=family,
                row_dim=embed_dim // family.rows_per_token,
                module=f"layers.{layer_id - 1}.ple.ple_embedding.",
                table="ngram_embedding",
                constants=constants,
            )
        )
    return tables


def _splitmix64(x: int) -> int:
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _primes_from(lowest: int, count: int) -> Ints:
    """The first `count` primes >= lowest, int64."""
    width = 1 << 12
    while True:
        primes = _primes_between(lowest, lowest + width)
        if primes.size >= count:
            return primes[:count]
        width *= 2


@lru_cache(maxsize=64)  # the layers of a model ask for the same range, each for some more of it
def _primes_between(lowest: int, end: int) -> Ints:
    """The primes in [lowest, end), by a sieve."""
    is_prime = np.ones(max(0, end - lowest), bool)
    is_prime[: max(0, 2 - lowest)] = False
    if end > 4:
        for divisor in _primes_between(2, math.isqrt(end - 1) + 1).tolist():
            first = max(divisor * divisor, -(-lowest // divisor) * divisor)
            is_prime[first - lowest :: divisor] = False
    return np.flatnonzero(is_prime).astype(np.int64) + lowest


@native.kernel()
def _modulo(x, size, inverse):  # type: ignore[no-untyped-def]
    """x % size for 0 <= x < 2^63 and inverse = floor((2^64 - 1) / size); a division takes several times as long.

    The quotient by the inverse is at most one too low. No product of a multiplier and a good id wraps, so x is in range.
    """
    rest = x - np.int64(multiply_high(np.uint64(x), np.uint64(inverse))) * size
    return rest - size if rest >= size else rest


@native.kernel()
def _row_numbers(  # type: ignore[no-untyped-def]
    input_ids, query_start_loc, ngram_context, vocab_size, eos, heads, multipliers, columns, out, first, last
):
    """Row numbers of tokens [first, last); -1, or the first bad id among them, as `Family.row_numbers` tells positions.

    Whoever does the first token looks at the context of all requests as well. The others may hash what is not checked, also
    an id of another share: when it is bad the step has failed, and none of its numbers is used.
    """
    n = multipliers.size
    for t in range(first, last):
        if not 0 <= input_ids[t] < vocab_size:
            return t
    if first == 0:
        for r in range(query_start_loc.size - 1):
            for s in range(n - 1):
                if not 0 <= ngram_context[r, s] < vocab_size:
                    return query_start_loc[query_start_loc.size - 1] + r * (n - 1) + s
    r = 0  # the last request that starts at or before the first token
    while r + 1 < query_start_loc.size - 1 and query_start_loc[r + 1] <= first:
        r += 1
    start = query_start_loc[r]
    for t in range(first, last):
        while t >= query_start_loc[r + 1]:
            r += 1
            start = query_start_loc[r]
        mix = input_ids[t] * multipliers[0]
        cut = False
        for s in range(1, n):
            token = eos
            if not cut:
                # s places back; before the request's first token the context goes on, its last column newest
                token = input_ids[t - s] if t - s >= start else ngram_context[r, n - 1 + t - s - start]
                cut = token == eos
            mix ^= token * multipliers[s]
            for column in range((s - 1) * heads, s * heads):
                out[t, column] = _modulo(mix, columns[column, 0], columns[column, 1]) + columns[column, 2]
    return -1


@native.kernel(parallel=True)
def _row_numbers_parallel(  # type: ignore[no-untyped-def]
    input_ids,
    query_start_loc,
    ngram_context,
    vocab_size,
    eos,
    heads,
    multipliers,
    columns,
    out,
    num_tokens,
    shares,
):
    bad = np.full(shares, -1, np.int64)
    share = (num_tokens + shares - 1) // shares
    for s in numba.prange(shares):
        first, last = s * share, min(num_tokens, (s + 1) * share)
        bad[s] = _row_numbers(
            input_ids,
            query_start_loc,
            ngram_context,
            vocab_size,
            eos,
            heads,
            multipliers,
            columns,
            out,
            first,
            last,
        )
    first_bad = -1
    for s in range(shares):
        if bad[s] >= 0 and (first_bad < 0 or bad[s] < first_bad):
            first_bad = bad[s]
    return first_bad
