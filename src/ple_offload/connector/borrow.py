"""Tables of a worker, mapped here: for a device that reads the rows itself.

The worker passes read-only descriptors, part by part; the rule and the format come with them, and the table's fingerprint
is computed anew from the rows that are mapped. What is mapped stays when the worker goes, whatever way: its end is noticed
on the connection, which stays open for that, and changes no row.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Iterable
from pathlib import Path

from ple_offload import families
from ple_offload.connector.config import ConnectorConfig
from ple_offload.errors import CheckpointError, ConnectionLostError, ProtocolError
from ple_offload.formats.base import STORED_DTYPES, RowFormat, detect
from ple_offload.ipc.channel import Channel
from ple_offload.ipc.messages import PROTOCOL_VERSION, Borrow, Closing, Goodbye, LayerFacts, Lent, Refused
from ple_offload.spec import TableSpec
from ple_offload.stores import LentStore, Part
from ple_offload.stores.base import Segment
from ple_offload.table import Table

MAX_PARTS = 1 << 14
MAX_ROW_DIM = 1 << 20

_borrowed: weakref.WeakSet[Borrowed] = weakref.WeakSet()


class Borrowed:
    """`tables` by decoder layer, open until `close`; reading them needs no worker.

    Raises ConnectionLostError when the worker cannot be reached, ProtocolError when it refuses, or lends what does not fit
    together or to the fingerprint that the config expects; StoreError for memory that could change.
    """

    def __init__(self, address: str, options: ConnectorConfig, layers: Iterable[int]) -> None:
        self._config = options
        self._resources = contextlib.ExitStack()
        self._lost: str | None = None
        self.worker = f"worker at {address}"
        self.tables: dict[int, Table] = {}
        try:
            self._channel = Channel.connect(address, options.limits.connect_s)
            self._resources.callback(self._channel.close)
            _borrowed.add(self)
            for layer in layers:
                self.tables[layer] = self._borrow(layer)
                self._resources.callback(self.tables[layer].close)
        except BaseException:
            self._resources.close()
            raise

    def _borrow(self, layer: int) -> Table:
        expected = self._config.fingerprints.get(layer, "")
        parts: list[Part] = []
        try:
            lent = self._ask(layer, expected, parts)
            while len(parts) < lent.parts:
                another = self._ask(layer, expected, parts)
                if (another.parts, another.facts, another.rule) != (lent.parts, lent.facts, lent.rule):
                    raise ProtocolError(f"{self.worker}: layer {layer}: its table is another one in the middle of it.")
            spec = self._spec(layer, lent, parts)
        except BaseException:
            for part in parts:
                os.close(part.fd)
            raise
        store = LentStore(lent.facts.tier, parts, spec.row_bytes, name=spec.name)
        try:
            table = Table(spec, store, threads=1)
            found, expected = table.fingerprint(), expected or lent.facts.fingerprint
            if found != expected:
                raise ProtocolError(
                    f"{self.worker}: layer {layer}: expected the table with fingerprint {expected}, found {found} in what "
                    "it lends. The engine and the worker were given different checkpoints."
                )
            return table
        except BaseException:
            store.close()
            raise

    def _ask(self, layer: int, expected: str, parts: list[Part]) -> Lent:
        """The next part of a table, appended to `parts`."""
        limit_s = self._config.limits.answer_s
        self._channel.send(Borrow(PROTOCOL_VERSION, self._config.checkpoint, layer, expected, len(parts)))
        received = self._channel.receive(limit_s)
        if received is None:
            raise ConnectionLostError(f"{self.worker}: waited {limit_s:g} s (limit answer_s) for a table.")
        message, descriptors = received
        if isinstance(message, Refused):
            raise ProtocolError(f"{self.worker} refused: {message.reason}")
        if isinstance(message, Closing):
            raise ConnectionLostError(f"{self.worker} stops: {message.reason}")
        if not isinstance(message, Lent):
            for fd in descriptors:
                os.close(fd)
            raise ProtocolError(f"{self.worker}: expected a Lent, found {type(message).__name__}.")
        (fd,) = descriptors
        if not message.segments or not len(parts) < message.parts <= MAX_PARTS:
            os.close(fd)
            raise ProtocolError(
                f"{self.worker}: layer {layer}: expected rows in each of at most {MAX_PARTS} parts, found "
                f"{len(message.segments)} segments in part {len(parts)} of {message.parts}."
            )
        # each part's descriptor has a path of its own, which is only for messages
        path = Path(f"{Path(f'/proc/self/fd/{fd}').readlink()} (part {len(parts)} of {self.worker})")
        parts.append(Part(fd, tuple(Segment(path, *segment) for segment in message.segments)))
        return message

    def _spec(self, layer: int, lent: Lent, parts: list[Part]) -> TableSpec:
        """The table that the worker tells of, or ProtocolError for one that cannot be."""
        facts, where = lent.facts, f"{self.worker}: layer {layer}"
        try:
            family = families.from_numbers(facts.family, lent.rule)
            row_format = _row_format(facts, where)
        except CheckpointError as error:
            raise ProtocolError(f"{where}: the table it lends makes no sense: {error}") from error
        told = (facts.layer, facts.vocab_size, facts.context_len, facts.filler, facts.num_rows, facts.rows_per_token)
        made = (layer, family.vocab_size, family.context_len, family.filler, family.num_rows, family.rows_per_token)
        if told != made or facts.tier not in ("ram", "file"):
            raise ProtocolError(f"{where}: expected the facts {made} of its rule, found {told} in tier {facts.tier!r}.")
        segments = sorted((s for part in parts for s in part.segments), key=lambda s: s.first_row)
        next_row = 0
        for segment in segments:
            if segment.offset < 0 or segment.num_rows < 1 or segment.first_row != next_row:
                raise ProtocolError(f"{where}: expected row {next_row} in the next segment, found {segment}.")
            next_row += segment.num_rows
        if next_row != facts.num_rows:
            raise ProtocolError(f"{where}: expected {facts.num_rows} rows, found {next_row} in what it lends.")
        return TableSpec(family, row_format, layer, facts.num_rows, tuple(segments), constants_stored=False)

    def lost(self) -> str | None:
        """Why the worker is no longer there, or None; cheap, and never waits."""
        if self._lost is None:
            poll = select.poll()
            poll.register(self._channel.fileno(), select.POLLIN | select.POLLRDHUP)
            if poll.poll(0):
                try:
                    message, descriptors = self._channel.receive(0) or (None, ())
                    for fd in descriptors:
                        os.close(fd)
                    reason = (
                        message.reason if isinstance(message, (Closing, Refused)) else "it sent what nobody asked for"
                    )
                    self._lost = f"{self.worker} ends: {reason}"
                except ConnectionLostError as error:
                    self._lost = str(error)
        return self._lost

    def close(self) -> None:
        """Unmap; no device may read the tables any more. Safe to call twice."""
        if self._lost is None:
            self._channel.send(Goodbye())
            self._lost = f"{self.worker}: what it lent was given back"
        self._resources.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._lost = f"{self.worker}: it lent its tables to process {os.getppid()}"
        self._channel.abandon()


def _row_format(facts: LayerFacts, where: str) -> RowFormat:
    stored = {name: dtype for dtype, (name, _) in STORED_DTYPES.items()}
    if not 1 <= facts.row_dim <= MAX_ROW_DIM:
        raise CheckpointError(f"{where}: row_dim: expected 1 to {MAX_ROW_DIM}, found {facts.row_dim}.")
    return detect(stored.get(facts.format, facts.format[:50]), facts.row_dim, facts.scale, where)


def _leave_inherited() -> None:
    for one in list(_borrowed):
        one.leave_to_parent()


os.register_at_fork(after_in_child=_leave_inherited)
