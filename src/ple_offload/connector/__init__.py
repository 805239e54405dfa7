"""The GPU worker's side: stages a step's inputs, publishes it, waits for its rows inside the forward, releases them.

The connector needs torch; what is below it (config, transports) does not, so importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ple_offload.connector.config import ConnectorConfig

if TYPE_CHECKING:
    from ple_offload.connector.connector import PleOffloadConnector

__all__ = ["ConnectorConfig", "PleOffloadConnector"]


def __getattr__(name: str) -> Any:
    if name != "PleOffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ple_offload.connector.connector import PleOffloadConnector

    return PleOffloadConnector
