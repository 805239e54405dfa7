"""Adapters for the engines people run: a file each, the only ones that import an engine. This one imports none of them."""

from __future__ import annotations

import importlib
from types import ModuleType

_ADAPTERS = ("transformers",)


def __getattr__(name: str) -> ModuleType:
    """Import an adapter, and with it its engine, when it is first asked for."""
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; adapters: {', '.join(_ADAPTERS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ADAPTERS])
