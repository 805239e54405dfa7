"""The worker's one loop: connections, doorbells, lookups.

One thread does everything in turn, so a step is never served twice, nothing needs a lock, and a lookup is interrupted by
nobody. Between two steps it looks at its descriptors, so that no rank starves another. It sleeps in epoll when nothing is
announced, waking four times a second for its heartbeat.

The life of a connection: accepted -> peer's uid checked -> Hello within HELLO_LIMIT_S -> region mapped -> Welcome -> Ready
when the session is complete -> steps -> end. Whatever a peer does wrong ends its own connection, with a Refused that says
why, and nobody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ple_offload import native
from ple_offload.config import usable_cpus
from ple_offload.cuda import HANDLE_BYTES
from ple_offload.errors import ConnectionLostError, PleOffloadError, ProtocolError, TokenIdError, UsageError
from ple_offload.formats import VALUE_DTYPES
from ple_offload.formats.gather import FLAGS, OUT, Readers
from ple_offload.ipc import words
from ple_offload.ipc.channel import Channel, peer_uid
from ple_offload.ipc.messages import (
    PROTOCOL_VERSION,
    Ask,
    Borrow,
    Closing,
    Facts,
    Goodbye,
    Hello,
    LayerWish,
    RankLost,
    Refused,
    StepFailed,
    Welcome,
    plain,
)
from ple_offload.ipc.region import BLOCK_ROWS, DEVICE_BLOCK_ROWS, MAX_REGION_BYTES, PAGE, Layout
from ple_offload.memory import memfd, sigbus
from ple_offload.memory.mapping import Mapping
from ple_offload.metrics import Sample, samples
from ple_offload.profiling import span
from ple_offload.table import Table
from ple_offload.worker.device import Devices
from ple_offload.worker.lending import lend
from ple_offload.worker.listener import Listener
from ple_offload.worker.rank import Nobody, Rank
from ple_offload.worker.session import DOZE_UNTIL_S, SPIN_S, Lane, Session, Turns

log = logging.getLogger(__name__)

ASK_LIMIT_S = 5.0  # from the connection to its first message
HELLO_LIMIT_S = 60.0  # from the Facts to the Hello: the client allocates its region meanwhile
MAX_STRANGERS = 256  # connections without a Hello; the oldest makes room for one more
KEPT_SESSIONS = 64  # sessions that have ended, for their counters
LOG_LINES = 100  # about clients, in LOG_LINES_S
LOG_LINES_S = 10.0
HEARTBEAT_S = 0.25  # well below the shortest limit a client may reasonably have for a silent worker
OVERFLOW_UID = 65534  # how a peer of another user namespace reads
OUTPUTS = ("stored", "bf16", "fp16", "fp32")
DUPLICATES_EVERY_S = 0.1
DUPLICATES_MAX_ROWS = 1 << 16
REHEARSE_EVERY_S = 0.0002


@dataclass(frozen=True)
class Served:
    """One checkpoint of a worker: its open tables by decoder layer."""

    path: Path
    tables: dict[int, Table]

    def __post_init__(self) -> None:
        if not self.tables:
            raise UsageError(f"{self.path}: no table to serve.")


@dataclass
class _Stranger:
    """A connection without a Hello."""

    channel: Channel
    until_s: float  # it ends then
    asked: bool = False


class PleOffloadWorker:
    """Serves the tables of one or more checkpoints to every client that may connect.

    allow_uids: who may connect beside this process's user and root; None: anybody the socket file lets in.
    log_path: where clients are told to look when the worker dies.
    """

    def __init__(
        self, served: list[Served], *, allow_uids: frozenset[int] | None = frozenset(), log_path: str = ""
    ) -> None:
        self._served = served
        for table in (table for checkpoint in served for table in checkpoint.tables.values()):
            for output in OUTPUTS:  # now: compiling takes a second or two, in which nobody would be served
                table.prepare(output)
            table.fingerprint()  # now: kept, should the table's files fail later
        self._allow_uids = allow_uids
        self._log_path = log_path
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self._borrowers: dict[int, Channel] = {}  # by descriptor; who reads rows without us
        self._sessions: dict[str, Session] = {}
        self._turns = Turns()
        self._cpus = usable_cpus()
        self._devices = Devices()
        self._listeners: list[Listener] = []
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # see `_accept`
        self._logged, self._log_until_s = 0, 0.0
        self._stopping: str | None = None
        self._next_sample_s = 0.0
        self._next_collect_s = 0.0
        self._next_rehearsal_s = 0.0
        self._nobody = Nobody()
        # the heartbeat: one word, which only this process can write
        fd = memfd.create("ple-offload heartbeat", PAGE)
        self._heartbeat_map = Mapping(fd, PAGE, writable=True, what="heartbeat")
        self._heartbeat = self._heartbeat_map.view().view(np.uint64)
        self._shared = np.array([self._heartbeat_map.address, sigbus.count_address(), 0], np.uint64)
        self._heartbeat_fd = memfd.seal_against_new_writers(fd, "heartbeat")

    # ---- listening and running ------------------------------------------------------------------------------------

    def listen(self, address: str, *, group: int | None = None) -> None:
        """Accept clients at `unix:/path` or `unix:@name`; `group` opens the socket file to a group id.

        Raises UsageError when another worker serves this address, or the path cannot be used.
        """
        listener = Listener(address, group, others=bool(self._allow_uids))
        self._listeners.append(listener)
        self._watch(listener.sock.fileno(), lambda: self._accept(listener.sock))

    def watch_parent(self, fd: int) -> None:
        """Stop when the other end of `fd` is closed: the parent has gone."""

        def ended() -> None:
            try:
                gone = os.read(fd, 4096) == b""
            except BlockingIOError:
                return
            except OSError:  # it died with news from us unread
                gone = True
            if gone:
                self.stop("its parent has gone")

        os.set_blocking(fd, False)
        self._watch(fd, ended)

    def stop(self, reason: str) -> None:
        """Leave `run` once what was announced so far is served."""
        self._stopping = self._stopping or reason

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop`; SIGTERM, SIGINT and SIGHUP stop it when called in the main thread. Closes everything.

        ready: called once, when signals are heard as well as clients.
        """
        _sleep_precisely()
        try:
            with _signals(self.stop) as wake_fd:
                if wake_fd is not None:
                    self._watch(wake_fd, lambda: _empty(wake_fd))
                if ready is not None:
                    ready()
                while self._stopping is None:
                    self._poll(self._turns.patience_s(HEARTBEAT_S))
                    self._beat()
                    if self._strangers:
                        self._end_silent_peers()
                    self._serve_next()
                    if time.monotonic() >= self._next_collect_s:
                        self._collect_wait_times()
                self._drain()
        finally:
            self._close()

    def _poll(self, timeout_s: float) -> None:
        if 0 < timeout_s < 0.001:  # epoll counts in milliseconds
            time.sleep(timeout_s)
            timeout_s = 0.0
        for fd, _ in self._epoll.poll(timeout_s):
            handler = self._handlers.get(fd)  # an earlier handler may have ended this one
            if handler is not None:
                handler()

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def _forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _beat(self) -> None:
        self._heartbeat[0] += np.uint64(1)

    def _drain(self) -> None:
        """Serve what is announced, tell every client, and end."""
        reason = self._stopping or ""
        for session in self._sessions.values():
            for lane in session.lanes.values():
                self._turns.ring(lane)
        for _ in range(sum(len(s.lanes) * s.first.slots for s in self._sessions.values())):  # more can't be in flight
            if not self._serve_next():
                break
            self._beat()
        self._collect_wait_times()
        for session in self._sessions.values():
            for rank in session.ranks.values():
                rank.channel.send(Closing(plain(reason)))
        for channel in self._borrowers.values():
            channel.send(Closing(plain(reason)))
        log.info("stopped: %s", reason)

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for channel in [*(stranger.channel for stranger in self._strangers.values()), *self._borrowers.values()]:
            channel.close()
        for session in self._sessions.values():
            for rank in session.ranks.values():
                rank.close()
        self._epoll.close()
        self._heartbeat_map.close()
        os.close(self._heartbeat_fd)
        if self._spare_fd >= 0:
            os.close(self._spare_fd)

    # ---- connections ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # else: the client has gone
                return
            # Left waiting it would wake the loop for ever: give up the spare descriptor to answer it.
            if self._spare_fd >= 0:
                os.close(self._spare_fd)
                self._spare_fd = -1
            with contextlib.suppress(OSError):
                channel = Channel(listener.accept()[0], "client")
                self._refuse(channel, "the worker has no descriptor left. Raise its limit (ulimit -n).")
            with contextlib.suppress(OSError):  # another thread, of the metrics, may have taken it
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        uid = peer_uid(sock)
        channel = Channel(sock, f"client of uid {uid}")
        if self._allow_uids is not None and uid not in {0, os.getuid(), *self._allow_uids}:
            hint = " (65534 is how a user of another user namespace reads)" if uid == OVERFLOW_UID else ""
            self._refuse(
                channel, f"uid {uid}{hint} may not connect. Start the worker with --allow-uid {uid} or --group."
            )
            return
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            self._refuse(
                oldest.channel, f"more than {MAX_STRANGERS} connections have said no Hello; this was the oldest."
            )
        self._strangers[channel.fileno()] = _Stranger(channel, time.monotonic() + ASK_LIMIT_S)
        self._watch(channel.fileno(), lambda: self._hear_hello(channel))

    def _refuse(self, channel: Channel, reason: str) -> None:
        self._say(f"refused {channel.peer}: {reason.removeprefix(f'{channel.peer}: ')}")
        channel.send(Refused(plain(reason)))
        self._drop(channel)

    def _cut(self, channel: Channel, error: Exception) -> None:
        """End a connection that has no session, for an error."""
        if not isinstance(error, PleOffloadError):
            log.exception("%s: an error of the worker itself", channel.peer)
        if type(error) is ConnectionLostError:  # it only asked, or looked who listens
            self._drop(channel)
        else:
            self._refuse(channel, str(error))

    def _drop(self, channel: Channel) -> None:
        self._strangers.pop(channel.fileno(), None)
        self._borrowers.pop(channel.fileno(), None)
        self._forget(channel.fileno())
        channel.close()

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        """Log what a client did; at most LOG_LINES in LOG_LINES_S, for a client could fill the disk with them."""
        now = time.monotonic()
        if now >= self._log_until_s:
            if self._logged > LOG_LINES:
                log.warning("%d more lines about clients were left out", self._logged - LOG_LINES)
            self._logged, self._log_until_s = 0, now + LOG_LINES_S
        self._logged += 1
        if self._logged <= LOG_LINES:
            log.log(level, "%s", plain(text))

    def _end_silent_peers(self) -> None:
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if now > stranger.until_s:
                what, limit_s = ("a Hello", HELLO_LIMIT_S) if stranger.asked else ("an Ask or a Hello", ASK_LIMIT_S)
                self._refuse(stranger.channel, f"expected {what} within {limit_s:g} s, found none.")

    def _hear_hello(self, channel: Channel) -> None:
        """Before its Hello a client may ask what is served."""
        descriptors: tuple[int, ...] = ()
        try:
            received = channel.receive(0)
            if received is None:
                return
            message, descriptors = received
            stranger = self._strangers[channel.fileno()]
            if isinstance(message, Ask) and not stranger.asked:
                _check_version(channel.peer, message.version)
                tables = self._find(channel.peer, message.checkpoint).tables.values()
                facts = Facts(PROTOCOL_VERSION, os.getpid(), plain(self._log_path), [table.facts() for table in tables])
                channel.send(facts)
                stranger.asked, stranger.until_s = True, time.monotonic() + HELLO_LIMIT_S
                return
            if isinstance(message, Borrow):
                self._lend(channel, message)
                del self._strangers[channel.fileno()]
                self._forget(channel.fileno())
                self._borrowers[channel.fileno()] = channel
                self._watch(channel.fileno(), lambda: self._hear_borrower(channel))
                return
            if not isinstance(message, Hello):
                raise ProtocolError(f"{channel.peer}: expected a Hello, found {type(message).__name__}.")
            rank, session = self._register(channel, message, *descriptors)
        except Exception as error:  # whatever it is, it ends this connection and no other
            for fd in descriptors:
                os.close(fd)
            self._cut(channel, error)
            return
        os.close(descriptors[0])  # the map holds the region
        del self._strangers[channel.fileno()]
        self._forget(channel.fileno())
        lane = session.lanes[rank.hello.dp_rank]
        if lane.ready:
            self._end_group(lane, rank.hello)
        channel.send(Welcome(rank.epoch), (self._heartbeat_fd,))
        self._watch(channel.fileno(), lambda: self._hear(session, rank))
        # edge-triggered and never read: reading could block for ever on a descriptor that the client shares
        self._watch(rank.doorbell_fd, lambda: self._turns.ring(lane), select.EPOLLIN | select.EPOLLET)
        self._say(f"{rank.name} connected (epoch {rank.epoch})", logging.INFO)
        session.add(rank)
        self._turns.ring(lane)

    def _lend(self, channel: Channel, borrow: Borrow) -> None:
        _check_version(channel.peer, borrow.version)
        served = self._find(channel.peer, borrow.checkpoint)
        wish = LayerWish(borrow.layer, "stored", borrow.fingerprint)
        lent, fd = lend(channel.peer, self._table(channel.peer, served, wish), borrow.part)
        if not channel.send(lent, (fd,)):
            raise ConnectionLostError(f"{channel.peer}: it does not take what it borrows.")

    def _hear_borrower(self, channel: Channel) -> None:
        """A borrower asks for further parts, or goes; it has no deadline, and what it maps it keeps."""
        try:
            received = channel.receive(0)
            if received is None:
                return
            message, descriptors = received
            for fd in descriptors:
                os.close(fd)
            if isinstance(message, Goodbye):
                self._drop(channel)
                return
            if not isinstance(message, Borrow):
                raise ProtocolError(f"{channel.peer}: expected a Borrow, found {type(message).__name__}.")
            self._lend(channel, message)
        except Exception as error:  # whatever it is, it ends this connection and no other
            self._cut(channel, error)

    def _register(self, channel: Channel, hello: Hello, region_fd: int, doorbell_fd: int) -> tuple[Rank, Session]:
        """Check a Hello against the tables and its session; returns what to add. ProtocolError says what is wrong."""
        _check_hello(channel.peer, hello)
        served = self._find(channel.peer, hello.checkpoint)
        tables = tuple(self._table(channel.peer, served, wish) for wish in hello.layers)
        token_bytes = tuple(_token_bytes(t, w.output) for t, w in zip(tables, hello.layers, strict=True))
        rows_per_token = tuple(table.rows_per_token for table in tables)
        if hello.request == "tokens":
            lengths = {table.context_len for table in tables}
            if lengths != {hello.context_len}:
                raise ProtocolError(
                    f"{channel.peer}: expected context_len {sorted(lengths)}, found {hello.context_len}."
                )
        elif set(rows_per_token) != {hello.rows_per_token}:
            raise ProtocolError(
                f"{channel.peer}: expected rows_per_token {sorted(set(rows_per_token))}, found {hello.rows_per_token}."
            )
        layout = Layout.of(hello, token_bytes, rows_per_token)
        if layout.num_bytes > MAX_REGION_BYTES:
            raise ProtocolError(
                f"{channel.peer}: expected a region of at most {MAX_REGION_BYTES} bytes, found {layout.num_bytes}."
            )
        session = self._sessions.get(hello.session)
        if session is not None:
            self._hear_ends(session)
        if session is None or not session.ranks:
            # nobody is left of an earlier engine of this name: this is a new one
            old = session
            session = Session(hello.session, tables, hello)
            if old is not None:
                session.counters = old.counters
                session.layers.update({k: v for k, v in old.layers.items() if k in session.layers})
        elif session.tables != tables:
            raise ProtocolError(f"{channel.peer}: session {hello.session!r} reads other tables.")
        session.check(hello, channel.peer)
        rank = Rank(channel, hello, session.next_epoch(hello), layout, region_fd, doorbell_fd, self._devices)
        self._sessions.pop(hello.session, None)  # the newest is the last
        self._sessions[hello.session] = session
        ended = [name for name, session in self._sessions.items() if not session.ranks and name != hello.session]
        for name in ended[:-KEPT_SESSIONS]:
            del self._sessions[name]
        return rank, session

    def _hear_ends(self, session: Session) -> None:
        """Hear the ranks that have gone already, so that one that comes back at once is not taken for its own double."""
        for rank in list(session.ranks.values()):
            if rank in session.ranks.values():  # it may have gone with another of its group
                self._hear(session, rank)

    def _find(self, peer: str, checkpoint: str) -> Served:
        names = [str(served.path) for served in self._served]
        if not checkpoint and len(self._served) == 1:
            return self._served[0]
        for served in self._served:
            fingerprints = [table.fingerprint() for table in served.tables.values()]
            if checkpoint in (str(served.path), served.path.name, *fingerprints):
                return served
        raise ProtocolError(
            f"{peer}: expected one of the checkpoints {', '.join(names)}, by path, name or fingerprint of a table, found "
            f"{checkpoint[:500]!r}. The engine and the worker were given different checkpoints."
        )

    def _table(self, peer: str, served: Served, wish: LayerWish) -> Table:
        table = served.tables.get(wish.layer)
        if table is None:
            raise ProtocolError(
                f"{peer}: {served.path}: expected a layer of {sorted(served.tables)}, found {wish.layer}."
            )
        mine = table.fingerprint()
        if wish.fingerprint not in ("", mine):
            raise ProtocolError(
                f"{peer}: {served.path} layer {wish.layer}: expected the table with fingerprint {wish.fingerprint[:100]}, "
                f"found {mine}. The engine and the worker were given different checkpoints."
            )
        return table

    def _hear(self, session: Session, rank: Rank) -> None:
        """A rank speaks after its Hello: only to say goodbye, or by its end."""
        try:
            received = rank.channel.receive(0)
            if received is None:
                return
            for fd in received[1]:
                os.close(fd)
            if not isinstance(received[0], Goodbye):
                raise ProtocolError(f"{rank.channel.peer}: expected a Goodbye, found {type(received[0]).__name__}.")
            reason = ""
        except ConnectionLostError as error:
            reason = str(error)
            rank.channel.send(Refused(plain(reason)))
        self._remove(session, rank, reason)

    def _remove(self, session: Session, rank: Rank, reason: str) -> None:
        if reason:
            self._say(f"{rank.name} left: {reason}")
        else:
            self._say(f"{rank.name} left", logging.INFO)
        lane = session.lanes[rank.hello.dp_rank]
        self._disconnect(session, rank)
        if reason:
            session.counters.lost_ranks += 1
        if lane.ready and (reason or rank.hello.tp_rank == 0):
            self._end_group(lane, rank.hello)
        self._turns.ring(lane)  # it may have been the one the others waited for

    def _end_group(self, lane: Lane, lost: Hello) -> None:
        """End the connections of a DP rank's ranks, since one of them is lost: they must come back together."""
        lane.ready = False
        for rank in list(lane.targets):
            self._say(f"{rank.name}: its group has lost TP rank {lost.tp_rank}, it must connect anew")
            rank.channel.send(RankLost(lost.dp_rank, lost.tp_rank))
            self._disconnect(lane.session, rank)

    def _disconnect(self, session: Session, rank: Rank) -> None:
        self._forget(rank.channel.fileno())
        self._forget(rank.doorbell_fd)
        session.counters.wait_s += rank.take_wait_s()
        session.remove(rank)
        rank.close()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _serve_next(self) -> bool:
        """Serve one step of the lane whose turn it is; False when there is none."""
        turn = self._turns.next()
        if turn is None:
            for lane, promised_s in self._turns.promised():
                if promised_s < DOZE_UNTIL_S:
                    self._rehearse(lane)
                if promised_s < SPIN_S:
                    self._wake_threads(lane)
            return False
        self._serve(*turn)
        return True

    def _rehearse(self, lane: Lane) -> None:
        """Serve a step without tokens to nobody while a real one is on its way, now and then.

        What has not run for some milliseconds is in no cache: the first step after a pause took 200 us, and takes 100 so.
        """
        now = time.monotonic()
        if now < self._next_rehearsal_s:
            return
        self._next_rehearsal_s = now + REHEARSE_EVERY_S
        session = lane.session
        with contextlib.suppress(Exception):  # whatever it is, the step itself will tell
            for i, (wish, table) in enumerate(zip(session.first.layers, session.tables, strict=True)):
                rows = np.empty((0, table.rows_per_token), np.int64)
                if session.first.request == "tokens":
                    rows = _row_numbers(table, self._nobody.inputs(table.context_len), rows)
                self._deliver([self._nobody], i, 0, table, rows.reshape(-1), 0, wish.output)

    def _wake_threads(self, lane: Lane) -> None:
        """Wake the threads for a large step while its inputs are still on their way: they stay awake for a moment.

        Unless they have every core: then an engine would have none to prepare the step on.
        """
        rank, table = lane.tp_rank_0(), lane.session.tables[0]
        if rank is None or rank.coming <= rank.announced or table.threads >= self._cpus:
            return
        if rank.expected_tokens * table.rows_per_token >= table.parallel_rows:
            native.wake(table.threads)

    def _serve(self, lane: Lane, step: int) -> None:
        """Look one step up and deliver it to every TP rank, or tell each of them why not."""
        rank = lane.tp_rank_0()
        if rank is None:
            return
        session, targets = lane.session, lane.targets
        session.counters.queue_s += max(0.0, time.monotonic() - lane.rung_at_s)
        rank.served = step
        faults = sigbus.count()
        started = time.monotonic()
        layer = session.first.layers[0].layer
        try:
            inputs, found = rank.inputs(step), []
            for i, (wish, table) in enumerate(zip(session.first.layers, session.tables, strict=True)):
                layer = wish.layer
                by_rows = rank.hello.request == "rows"
                rows = inputs[i] if by_rows else _row_numbers(table, inputs, rank.row_numbers(i))
                with span("gather"):
                    self._deliver(targets, i, step, table, rows.reshape(-1), len(inputs[0]), wish.output)
                counters = session.layers[layer]
                counters.steps += 1
                counters.rows += rows.size
                counters.bytes += rows.size * table.spec.row_bytes
                counters.gather_s += time.monotonic() - started
                started = time.monotonic()
                found.append((layer, rows))
            for layer, rows in found:  # when every layer's rows are out, so that none waits for this
                self._count_duplicates(session, layer, rows)
        except Exception as error:
            if not isinstance(error, PleOffloadError):
                log.exception("%s step %d: an error of the worker itself", rank.name, step)
            session.layers[layer].errors += 1
            session.counters.faults += sigbus.count() - faults
            reason = f"{rank.name} step {step} layer {layer}: {error}"
            self._say(reason)
            for target in targets:
                target.channel.send(StepFailed(step, plain(reason)))
                target.fail(step)
        for target in targets:
            if target.lost:  # one that has gone with another of its group says nothing any more
                target.channel.send(Refused(plain(target.lost)))
                self._remove(session, target, target.lost)

    def _deliver(
        self,
        targets: Sequence[Rank | Nobody],
        i: int,
        step: int,
        table: Table,
        rows: np.ndarray,
        num_tokens: int,
        output: str,
    ) -> None:
        """Gather a layer's rows into the first target's output, copy them to the others', raise flags block by block.

        Rows of tokens behind the last request's, up to num_tokens, are zeros. Where a target's rows go on to a GPU, this is
        done in parts, so that one is on its way while the next is gathered.
        """
        total = num_tokens * table.rows_per_token
        out = targets[0].output(i, step, num_tokens)
        width = out.size // max(1, total)
        out[rows.size * width :] = 0
        addresses = np.array([target.reader(i, step) for target in targets], np.uint64)
        on_gpus = [target.device for target in targets if target.device is not None]
        if not on_gpus:
            self._gather(table, rows, output, out, addresses, total)
            return
        for block, first in enumerate(range(0, max(1, total), DEVICE_BLOCK_ROWS)):
            last = min(total, first + DEVICE_BLOCK_ROWS)
            try:
                part = out[first * width : last * width]
                self._gather(table, rows[first:last], output, part, addresses, last - first)
            except TokenIdError as error:
                raise TokenIdError(f"in the rows from {first} on: {error}") from None
            for device in on_gpus:
                device.publish(i, step, block, num_tokens)
            addresses[:, OUT] += np.uint64(DEVICE_BLOCK_ROWS * width)
            addresses[:, FLAGS] += np.uint64(DEVICE_BLOCK_ROWS // BLOCK_ROWS * 8)

    def _gather(
        self, table: Table, rows: np.ndarray, output: str, out: np.ndarray, addresses: np.ndarray, total: int
    ) -> None:
        """Gather for the readers at `addresses` into out, uint8, which has room for `total` rows."""
        readers = Readers(addresses, self._shared, BLOCK_ROWS, total)
        table.gather_into(rows, output, out if output == "stored" else out.view(_value_dtype(output)), readers)
        self._beat()

    def _count_duplicates(self, session: Session, layer: int, rows: np.ndarray) -> None:
        """Search a sample of the steps for rows asked for twice; the rows are out already, so nobody waits for this."""
        now = time.monotonic()
        if now < self._next_sample_s or rows.size > DUPLICATES_MAX_ROWS or self._turns:
            return
        self._next_sample_s = now + DUPLICATES_EVERY_S
        counters = session.layers[layer]
        counters.sampled_rows += rows.size
        counters.duplicate_rows += rows.size - np.unique(rows).size

    # ---- figures --------------------------------------------------------------------------------------------------

    def _collect_wait_times(self) -> None:
        """Read what the clients say they waited: now and then, since it is in no step's interest."""
        self._next_collect_s = time.monotonic() + HEARTBEAT_S
        for session in self._sessions.values():
            for rank in session.ranks.values():
                session.counters.wait_s += rank.take_wait_s()

    def samples(self) -> Iterator[Sample]:
        """Every counter, labelled by session and layer."""
        yield "ple_offload_sessions", {}, float(sum(bool(s.ranks) for s in list(self._sessions.values())))
        for session in list(self._sessions.values()):
            yield "ple_offload_ranks", {"session": session.name}, float(len(session.ranks))
            yield from samples(session.counters, session=session.name)
            for layer, counters in session.layers.items():
                yield from samples(counters, session=session.name, layer=str(layer))


def _token_bytes(table: Table, output: str) -> int:
    if output == "stored":
        return table.rows_per_token * table.spec.row_bytes
    return table.embed_dim * _value_dtype(output).itemsize


def _row_numbers(
    table: Table, inputs: list[npt.NDArray[np.int64]], memory: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Row numbers [num_tokens, rows_per_token] of a step's copied inputs, at the beginning of `memory`."""
    ids, starts, context = inputs
    table.check_query_start_loc(starts, ids.size)
    rows = memory[: int(starts[-1])]
    table.row_numbers_into(ids, starts, context, rows)
    return rows


def _sleep_precisely() -> None:
    """Let this thread's short sleeps end on time: Linux lengthens each by up to 50 us, to wake up for several at once."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)  # ns


_PR_SET_TIMERSLACK = 29  # linux/prctl.h


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def _value_dtype(output: str) -> np.dtype[Any]:
    return VALUE_DTYPES[output]


def _check_version(peer: str, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{peer}: expected protocol version {PROTOCOL_VERSION}, found {version}. "
            "Install the same release of ple-offload on both sides."
        )


def _check_hello(peer: str, hello: Hello) -> None:
    """Refuse numbers that make no sense, before anything is computed from them."""
    _check_version(peer, hello.version)
    bounds = {
        "step": (0, words.MAX_STEP - 1),
        "dp_size": (1, 1024),
        "tp_size": (1, 1024),
        "dp_rank": (0, hello.dp_size - 1),
        "tp_rank": (0, hello.tp_size - 1),
        "worker_id": (0, 1 << 20),
        "max_num_tokens": (1, 1 << 22),
        "max_num_reqs": (1, 1 << 22),
        "slots": (1, 64),
        "context_len": (0, 64),
        "rows_per_token": (0, 1 << 12),
        "direct_tokens": (0, 1 << 22),
    }
    for name, (low, high) in bounds.items():
        if not low <= getattr(hello, name) <= high:
            raise ProtocolError(f"{peer}: {name}: expected {low} to {high}, found {getattr(hello, name)}.")
    if not hello.session or len(hello.session) > 200:
        raise ProtocolError(f"{peer}: session: expected a name of 1 to 200 characters, found {len(hello.session)}.")
    if hello.request not in ("tokens", "rows"):
        raise ProtocolError(f"{peer}: request: expected 'tokens' or 'rows', found {hello.request[:20]!r}.")
    if len(hello.device) > 100 or len(hello.handle) != (HANDLE_BYTES if hello.device else 0):
        raise ProtocolError(
            f"{peer}: device, handle: expected a GPU's UUID and {HANDLE_BYTES} bytes, or neither, found "
            f"{hello.device[:100]!r} and {len(hello.handle)} bytes."
        )
    layers = [wish.layer for wish in hello.layers]
    if not layers or len(set(layers)) != len(layers) or len(layers) > 1024:
        raise ProtocolError(f"{peer}: layers: expected different layers, at least one, found {layers[:20]}.")
    for wish in hello.layers:
        if wish.output not in OUTPUTS:
            raise ProtocolError(f"{peer}: output: expected one of {', '.join(OUTPUTS)}, found {wish.output[:20]!r}.")


@contextlib.contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[int | None]:
    """Stop on SIGTERM, SIGINT and, unless started by `nohup`, SIGHUP.

    Yields a descriptor that becomes readable then (None outside the main thread).
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [signal.signal(n, lambda number, _: stop(f"it got {signal.Signals(number).name}")) for n in numbers]
    try:
        yield read_fd
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read_fd)
        os.close(write_fd)
