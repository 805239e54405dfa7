"""A model's tables in a worker process, for adapters whose models ask for rows by token ids in an eager forward.

All PLE layers of a model look up the same ids. So the first layer that asks makes one step of them, or several if they are
many, in which every layer gets its rows; those of the other layers are kept until they ask. Rows belong to ids and context,
not to "this forward": a forward that broke off, a layer called by itself or called twice gets the right rows all the same.

A connector delivers one dtype. When a model has been converted, the next lookup makes a second connector for the new one,
with a session of its own.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import torch

from ple_offload.config import worker_kind
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.connector.config import Limits
from ple_offload.errors import StoreError, UsageError
from ple_offload.ipc.messages import LayerFacts
from ple_offload.layer import PleOffloadLayer
from ple_offload.spec import CheckpointSpec, fingerprint
from ple_offload.worker.spawn import SpawnedWorker

MAX_NUM_TOKENS = 8192  # of one step; longer inputs take several


class RemoteTables:
    """The tables of one model, served by a worker. Used from any thread.

    worker: "spawn" starts a process that ends with this one, and takes `spawn_options` (those of `SpawnedWorker`);
        "unix:/path" is a daemon's address.
    max_num_tokens: of one step. limits: how long things may take.

    Raises what the worker raises when it cannot start; connecting raises ConnectionLostError when nobody listens,
    ProtocolError when the worker serves other tables.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        worker: str,
        *,
        max_num_tokens: int = MAX_NUM_TOKENS,
        limits: Limits | None = None,
        **spawn_options: Any,
    ) -> None:
        self._spec = spec
        self._kind = worker_kind(worker)
        self._spawn_options = spawn_options
        self._lock = threading.Lock()
        self._clients: dict[torch.dtype, _Client] = {}
        self._closed = False
        self.process: SpawnedWorker | None = None
        fingerprints = {table.layer: fingerprint(table) for table in spec.tables}
        self._options: dict[str, Any] = {
            "max_num_tokens": max_num_tokens,
            "max_num_reqs": max_num_tokens,
            "max_concurrent_batches": 1,
            "checkpoint": fingerprints[spec.tables[0].layer],
            "fingerprints": fingerprints,
            "limits": limits or Limits(),
        }
        ConnectorConfig(**self._options)  # wrong options are told before a process is started for them
        if self._kind == "spawn":
            self.process = SpawnedWorker(spec.path, **spawn_options)
        self.address = worker if self.process is None else self.process.address

    @property
    def connectors(self) -> list[PleOffloadConnector]:
        """One for each dtype that was asked for; `metrics` of each counts."""
        return [client.connector for client in self._clients.values()]

    @property
    def facts(self) -> dict[int, LayerFacts]:
        """What the worker says of each decoder layer's table; empty before the first connection."""
        return {facts.layer: facts for connector in self.connectors for facts in connector.facts}

    def connect(self, dtype: torch.dtype) -> None:
        """Connect now instead of at the first lookup of this dtype."""
        with self._lock:
            self._client(dtype)

    def lookup(self, layer: int, ids: torch.Tensor, context: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values (batch, seq, embed_dim) of ids (batch, seq) int64 behind context (batch, context_len) int64, on the CPU.

        Raises StepError when these rows cannot be delivered; ConnectionLostError when the worker is lost, at every call
        until `reconnect`; StoreError once closed.
        """
        with self._lock:
            return self._client(dtype).lookup(layer, ids, context)

    def _client(self, dtype: torch.dtype) -> _Client:
        if self._closed:
            raise StoreError(f"the connection to the tables of {self._spec.path} was closed; load the model again")
        if dtype not in self._clients:
            config = ConnectorConfig(session=f"model-{uuid.uuid4().hex[:12]}", **self._options)
            self._clients[dtype] = _Client(self._spec, self.address, dtype, config)
        return self._clients[dtype]

    def reconnect(self) -> None:
        """After a worker was lost: connect anew; a spawned worker is started anew."""
        with self._lock:
            if self._closed:
                raise UsageError(f"the connection to the tables of {self._spec.path} is closed")
            dtypes = list(self._clients)
            self._disconnect()
            if self.process is not None:
                self.process.close()
                self.process = SpawnedWorker(self._spec.path, **self._spawn_options)
                self.address = self.process.address
            for dtype in dtypes:
                self._client(dtype)

    def _disconnect(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.connector.close()

    def close(self) -> None:
        """Disconnect, and end a spawned worker; safe to call twice."""
        with self._lock:
            self._closed = True
            self._disconnect()
            if self.process is not None:
                self.process.close()

    def __del__(self) -> None:
        # Also at the interpreter's end. The ops' registry knows the connector, which would outlive a model nobody closed.
        with contextlib.suppress(Exception):
            self.close()


class _Client:
    """A connector for one dtype, the sources it stages from, and the rows that wait for their layers."""

    def __init__(self, spec: CheckpointSpec, address: str, dtype: torch.dtype, config: ConnectorConfig) -> None:
        context_len = spec.tables[0].family.context_len
        self._most = config.max_num_tokens
        self._layers = [PleOffloadLayer(table.layer, table.embed_dim, dtype) for table in spec.tables]
        self._ids = torch.zeros(self._most, dtype=torch.int64, device="cpu")
        self._starts = torch.zeros(self._most + 1, dtype=torch.int64, device="cpu")
        self._context = torch.zeros((self._most, context_len), dtype=torch.int64, device="cpu")
        self._asked = (self._ids[:0], self._context[:0])
        self._kept: dict[int, torch.Tensor] = {}
        self.connector = PleOffloadConnector(
            config,
            torch.nn.ModuleList(self._layers),
            "cpu",
            address,
            input_ids_source=self._ids,
            query_start_loc_source=self._starts,
            ngram_context_source=self._context if context_len else None,
        )

    def lookup(self, layer: int, ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        known = torch.equal(ids, self._asked[0]) and torch.equal(context, self._asked[1])
        if not known or layer not in self._kept:
            self._kept = {}
            self._kept = self._rows(ids, context)
            if len(self._layers) > 1:
                self._asked = (ids.clone(), context.clone())  # they may be the caller's buffers
        return self._kept.pop(layer)

    def _rows(self, ids: torch.Tensor, context: torch.Tensor) -> dict[int, torch.Tensor]:
        """Every layer's values, (batch, seq, embed_dim)."""
        batch, seq = ids.shape
        whole = batch * seq <= self._most
        pieces = [(slice(None), slice(None), context)] if whole else _pieces(ids, context, self._most)
        made = [(rows, columns, self._step(ids[rows, columns], before)) for rows, columns, before in pieces]
        if whole:
            made_rows = zip(self._layers, made[0][2], strict=True)
            return {layer.layer: values.view(batch, seq, layer.embed_dim) for layer, values in made_rows}
        result = {}
        for i, layer in enumerate(self._layers):
            out = torch.empty((batch, seq, layer.embed_dim), dtype=layer.dtype, device="cpu")
            for rows, columns, values in made:
                out[rows, columns] = values[i].view(out[rows, columns].shape)
            result[layer.layer] = out
        return result

    def _step(self, ids: torch.Tensor, context: torch.Tensor) -> list[torch.Tensor]:
        """One step of at most `max_num_tokens` tokens: (num_tokens, embed_dim) of each layer."""
        num_reqs, width = ids.shape
        num_tokens = num_reqs * width
        self._ids[:num_tokens] = ids.reshape(-1)
        self._starts[: num_reqs + 1] = torch.arange(num_reqs + 1, device="cpu") * width
        self._context[:num_reqs] = context
        step = self.connector.prepare_forward(num_reqs, num_tokens)
        try:
            hidden = torch.empty((num_tokens, 0), device="cpu")
            rows = [layer(hidden, self._ids[:num_tokens]) for layer in self._layers]
            self.connector.check(step)
        finally:
            self.connector.release_outputs()
        return rows


def _pieces(ids: torch.Tensor, context: torch.Tensor, most: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Cut (batch, seq) ids into rectangles of at most `most` tokens: (rows, columns, the ids before each row's first)."""
    batch, seq = ids.shape
    before = torch.cat([context, ids], dim=1)
    width = min(seq, most)
    height = most // width
    for top in range(0, batch, height):
        rows = slice(top, top + height)
        for left in range(0, seq, width):
            yield rows, slice(left, left + width), before[rows, left : left + context.shape[1]]
