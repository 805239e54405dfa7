"""If the commonest rows were kept in GPU memory: how many lookups of real text would find theirs, and what would be left?

    python benchmarks/gpu/hot_set.py --out DIR [--text FOLDER --tokenizer FILE]     on any machine, without a GPU
    python benchmarks/gpu/hot_set.py --out DIR --lookup gpu-lookup.json             adds what a prefill would then cost

Documents are shuffled and split in two: the set is the commonest rows of the first half, and the second half, which it has
never seen, is scored. A row in the set takes its bytes and 16 more for a hash index at half load. Row numbers are the
released model's. A set chosen from the scored half itself is given as the bound that no choice can pass.

    hit                  share of the scored half's lookups whose row is in the set
    hit_2, hit_3         of the heads that hash two tokens, and three
    distinct             of the rows of 8,192 tokens in a row: the share left if each is read once
    distinct_missed      the share left if each is read once and those in the set not at all
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import ids
import numpy as np
import numpy.typing as npt
from record import Record
from tell import tell
from world import EOS, FULL_ROWS, ROW_DIM, ROWS_PER_TOKEN, VOCAB_SIZE, family

Rows = npt.NDArray[np.int64]
BUDGETS_MIB = (256, 640)
INDEX_BYTES = 16
PREFILL = 8192
TOKENS = 8_000_000
ROUTES = {"direct": "direct tokens", "staged": "staged tokens"}  # and their names in gpu-lookup.json
RESIDENT = "hbm fused"


def main() -> None:
    options = _parse()
    record = Record(options.out / "gpu-hot-set.json")
    what = "python" if options.text is None else options.text.name
    if not record.has("texts", what):
        stream = ids.text_stream(VOCAB_SIZE, options.tokens, EOS, options.tokenizer, options.text)
        first, second = halves(stream.ids)
        tell(record, stream.what, "texts", what, "source")
        tell(record, {"chosen_from": first.size, "scored": second.size}, "texts", what, "tokens")
        score(record, what, rows_of(first), rows_of(second))
    if options.lookup is not None:
        times = wall_times(Record(options.lookup).found["lookup"]["fp8"])
        for name, text in record.found["texts"].items():
            for budget, found in text["sets"].items():
                tell(record, costs(times, found), "texts", name, "sets", budget, "prefill_us")


def halves(tokens: Rows) -> tuple[Rows, Rows]:
    """The ids of two halves of the documents, each of which ends with an EOS."""
    ends = np.flatnonzero(tokens == EOS) + 1
    cut = ends[np.abs(ends - tokens.size // 2).argmin()]
    return tokens[:cut], tokens[cut:]


def rows_of(tokens: Rows) -> Rows:
    """Row numbers [tokens, 16]; the rule forgets what was before an EOS, so documents do not mix."""
    rows = np.empty((tokens.size, ROWS_PER_TOKEN), np.int64)
    bad = family(FULL_ROWS).row_numbers(
        np.ascontiguousarray(tokens), np.array([0, tokens.size]), np.full((1, 2), EOS, np.int64), rows
    )
    assert bad < 0
    return rows


def score(record: Record, what: str, known: Rows, scored: Rows) -> None:
    """Every budget's set, chosen from `known`, on `scored`."""
    tell(record, {"distinct": round(_distinct_share(scored, None), 4)}, "texts", what, "prefill")
    for budget in BUDGETS_MIB:
        size = (budget << 20) // (ROW_DIM + INDEX_BYTES)
        chosen = commonest(known, size)
        hit = contains(chosen, scored)
        half = ROWS_PER_TOKEN // 2
        found = {
            "rows": int(chosen.size),
            "hit": round(float(hit.mean()), 4),
            "hit_2": round(float(hit[:, :half].mean()), 4),
            "hit_3": round(float(hit[:, half:].mean()), 4),
            "hit_if_chosen_from_itself": round(float(contains(commonest(scored, size), scored).mean()), 4),
            "distinct_missed": round(_distinct_share(scored, hit), 4),
        }
        tell(record, found, "texts", what, "sets", f"{budget} MiB")


def commonest(rows: Rows, size: int) -> Rows:
    """The at most `size` row numbers that occur most often in rows [tokens, heads], sorted; heads share no rows."""
    parts = [np.unique(column, return_counts=True) for column in np.ascontiguousarray(rows.T)]
    numbers = np.concatenate([part[0] for part in parts])
    counts = np.concatenate([part[1] for part in parts])
    if numbers.size > size:
        numbers = numbers[np.argpartition(counts, numbers.size - size)[numbers.size - size :]]
    return np.sort(numbers)


def contains(chosen: Rows, rows: Rows) -> npt.NDArray[np.bool_]:
    """For each of rows [tokens, heads] whether it is one of the sorted `chosen`."""
    found = np.empty(rows.shape, bool)
    for head in range(rows.shape[1]):
        place = np.searchsorted(chosen, rows[:, head])
        found[:, head] = chosen[np.minimum(place, chosen.size - 1)] == rows[:, head]
    return found


def _distinct_share(rows: Rows, skip: npt.NDArray[np.bool_] | None) -> float:
    """Mean share of a prefill's rows that differ from one another, those to `skip` left out."""
    shares = []
    for first in range(0, len(rows) - PREFILL + 1, PREFILL):
        part = rows[first : first + PREFILL]
        wanted = part if skip is None else part[~skip[first : first + PREFILL]]
        shares.append(np.unique(wanted).size / part.size)
    return float(np.mean(shares))


def wall_times(found: dict[str, Any]) -> dict[str, Any]:
    """Of random rows, those of both races: tokens -> contender -> its summary."""
    kinds = [found[kind] for kind in ("random, from ids", "random") if kind in found]
    return {
        tokens: {name: one for kind in kinds for name, one in kind.get(tokens, {}).get("wall_us", {}).items()}
        for tokens in ("1", str(PREFILL))
    }


def costs(times: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Microseconds of 8,192 tokens by measured times: a route's part that grows with its rows shrinks to the misses, and
    a look into GPU memory for all of them comes on top.
    """
    one, all_of_them = times["1"], times[str(PREFILL)]
    result = {}
    for route, name in ROUTES.items():
        fixed, whole = one[name]["p50"], all_of_them[name]["p50"]
        resident = all_of_them[RESIDENT]["p50"] - one[RESIDENT]["p50"]
        for kind, share in (("", 1 - found["hit"]), (" distinct", found["distinct_missed"])):
            result[route + kind] = round(fixed + share * (whole - fixed) + resident, 1)
        result[f"{route} without a set"] = whole
    return result


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu-hot-set.json")
    parser.add_argument("--text", type=Path, help="a folder of documents (default: the interpreter's own source)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (see ids.py for the default)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"how many ({TOKENS:,})")
    parser.add_argument("--lookup", type=Path, help="measured lookup times, for the costs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
