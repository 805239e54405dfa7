"""A model's tables, for adapters whose models ask for rows by token ids in an eager forward.

Ids on the CPU: tables open in this process are looked up in the call; a worker is asked through a connector. Ids on a GPU:
a connector puts the rows there by one of its routes; or, route "host", they are looked up as for a CPU and copied.

All PLE layers of a model look up the same ids. So the first layer that asks makes one step of them, or several if they are
many, in which every layer gets its rows; those of the other layers are kept until they ask. Rows belong to ids and context,
not to "this forward": a forward that broke off, a layer called by itself or called twice gets the right rows all the same.

A connector delivers one dtype on one device. When a model has been converted or moved, the next lookup makes a second
connector for the new place, with a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ple_offload import native
from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.connector.config import Limits
from ple_offload.errors import CudaError, StoreError, UsageError
from ple_offload.layer import PleOffloadLayer
from ple_offload.spec import CheckpointSpec, fingerprint
from ple_offload.table import Table

log = logging.getLogger(__name__)

MAX_NUM_TOKENS = 8192  # of one step; longer inputs take several
_CPU = torch.device("cpu")


def check_route(route: str) -> None:
    """Raise UsageError for a route that there is not, or that needs a GPU where torch sees none."""
    ConnectorConfig(1, 1, route=route)
    if _needs_gpu(route) and not torch.cuda.is_available():
        raise UsageError(f"route {route!r}: expected a GPU, but torch sees none here. Use route 'auto' or 'host'.")


def _needs_gpu(route: str) -> bool:
    return route not in ("auto", "host")


class ModelTables:
    """The tables of one model, open in this process or served by a worker. Used from any thread.

    address: a worker's, or "inline" with the open `tables`, by decoder layer; the caller closes them after this.
    route: how rows reach ids on a GPU: "host", or one of `ConnectorConfig.route`. "auto" takes "host" where no other route
        works, and logs once why.
    skip_memory_check: as in `ConnectorConfig`.
    max_num_tokens: of one step. limits: how long things may take.

    Raises UsageError for an option that cannot be meant.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        address: str,
        *,
        tables: Mapping[int, Table] | None = None,
        route: str = "auto",
        skip_memory_check: bool | None = None,
        max_num_tokens: int = MAX_NUM_TOKENS,
        limits: Limits | None = None,
    ) -> None:
        self.address = address
        self._spec = spec
        self._tables = tables
        self._route = route
        # Held for a whole lookup. Reentrant, so that a signal handler which closes in the middle of one is told, not stuck.
        self._lock = threading.RLock()
        self._pid = native.pid
        self._clients: dict[tuple[torch.dtype, torch.device], _Client | None] = {}  # None: route "host"
        self._told = False
        self._closed = False
        # a worker is told which tables are meant; those that are open here are known
        fingerprints = {table.layer: fingerprint(table) for table in spec.tables if tables is None}
        self._options: dict[str, Any] = {
            "max_num_tokens": max_num_tokens,
            "max_num_reqs": max_num_tokens,
            "max_concurrent_batches": 1,
            "checkpoint": fingerprints.get(spec.tables[0].layer, ""),
            "fingerprints": fingerprints,
            "limits": limits or Limits(),
            "skip_memory_check": skip_memory_check,
        }
        check_route(route)
        ConnectorConfig(**self._options)  # wrong options are told at once

    @property
    def connectors(self) -> list[PleOffloadConnector]:
        """One for each dtype and device that a worker or a GPU takes part for; `metrics` of each counts."""
        return [client.connector for client in list(self._clients.values()) if client is not None]

    def connect(self, dtype: torch.dtype, device: torch.device) -> None:
        """Do now what the first lookup of this dtype on this device would do."""
        if _needs_gpu(self._route) and device.type != "cuda":
            device = torch.device("cuda")  # the model is yet to be moved there
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with self._turn():
            on_gpu = device.type == "cuda" and self._client(dtype, device) is not None
            if not on_gpu and self._tables is None:
                self._client(dtype, _CPU)

    def lookup(self, layer: int, ids: torch.Tensor, context: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values (batch, seq, embed_dim) of ids (batch, seq) int64 behind context (batch, context_len) int64.

        All are on one device. On a GPU, the rows are there when this returns.

        Raises StepError (TokenIdError for tables of this process on the CPU) when these rows cannot be delivered;
        ConnectionLostError when the worker is lost, at every call until `reconnect`; StoreError once closed.
        """
        if ids.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    "a CUDA graph is being captured, but the host takes part in this lookup. Capture what is behind it, or "
                    "build the model of PleOffloadLayers with a PleOffloadConnector."
                )
            with self._turn():
                client = self._client(dtype, ids.device)
                if client is not None:
                    return client.lookup(layer, ids, context)
        elif _needs_gpu(self._route):
            raise UsageError(
                f"route {self._route!r}: expected ids on a GPU, found them on {ids.device}. Move the model to a GPU, or "
                "load it with route 'auto'."
            )
        return self._on_host(layer, ids.cpu(), context.cpu(), dtype).to(ids.device)

    def _on_host(self, layer: int, ids: torch.Tensor, context: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._tables is None:
            with self._turn():
                client = self._client(dtype, _CPU)
                assert client is not None  # only a GPU has other ways
                return client.lookup(layer, ids, context)
        batch, seq = ids.shape
        starts = torch.arange(batch + 1, device="cpu") * seq
        values: torch.Tensor = self._tables[layer].lookup(ids.reshape(-1), starts, context, dtype=dtype)
        return values.view(batch, seq, values.shape[-1])

    def _client(self, dtype: torch.dtype, device: torch.device) -> _Client | None:
        """The client for this place, made when it is first asked for; None where route "host" is taken."""
        if self._closed:
            raise StoreError(f"the connection to the tables of {self._spec.path} was closed; load the model again")
        if (dtype, device) not in self._clients:
            self._clients[dtype, device] = self._make(dtype, device)
        return self._clients[dtype, device]

    def _make(self, dtype: torch.dtype, device: torch.device) -> _Client | None:
        if device.type == "cpu":
            return self._connected(dtype, device, "host")
        if self._route == "host":
            return None
        try:
            return self._connected(dtype, device, self._route)
        except (UsageError, CudaError) as error:
            if self._route != "auto":
                raise
            if not self._told:
                log.warning("rows for %s are looked up on the CPU and copied (route 'host'): %s", device, error)
            self._told = True
            return None

    def _connected(self, dtype: torch.dtype, device: torch.device, route: str) -> _Client:
        config = ConnectorConfig(session=f"model-{uuid.uuid4().hex[:12]}", route=route, **self._options)
        # buffers outlive the caller's inference mode and its default device
        with torch.inference_mode(False), _CPU:
            return _Client(self._spec, self.address, dtype, device, config, self._tables)

    def reconnect(self) -> None:
        """Give every connection up and connect anew, after a worker was lost."""
        with self._turn():
            if self._closed:
                raise UsageError(f"the connection to the tables of {self._spec.path} is closed")
            places = list(self._clients)
            self._disconnect()
            self._before_reconnect()
            for place in places:
                self._client(*place)

    def _before_reconnect(self) -> None:
        """Nobody is connected; where a subclass has started the worker, it starts another."""

    def _disconnect(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            if client is not None:
                client.connector.close()

    def close(self) -> None:
        """Disconnect; safe to call twice. Raises UsageError in a signal handler that interrupted a lookup."""
        if native.pid != self._pid:  # in a forked child: the lock may be that of a thread which is not here
            self._closed = True
            self._disconnect()
            return
        with self._turn():
            self._closed = True
            self._disconnect()

    def _turn(self) -> AbstractContextManager[Any]:
        """For one thread at a time. ForkError in a forked child, UsageError in a signal handler that interrupted a turn."""
        native.check_not_forked(self._pid, f"the tables of {self._spec.path}")
        if self._lock._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks it
            raise UsageError(
                f"the tables of {self._spec.path}: used in the middle of a lookup of the same thread, by a signal handler? "
                "Let the handler raise an exception instead, as SystemExit, and close behind it."
            )
        return self._lock  # itself: an interrupt finds no line between taking it and giving it back

    def __del__(self) -> None:
        # Also at the interpreter's end. The ops' registry knows the connectors, which would outlive a model nobody closed.
        with contextlib.suppress(Exception):
            self.close()


class _Client:
    """A connector for one dtype on one device, the sources it stages from, and the rows that wait for their layers.

    On a GPU a lookup ends with waiting for the stream: rows that did not come are NaN, and the error must be raised before
    anybody builds on them. Everything is done in the order of one stream; another one has to wait for all that went before.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        address: str,
        dtype: torch.dtype,
        device: torch.device,
        config: ConnectorConfig,
        tables: Mapping[int, Table] | None,
    ) -> None:
        context_len = spec.tables[0].family.context_len
        self._device = device
        self._tables = list((tables or {}).values())
        self._most = config.max_num_tokens
        self._layers = [PleOffloadLayer(table.layer, table.embed_dim, dtype) for table in spec.tables]
        self._ids = torch.zeros(self._most, dtype=torch.int64, device=device)
        self._starts = torch.zeros(self._most + 1, dtype=torch.int64, device=device)
        self._context = torch.zeros((self._most, context_len), dtype=torch.int64, device=device)
        self._asked = (self._ids[:0], self._context[:0])
        self._kept: dict[int, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last lookup
        self.connector = PleOffloadConnector(
            config,
            torch.nn.ModuleList(self._layers),
            device,
            address,
            input_ids_source=self._ids,
            query_start_loc_source=self._starts,
            ngram_context_source=self._context if context_len else None,
            tables=tables,
        )

    def lookup(self, layer: int, ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        with self._current():
            self._follow_stream()
            # a model of one layer compares nothing: that would make the host wait for a GPU
            if layer not in self._kept or not self._asked_for(ids, context):
                self._kept = {}
                self._kept = self._rows(ids, context)
                if len(self._layers) > 1:
                    self._asked = (ids.clone(), context.clone())  # they may be the caller's buffers
            return self._kept.pop(layer)

    def _current(self) -> AbstractContextManager[Any]:
        """The device as the current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _follow_stream(self) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is None or stream != self._stream:
            torch.cuda.synchronize(self._device)
            self._stream, self._kept = stream, {}

    def _asked_for(self, ids: torch.Tensor, context: torch.Tensor) -> bool:
        return torch.equal(ids, self._asked[0]) and torch.equal(context, self._asked[1])

    def _rows(self, ids: torch.Tensor, context: torch.Tensor) -> dict[int, torch.Tensor]:
        """Every layer's values, (batch, seq, embed_dim)."""
        batch, seq = ids.shape
        if 0 < batch * seq <= self._most:
            rows = zip(self._layers, self._step(ids, context), strict=True)
            return {layer.layer: values.view(batch, seq, layer.embed_dim) for layer, values in rows}
        result = {
            layer.layer: torch.empty((batch, seq, layer.embed_dim), dtype=layer.dtype, device=self._device)
            for layer in self._layers
        }
        for rows_of, columns, before in _pieces(ids, context, self._most) if ids.numel() else ():
            piece = ids[rows_of, columns]
            for layer, values in zip(self._layers, self._step(piece, before), strict=True):
                result[layer.layer][rows_of, columns] = values.view(*piece.shape, layer.embed_dim)
        return result

    def _step(self, ids: torch.Tensor, context: torch.Tensor) -> list[torch.Tensor]:
        """One step of at most `max_num_tokens` tokens: (num_tokens, embed_dim) of each layer."""
        num_reqs, width = ids.shape
        num_tokens = num_reqs * width
        for table in self._tables:
            table.check()
        tokens, starts, before = self._ids[:num_tokens], self._starts[: num_reqs + 1], self._context[:num_reqs]
        tokens.copy_(ids.reshape(-1))
        starts.copy_(torch.arange(num_reqs + 1, device=self._device) * width)
        before.copy_(context)
        self.connector.release_outputs()  # of a step that an interrupt, as of Ctrl-C, left in flight
        try:
            step = self.connector.prepare_forward(num_reqs, num_tokens)
            hidden = torch.empty((num_tokens, 0), device=self._device)
            rows = [layer(hidden, tokens, starts, before) for layer in self._layers]
            if self._stream is not None:
                self._stream.synchronize()  # ends: every wait on the device has a limit
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
