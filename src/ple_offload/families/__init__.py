"""Row-number rules, one file per family, and the one question a checkpoint asks of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ple_offload.errors import CheckpointError
from ple_offload.families import qwen_ple
from ple_offload.families.base import Family, FoundTable

__all__ = ["Family", "FoundTable", "find_tables", "from_numbers"]

_FAMILIES = {"qwen4_exp": qwen_ple.find_tables, "qwen4_exp_text": qwen_ple.find_tables}


def from_numbers(name: str, numbers: Mapping[str, int]) -> Family:
    """The rule of a family by its name and `Family.numbers`. CheckpointError for what makes none."""
    if name != qwen_ple.QwenPle.name:
        raise CheckpointError(f"expected family {qwen_ple.QwenPle.name!r}, found {name[:50]!r}.")
    return qwen_ple.QwenPle.from_numbers(numbers)


def find_tables(config: Mapping[str, Any]) -> list[FoundTable]:
    """The tables that a checkpoint's config announces, in layer order.

    `config` is the parsed config.json, of a text model alone or with the text model under "text_config".
    Raises CheckpointError for a model type without a known table, or a config that announces none.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise CheckpointError(
            f"config.json: 'model_type': expected one of {', '.join(sorted(_FAMILIES))}, found {model_type!r}. "
            "This model has no embedding table that ple-offload knows."
        )
    text_config = config.get("text_config", config)
    if not isinstance(text_config, Mapping):
        raise CheckpointError(f"config.json: 'text_config': expected an object, found {type(text_config).__name__}.")
    return _FAMILIES[model_type](text_config)
