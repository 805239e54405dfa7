"""What a family is: the rule that turns token ids into row numbers of one table. It knows nothing of bytes or places.

Inputs of one step are ragged, the same three arrays everywhere:

    input_ids        [num_tokens]                 token ids, request after request
    query_start_loc  [num_reqs + 1]               request r owns tokens [query_start_loc[r], query_start_loc[r + 1])
    ngram_context    [num_reqs, context_len]      the tokens before each request's first one, oldest first, `filler` where
                                                  the request has none

A row number is a pure function of a request's own tokens: cutting a request into steps, or batching it with others, must
not change a row. Ids from query_start_loc[num_reqs] on are padding and are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Family(Protocol):
    """The row-number rule of one table. Immutable; every method may be called from any thread."""

    name: str

    @property
    def context_len(self) -> int:
        """How many tokens before the current one the rule reads (0: it does not look back)."""

    @property
    def filler(self) -> int:
        """The id that stands where a request has no earlier token."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 <= id < vocab_size."""

    @property
    def rows_per_token(self) -> int:
        """How many rows one token reads."""

    @property
    def num_rows(self) -> int:
        """Rows of the table, padding included."""

    def numbers(self) -> dict[str, int]:
        """What the rule is made of, for another process: `families.from_numbers` makes the same rule of it."""

    def row_numbers_reference(self, input_ids: Ints, query_start_loc: Ints, ngram_context: Ints) -> Ints:
        """Row numbers [query_start_loc[-1], rows_per_token], int64, in plain NumPy: the specification."""

    def row_numbers(
        self, input_ids: Ints, query_start_loc: Ints, ngram_context: Ints, out: Ints, shares: int = 1
    ) -> int:
        """The same, compiled, into `out` [query_start_loc[-1], rows_per_token] int64, C order.

        All arrays are int64 and C-contiguous, and the caller has checked their shapes and that query_start_loc starts
        at 0, never falls and ends within input_ids. Returns -1, or the position of the first bad id: a position below
        num_tokens in input_ids, else num_tokens + an index into the flattened ngram_context. After a bad id the contents
        of `out` mean nothing. shares: how many threads work; more than one only in a `native.parallel_turn`.
        """


@dataclass(frozen=True)
class FoundTable:
    """A table that a config announces: where its tensors are and what they must look like."""

    layer: int  # zero-based decoder layer that consumes the rows
    family: Family
    row_dim: int  # elements of one row
    module: str  # tensor names end in module + suffix, behind any prefix: "layers.1.ple.ple_embedding."
    table: str  # suffix of the table itself: <module><table>.weight, or <module><table>.shard_<i>.weight
    constants: Mapping[str, npt.NDArray[np.int64]]  # suffix -> the values the checkpoint must hold, if it holds any


def whole_number(
    config: Mapping[str, Any], key: str, default: int | None, minimum: int, maximum: int = 2**31 - 1
) -> int:
    """Read an integer of a config, null as if absent; CheckpointError for what is missing or out of range."""
    from ple_offload.errors import CheckpointError

    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise CheckpointError(
            f"config.json: {key!r}: expected an integer from {minimum} to {maximum}, found {value!r}. "
            "Fix the checkpoint's config."
        )
    return value
