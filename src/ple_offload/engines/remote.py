"""A model's tables in a worker process that may be started, lost and started anew."""

from __future__ import annotations

from typing import Any

from ple_offload.config import worker_kind
from ple_offload.connector.config import Limits
from ple_offload.engines.tables import MAX_NUM_TOKENS, ModelTables
from ple_offload.ipc.messages import LayerFacts
from ple_offload.spec import CheckpointSpec
from ple_offload.worker.spawn import SpawnedWorker


class RemoteTables(ModelTables):
    """The tables of one model, served by a worker. Used from any thread.

    worker: "spawn" starts a process that ends with this one, and takes `spawn_options` (those of `SpawnedWorker`);
        "unix:/path" is a daemon's address.
    route, max_num_tokens, limits: as of `ModelTables`.

    Raises what the worker raises when it cannot start; connecting raises ConnectionLostError when nobody listens,
    ProtocolError when the worker serves other tables.
    """

    process: SpawnedWorker | None = None

    def __init__(
        self,
        spec: CheckpointSpec,
        worker: str,
        *,
        route: str = "auto",
        max_num_tokens: int = MAX_NUM_TOKENS,
        limits: Limits | None = None,
        **spawn_options: Any,
    ) -> None:
        kind = worker_kind(worker)
        # wrong options are told before a process is started for them
        super().__init__(spec, worker, route=route, max_num_tokens=max_num_tokens, limits=limits)
        self._spawn_options = spawn_options
        if kind == "spawn":
            self._start()

    def _start(self) -> None:
        self.process = SpawnedWorker(self._spec.path, **self._spawn_options)
        self.address = self.process.address

    @property
    def facts(self) -> dict[int, LayerFacts]:
        """What the worker says of each decoder layer's table; empty before the first connection."""
        return {facts.layer: facts for connector in self.connectors for facts in connector.facts}

    def _before_reconnect(self) -> None:
        """A spawned worker is started anew."""
        if self.process is not None:
            self.process.close()
            self._start()

    def close(self) -> None:
        """Disconnect, and end a spawned worker; safe to call twice."""
        super().close()
        if self.process is not None:
            self.process.close()
