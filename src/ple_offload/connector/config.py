"""What a connector is told, in one frozen record that an engine's adapter fills once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ple_offload.errors import UsageError

MAX_LIMIT_S = 1_000_000  # no wait is without a limit


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Limits()                       the defaults
    Limits(no_progress_s=1)        give a silent worker up after one second
    Limits(hard_cap_s=600)         a disk that needs minutes for one step
    Limits(ready_s=3600)           ranks that come an hour apart
    Limits(connect_s=0)            the daemon must listen already
    """

    connect_s: float = 30.0  # until somebody listens at the address
    answer_s: float = 30.0  # until who listens there answers
    ready_s: float = 600.0  # until every rank of the session has connected
    no_progress_s: float = 5.0  # without a block, nor a beat of the worker's heart
    hard_cap_s: float = 60.0  # for one wait, whatever the worker does
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_LIMIT_S:
                raise UsageError(f"Limits.{item.name}: expected 0 to {MAX_LIMIT_S} seconds, found {value!r}.")


@dataclass(frozen=True)
class ConnectorConfig:
    """One rank of one engine.

    max_num_tokens, max_num_reqs: of any step; buffers are made once for them.
    session: names the engine on this host; all its ranks give the same name, other engines another.
    dp_size, tp_size: ranks of this engine on this host. worker_id: the rank's number among all of them, pipeline ranks
        counted; default dp_rank * tp_size + tp_rank.
    staging: "async" copies from device sources and lets max_concurrent_batches be in flight; "mirror" copies from CPU
        sources, one batch at a time; "auto" decides by the sources' device.
    request: "tokens" sends token ids, the worker hashes; "rows" sends row numbers.
    output: how rows travel: "stored" as their bytes, decoded by the reader; "values" decoded by the worker.
    route: how rows reach a GPU: "direct", the GPU reads host memory of tables that are open in this process or lent by the
        worker; "staged", the worker gathers and the GPU drains; "ipc", the worker copies what it gathered into the GPU's
        memory; "auto" measures the first two and takes each for the steps it is faster for, or the one that works here. On
        the CPU there is one, "host".
    skip_memory_check: let "direct" page-lock page cache (tier "file") that does not fit this process's memory limits; None:
        as PLE_OFFLOAD_SKIP_MEMORY_CHECK says.
    checkpoint: which of the worker's: its path there, its name, or a table's fingerprint, which is the same wherever it is
        mounted; may be empty where it serves one.
    fingerprints: of the tables expected, by decoder layer (`ple_offload.spec.fingerprint`); a layer left out takes any.
    """

    max_num_tokens: int
    max_num_reqs: int
    session: str = "default"
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    worker_id: int = -1
    max_concurrent_batches: int = 2
    staging: str = "auto"
    request: str = "tokens"
    output: str = "stored"
    route: str = "auto"
    skip_memory_check: bool | None = None
    checkpoint: str = ""
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, accepted in (
            ("staging", ("auto", "async", "mirror")),
            ("request", ("tokens", "rows")),
            ("output", ("stored", "values")),
            ("route", ("auto", "host", "direct", "staged", "ipc")),
        ):
            if getattr(self, name) not in accepted:
                raise UsageError(f"{name}: expected one of {', '.join(accepted)}, found {getattr(self, name)!r}.")
        for name, low, high in (
            ("max_num_tokens", 1, 1 << 22),
            ("max_num_reqs", 1, 1 << 22),
            ("dp_size", 1, 1024),
            ("tp_size", 1, 1024),
            ("max_concurrent_batches", 1, 64),
            ("worker_id", -1, 1 << 20),
        ):
            self._require(name, low, high)
        self._require("dp_rank", 0, self.dp_size - 1)
        self._require("tp_rank", 0, self.tp_size - 1)
        if not isinstance(self.session, str) or not 1 <= len(self.session) <= 200:
            raise UsageError(f"session: expected a name of 1 to 200 characters, found {self.session!r}.")
        if self.worker_id < 0:
            object.__setattr__(self, "worker_id", self.dp_rank * self.tp_size + self.tp_rank)

    def _require(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UsageError(f"{name}: expected an integer from {low} to {high}, found {value!r}.")
