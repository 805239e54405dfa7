"""Which connector serves which layer: an op of a compiled graph knows its layer only by a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ple_offload.errors import UsageError

if TYPE_CHECKING:
    from ple_offload.connector.connector import PleOffloadConnector

_served: dict[int, tuple[PleOffloadConnector, int]] = {}


def add(number: int, connector: PleOffloadConnector, index: int) -> None:
    """Serve layer `number` of this process as the `index`-th layer of a connector."""
    if number in _served:
        raise UsageError(
            f"layer number {number}: expected a layer that no connector serves, found a served one. Close that first."
        )
    _served[number] = (connector, index)


def remove(number: int, connector: PleOffloadConnector) -> None:
    if _served.get(number, (None, 0))[0] is connector:
        del _served[number]


def find(number: int) -> tuple[PleOffloadConnector, int]:
    """(connector, index) of a layer; UsageError when nobody serves it."""
    if number not in _served:
        raise UsageError(f"layer number {number}: no connector serves this layer (never made, or closed).")
    return _served[number]
