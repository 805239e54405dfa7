"""Sessions: which ranks belong together, when they are complete, and whose turn it is.

A session is one engine on this host: dp_size x tp_size ranks, each with a connection of its own. It is ready when all have
said Hello, and stays so. The TP ranks of one DP rank are a group that begins and ends together, since they count the same
steps: when one is lost the others' connections end too, and the group is served again when all its ranks have come
back. The other DP ranks are served meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ple_offload.errors import ProtocolError
from ple_offload.ipc import words
from ple_offload.ipc.messages import Hello, Ready
from ple_offload.metrics import LayerCounters, SessionCounters
from ple_offload.table import Table
from ple_offload.worker.rank import Rank

# After a small step the next one may follow at once (several ranks, a loop of short steps), and to sleep and be woken takes
# 20 to 50 us in a virtual machine: the worker stays awake for a few times as long, counted from the start of the step.
LINGER_S = 0.0002
# Looking again for a promised step: at once, then every DOZE_S, then every millisecond, then whenever the worker wakes.
SPIN_S, DOZE_S, DOZE_UNTIL_S, PATIENCE_S = 0.002, 0.00002, 0.2, 60.0


@dataclass
class Lane:
    """The requests of one DP rank: published by its TP rank 0, delivered to all its TP ranks."""

    session: Session
    dp_rank: int
    rung_at_s: float = 0.0  # when the doorbell was last heard
    ready: bool = False  # its ranks were told to begin
    targets: list[Rank] = field(default_factory=list)  # the TP ranks that are there, in order

    def tp_rank_0(self) -> Rank | None:
        return self.targets[0] if self.targets and self.targets[0].hello.tp_rank == 0 else None

    def has_more(self, step: int) -> bool:
        """Whether steps behind this one were announced, or are coming: their doorbell may have been heard already."""
        rank = self.tp_rank_0()
        return rank is not None and max(rank.announced, rank.coming) > step

    def promised(self) -> int | None:
        """The last step that will become servable without a doorbell: it is coming, or waits for its slot."""
        rank = self.tp_rank_0()
        step = max(rank.announced, rank.coming) if rank is not None and self.ready else 0
        return step if rank is not None and step > rank.served else None

    def begin(self) -> None:
        """All ranks are there: they count on from the highest step any of them has counted."""
        self.ready = True
        step = max(rank.hello.step for rank in self.targets)
        direct_tokens = min(rank.hello.direct_tokens for rank in self.targets)
        for rank in self.targets:
            rank.begin(step)
            rank.channel.send(Ready(step, direct_tokens))

    def ready_step(self) -> int | None:
        """The next step that can be served now: announced, and its slot released by every TP rank that is there."""
        rank = self.tp_rank_0()
        step = rank.next_step() if rank is not None and self.ready else None
        if step is None:
            return None
        return step if all(step - target.released <= target.hello.slots for target in self.targets) else None


@dataclass
class Session:
    name: str
    tables: tuple[Table, ...]  # one per layer of the Hello
    first: Hello  # of the rank that came first; the others must agree with it
    ranks: dict[tuple[int, int], Rank] = field(default_factory=dict)
    lanes: dict[int, Lane] = field(default_factory=dict)
    ready: bool = False
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    counters: SessionCounters = field(default_factory=SessionCounters)
    layers: dict[int, LayerCounters] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lanes = {dp_rank: Lane(self, dp_rank) for dp_rank in range(self.first.dp_size)}
        self.layers = {wish.layer: LayerCounters() for wish in self.first.layers}

    def check(self, hello: Hello, peer: str) -> None:
        """Refuse a rank that does not belong here; ProtocolError says what differs."""
        for what in (
            "dp_size",
            "tp_size",
            "request",
            "max_num_tokens",
            "max_num_reqs",
            "slots",
            "context_len",
            "layers",
        ):
            mine, theirs = getattr(self.first, what), getattr(hello, what)
            if mine != theirs:
                raise ProtocolError(
                    f"{peer}: session {self.name!r}: expected {what} {mine}, as its other ranks said, found {theirs}."
                )
        key = (hello.dp_rank, hello.tp_rank)
        if key in self.ranks:
            raise ProtocolError(
                f"{peer}: session {self.name!r}: expected one connection of DP rank {key[0]} TP rank {key[1]}, found two. "
                "Give every engine on the host its own session name."
            )
        taken = [rank.hello.worker_id for rank in self.ranks.values()]
        if hello.worker_id in taken:
            raise ProtocolError(f"{peer}: session {self.name!r}: worker id {hello.worker_id} is already connected.")

    def add(self, rank: Rank) -> None:
        key = (rank.hello.dp_rank, rank.hello.tp_rank)
        self.ranks[key] = rank
        self.epochs[key] = rank.epoch
        self.counters.connections += 1
        self._update_lane(rank)
        lane = self.lanes[rank.hello.dp_rank]
        if self.ready and len(lane.targets) == self.first.tp_size:
            lane.begin()
        elif not self.ready and len(self.ranks) == self.first.dp_size * self.first.tp_size:
            self.ready = True
            for lane in self.lanes.values():
                lane.begin()

    def remove(self, rank: Rank) -> None:
        self.ranks = {key: other for key, other in self.ranks.items() if other is not rank}
        self._update_lane(rank)

    def _update_lane(self, rank: Rank) -> None:
        dp_rank = rank.hello.dp_rank
        self.lanes[dp_rank].targets = [self.ranks[key] for key in sorted(self.ranks) if key[0] == dp_rank]

    def next_epoch(self, hello: Hello) -> int:
        """Another one than the rank's last; it may start again from 1, since every connection has memory of its own."""
        return self.epochs.get((hello.dp_rank, hello.tp_rank), 0) % words.MAX_EPOCH + 1


class Turns:
    """Round robin over the lanes that may have something to do, one step each.

    A lane whose step is promised (a device will announce it, or a reader has not released its slot yet) becomes servable
    without ringing: it is looked at again and again, ever less often, after PATIENCE_S only when the worker wakes anyway.
    Only another step renews this: a doorbell, which also says that a slot was released, does not.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Lane] = {}  # by identity, in the order of their turn
        self._promised: dict[int, tuple[Lane, int, float]] = {}  # which step, since when
        self._served_s = 0.0  # when `next` last gave a step

    def ring(self, lane: Lane) -> None:
        if id(lane) not in self._waiting:
            lane.rung_at_s = time.monotonic()
            self._waiting[id(lane)] = lane

    def next(self) -> tuple[Lane, int] | None:
        """The next lane that can be served, and its step; a lane that has more queues up behind the others.

        Any other lane is dropped: what changes that (a new step) rings again.
        """
        for key, (lane, *_) in list(self._promised.items()):
            if lane.ready_step() is not None:
                del self._promised[key]
                self.ring(lane)
            elif lane.promised() is None:  # its rank has gone
                del self._promised[key]
        while self._waiting:
            key = next(iter(self._waiting))
            lane = self._waiting.pop(key)
            step = lane.ready_step()
            if step is not None:
                if lane.has_more(step):
                    self.ring(lane)
                self._served_s = time.monotonic()
                return lane, step
            promised = lane.promised()
            if promised is not None and (key not in self._promised or self._promised[key][1] != promised):
                self._promised[key] = (lane, promised, time.monotonic())
        return None

    def promised(self) -> list[tuple[Lane, float]]:
        """The lanes whose next step is promised, and for how many seconds it has been."""
        now = time.monotonic()
        return [(lane, now - since_s) for lane, _, since_s in self._promised.values()]

    def patience_s(self, idle_s: float) -> float:
        """How long the worker may sleep before it calls `next` again."""
        if self._waiting or time.monotonic() - self._served_s < LINGER_S:
            return 0.0
        if not self._promised:
            return idle_s
        waited_s = time.monotonic() - max(since_s for *_, since_s in self._promised.values())
        if waited_s < DOZE_UNTIL_S:
            return 0.0 if waited_s < SPIN_S else DOZE_S
        return 0.001 if waited_s < PATIENCE_S else idle_s

    def __bool__(self) -> bool:
        return bool(self._waiting)
