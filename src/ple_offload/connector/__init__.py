"""The GPU worker's side: stages a step's inputs, publishes it, waits for its rows inside the forward, releases them."""

from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.connector import PleOffloadConnector

__all__ = ["ConnectorConfig", "PleOffloadConnector"]
