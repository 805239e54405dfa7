"""What is looked up: pieces of a pool of tokens, each handed out once as long as they last, so that no cache flatters.

A small batch is a decode step: every token belongs to a request of its own, from anywhere in the pool. A large one is a
prefill: the tokens of one request, one after the other. Ids and row numbers of a batch belong together, so contenders
that hash and contenders that do not look up the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from world import EOS, ROWS_PER_TOKEN, VOCAB_SIZE, World

MAX_TOKENS = 8192
MAX_REQS = 256  # up to so many tokens a batch is a decode step
CONTEXT = 2


@dataclass
class Batch:
    """One step's inputs on the GPU: rows [tokens, 16] int64; ids, starts, context int32, as engines have them."""

    rows: torch.Tensor
    ids: torch.Tensor  # [tokens]
    starts: torch.Tensor  # [num_reqs + 1]
    context: torch.Tensor  # [num_reqs, 2]

    @classmethod
    def empty(cls, tokens: int) -> Batch:
        reqs = num_reqs(tokens)
        starts = torch.arange(reqs + 1) if reqs == tokens else torch.tensor([0, tokens])
        return cls(
            torch.empty((tokens, ROWS_PER_TOKEN), dtype=torch.int64, device="cuda"),
            torch.empty(tokens, dtype=torch.int32, device="cuda"),
            starts.to("cuda", torch.int32),
            torch.empty((reqs, CONTEXT), dtype=torch.int32, device="cuda"),
        )

    @property
    def tokens(self) -> int:
        return self.rows.shape[0]

    @property
    def num_reqs(self) -> int:
        return self.context.shape[0]

    def numpy_rows(self) -> npt.NDArray[np.int64]:
        return self.rows.cpu().numpy()


def num_reqs(tokens: int) -> int:
    """One request per token of a decode step, one for a prefill."""
    return tokens if tokens <= MAX_REQS else 1


class Pool:
    """Tokens to look up, twice on the GPU: in their order, and shuffled with each one's context."""

    def __init__(self, what: str, world: World, ids: npt.NDArray[np.int64]) -> None:
        self.what = f"{what}, {ids.size:,} tokens"
        rows = world.rows_of(ids)
        before = np.concatenate([np.full(CONTEXT, EOS), ids])
        context = np.stack([before[i : i + ids.size] for i in range(CONTEXT)], axis=1)
        shuffled = np.random.default_rng(5).permutation(ids.size)
        self._arranged = {
            decode: tuple(
                torch.from_numpy(np.ascontiguousarray(array[order])).to("cuda", kind)
                for array, kind in ((rows, torch.int64), (ids, torch.int32), (context, torch.int32))
            )
            for decode, order in ((True, shuffled), (False, slice(None)))
        }
        self._size, self._at = ids.size, 0

    def fill(self, batch: Batch) -> Batch:
        """The next tokens into a batch, whose tensors stay where they are."""
        if self._at + batch.tokens > self._size:
            self._at = 0
        first, last = self._at, self._at + batch.tokens
        self._at = last
        rows, ids, context = self._arranged[batch.num_reqs == batch.tokens]
        batch.rows.copy_(rows[first:last])
        batch.ids.copy_(ids[first:last])
        batch.context.copy_(context[first : first + batch.num_reqs])
        return batch


def random_pool(world: World, tokens: int) -> Pool:
    return Pool("uniformly random ids", world, np.random.default_rng(7).integers(0, VOCAB_SIZE, tokens))


def text_pool(world: World, path: Path, tokens: int) -> Pool:
    """Ids of real text from a .npy file, any integer type, one document after the other."""
    ids = np.load(path)[:tokens].astype(np.int64)
    return Pool(f"text ({path.name})", world, np.where((ids >= 0) & (ids < VOCAB_SIZE), ids, EOS))
