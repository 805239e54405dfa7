"""JSON from a file that nobody vouches for.

Python's parser alone is too kind for a checkpoint: it keeps the last of two equal keys (so two readers can
see two different tables), it accepts NaN, and 100 MB of brackets grow to gigabytes of objects. So the text is
sized up before it is parsed, and equal keys are refused.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ple_offload.errors import CheckpointError

# Brackets and commas, about as many as the objects the parser makes of them: half a gigabyte at most. A
# header of safetensors spends eight on a tensor; the largest known files hold far fewer than the 250,000 this
# allows.
MAX_MARKS = 2_000_000


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object from UTF-8 bytes. `where` starts every message: file, and part of it.

    Raises CheckpointError for anything else: other text, equal keys in one object, NaN, too deep, too many
    values.
    """
    marks = raw.count(b"[") + raw.count(b"{") + raw.count(b",")
    if marks > MAX_MARKS:
        raise CheckpointError(
            f"{where}: expected at most {MAX_MARKS:,} JSON values, found about {marks:,}. "
            "No known checkpoint needs that many: the file is damaged or made to harm, download it again."
        )
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: bad UTF-8, bad JSON, endless digits, and our two hooks
        raise CheckpointError(
            f"{where}: expected a JSON object, found text that cannot be read as one ({_short(error)}). "
            "The file is damaged: download it again."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: expected a JSON object, found {type(value).__name__}. The file is damaged: download it again."
        )
    return value


def shown(value: object) -> str:
    """`value` as it is put into a message: quoted, unprintable characters escaped, cut to a readable length.

    Numbers of thousands of digits cannot be printed at all; they are described.
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text):,} characters)"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:200] + "..."
