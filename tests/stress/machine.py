"""Two engines and a daemon, real processes, driven at random and checked after every action against a plain table.

The driver keeps a model of each session: the steps in flight, which layers have taken their rows, the dummies, and whether
anything was done to the worker since the session connected ("shaken"). So it knows what must come out of every action:

* a good step of a session that is not shaken: the table's rows, bit by bit, and no error;
* a good step of a shaken session: the rows, or NaN and an error, nothing else;
* a step with a bad id: NaN and an error; a dummy: zeros; a forward without a step: NaN and an error.

An action that takes too long is a hang. Whatever goes wrong is a `WrongError`, with the seed and the last actions.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from connector.rig import random_inputs
from engine import Engine, all_nan, same
from ple_offload import open_table
from ple_offload.errors import ConnectionLostError, PleOffloadError, StepError, UsageError

LAYERS = (1, 3)
SLOTS = 3
MAX_TOKENS = 32
LIMITS = {"no_progress_s": 2.0, "answer_s": 2.0, "connect_s": 0.2, "ready_s": 10.0}
ACTION_LIMIT_S = 15.0

# How often each action is chosen, out of their sum. `calm` actions end no process and give no connection up.
CALM = {
    "prepare": 300,
    "take": 560,
    "release": 290,
    "bad_step": 12,
    "dummy": 15,
    "signal_dummy": 10,
    "take_at_once": 40,
    "stop": 6,
    "reconnect": 4,
}
FAULTS = {"kill_worker": 4, "kill_worker_in_a_take": 4, "kill_engine": 2, "kill_engine_in_a_take": 2, "long_stop": 0.5}


class WrongError(AssertionError):
    """The checker saw something that must not be."""


@dataclass
class Flying:
    """A step in flight, as the driver knows it."""

    number: int
    padded: int
    expected: list[np.ndarray]  # by layer; empty for a bad or dummy step
    dummy: bool = False
    failed: bool = False
    taken: set[int] = field(default_factory=set)

    @property
    def bad(self) -> bool:
        return not self.expected and not self.dummy


@dataclass
class Session:
    name: str
    engine: Engine
    number: int = 0  # of the last prepare_forward
    flight: deque[Flying] = field(default_factory=deque)
    dummies: deque[set[int]] = field(default_factory=deque)
    shaken: bool = False

    def full(self) -> bool:
        """Whether the next prepare_forward is one too many."""
        window = self.number + 1 - self.flight[0].number if self.flight else 0
        return len(self.flight) >= SLOTS or window >= SLOTS

    def forget(self) -> None:
        self.flight.clear()
        self.dummies.clear()


class Machine:
    """`run` some steps; close it after use. break_engine: Python that is executed in every engine after it connected."""

    def __init__(self, checkpoint: Path, seed: int, *, break_engine: str = "") -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.path = checkpoint
        self.tables = [open_table(checkpoint, layer, "file", threads=1) for layer in LAYERS]
        self.address = f"unix:@ple-offload-stress-{os.getpid()}-{secrets.token_hex(4)}"
        self.break_engine = break_engine
        self.history: deque[str] = deque(maxlen=40)
        self.counts: dict[str, int] = {}
        self.steps = 0  # prepared
        self.rows_checked = 0
        self.stopped = False
        self.worker: Engine | None = None
        self._start_worker()
        self.sessions = [Session(name, Engine()) for name in ("left", "right")]
        for session in self.sessions:
            self._connect(session)

    # ---- processes ----------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self.worker = Engine().begin("serve", str(self.path), self.address)
        self.stopped = False
        deadline = time.monotonic() + ACTION_LIMIT_S
        probe = self.address.removeprefix("unix:@")
        while f"@{probe}" not in Path("/proc/net/unix").read_text():
            if time.monotonic() > deadline:
                raise WrongError("the worker does not listen")
            time.sleep(0.005)

    def _connect(self, session: Session) -> None:
        session.engine.run("import logging; logging.disable()")
        session.engine.connect(
            self.address,
            layers=LAYERS,
            session=session.name,
            limits=LIMITS,
            staging="async",
            max_concurrent_batches=SLOTS,
            max_num_tokens=MAX_TOKENS + 4,
            max_num_reqs=6,
        )
        if self.break_engine:
            session.engine.run(self.break_engine)
        session.number, session.shaken = 0, False
        session.forget()

    def _signal_worker(self, number: signal.Signals) -> None:
        assert self.worker is not None
        self.worker.kill(number)
        self.stopped = number == signal.SIGSTOP

    def _worker_runs(self) -> None:
        """Have a worker that listens and is not stopped."""
        if self.worker is None:
            self._start_worker()
        elif self.stopped:
            self._signal_worker(signal.SIGCONT)

    def _kill_worker(self) -> None:
        worker, self.worker, self.stopped = self.worker, None, False
        assert worker is not None
        worker.kill()
        worker.exit_status()
        worker.close()
        for session in self.sessions:
            session.shaken = True

    def _replace_engine(self, session: Session) -> None:
        session.engine.kill()
        session.engine.exit_status()
        session.engine.close()
        session.engine = Engine()
        self._connect(session)

    # ---- running ------------------------------------------------------------------------------------------------------

    def run(self, steps: int, *, faults: bool = True) -> None:
        """Act until so many more steps have been prepared."""
        actions = {**CALM, **(FAULTS if faults else {})}
        names = list(actions)
        weights = np.array([actions[name] for name in names], float)
        end = self.steps + steps
        try:
            while self.steps < end:
                for name in self.rng.choice(names, 64, p=weights / weights.sum()):
                    self._act(str(name))
        except Exception as error:
            raise WrongError(
                f"seed {self.seed}, step {self.steps}: {type(error).__name__}: {error}. "
                f"STRESS_SEED={self.seed} repeats the actions. The last ones: {'; '.join(self.history)}"
            ) from error

    def _act(self, name: str) -> None:
        session = self.sessions[int(self.rng.integers(2))]
        if self.worker is None and self.rng.random() < 0.1:
            self._start_worker()
        if session.shaken and self.worker is not None and not self.stopped and self.rng.random() < 0.1:
            name = "reconnect"
        self.history.append(f"{session.name} {name}")
        self.counts[name] = self.counts.get(name, 0) + 1
        began = time.monotonic()
        getattr(self, f"_do_{name}")(session)
        if time.monotonic() - began > ACTION_LIMIT_S:
            raise WrongError(f"{name} took {time.monotonic() - began:.1f} s")

    # ---- steps --------------------------------------------------------------------------------------------------------

    def _do_prepare(self, session: Session, spoil: bool = False) -> None:
        rng = self.rng
        tokens = int(rng.integers(0, MAX_TOKENS + 1))
        inputs = random_inputs(rng, tokens, int(rng.integers(1, 7)), padded=tokens + int(rng.integers(0, 4)))
        ids = [*inputs.ids.tolist(), *[-1] * (inputs.padded - tokens)]
        context = inputs.context.tolist()
        if spoil:
            place = int(rng.integers(tokens + 1))
            if place < tokens:
                ids[place] = int(rng.choice([-1, 1000, 2**40]))
            else:
                context[0][1] = -5
        expected = []
        for table in self.tables if not spoil else ():
            rows = table.lookup(inputs.ids, inputs.starts, inputs.context)
            expected.append(np.concatenate([rows, np.zeros((inputs.padded - tokens, rows.shape[1]), rows.dtype)]))
        self._prepare(session, Flying(0, inputs.padded, expected), ids, inputs.starts.tolist(), context)

    def _do_bad_step(self, session: Session) -> None:
        self._do_prepare(session, spoil=True)

    def _do_dummy(self, session: Session) -> None:
        padded = int(self.rng.integers(0, MAX_TOKENS))
        self._prepare(session, Flying(0, padded, [], dummy=True), [1] * padded, dummy=True)

    def _prepare(self, session: Session, step: Flying, *args: Any, **options: Any) -> None:
        full = session.full()
        session.number += 1
        self.steps += 1
        step.number = session.number
        try:
            number = session.engine.prepare(*args, **options)
        except UsageError:
            _demand(full, "a step was refused that should fit")
            return
        except ConnectionLostError:
            _demand(session.shaken, "the connection was lost and nobody had touched it")
            session.dummies.clear()
            return
        _demand(not full, "one step too many was taken")
        _demand(number == step.number, f"step number {number}, expected {step.number}")
        session.dummies.clear()
        session.flight.append(step)

    def _do_take(self, session: Session, meanwhile: Callable[[], None] | None = None) -> None:
        """A layer takes its rows; `meanwhile` happens while it does."""
        i = int(self.rng.integers(2))
        step = next((step for step in session.flight if i not in step.taken), None)
        dummy = bool(session.dummies) and (step is None or not step.taken)
        padded = step.padded if step is not None and not dummy else int(self.rng.integers(0, MAX_TOKENS))
        if self.stopped and meanwhile is None:
            if step is not None and session.shaken:
                self._signal_worker(signal.SIGCONT)  # one that has given up may wait: nothing to learn from it
            elif step is not None:
                meanwhile = self._go_on
        session.engine.begin("take", i, padded)
        if meanwhile is not None:
            meanwhile()
        rows = session.engine.result(ACTION_LIMIT_S)
        _demand(rows.shape == (padded, 64), f"rows of shape {rows.shape}, expected {padded} x 64")
        if dummy:
            taken = next((taken for taken in session.dummies if i not in taken), session.dummies[-1])
            taken.add(i)
            if len(session.dummies[0]) == len(LAYERS):
                session.dummies.popleft()
            _demand(not rows.any(), "a dummy's rows are not zero")
        elif step is None:
            _demand(all_nan(rows), "a forward without a step got rows")
            error = _error_of(lambda: session.engine.run("connector.raise_unreported()"))
            _demand(isinstance(error, StepError), f"a forward without a step: {error!r}")
        else:
            step.taken.add(i)
            self._compare(session, step, i, rows)

    def _compare(self, session: Session, step: Flying, i: int, rows: np.ndarray) -> None:
        error = _error_of(lambda: session.engine.check(step.number))
        if step.dummy:
            _demand(not rows.any() and error is None, f"a dummy step: {error!r}")
        elif error is not None:
            _demand(all_nan(rows), f"rows that are not NaN with an error: {error}")
            _demand(step.bad or session.shaken, f"a good step failed and nobody had touched the worker: {error}")
            step.failed = True
        else:
            _demand(not step.bad and not step.failed, "a step that cannot be looked up had no error")
            _demand(same(rows, step.expected[i]), f"wrong rows in step {step.number} layer {LAYERS[i]}")
            self.rows_checked += len(rows)

    def _go_on(self) -> None:
        time.sleep(0.02)
        self._signal_worker(signal.SIGCONT)

    def _do_take_at_once(self, session: Session) -> None:
        """Both sessions take at the same time."""
        other = self.sessions[session is self.sessions[0]]
        ready = [s for s in (session, other) if not s.dummies and s.flight and 0 not in s.flight[0].taken]
        if self.stopped or len(ready) < 2:
            return
        for one in ready:
            one.engine.begin("take", 0, one.flight[0].padded)
        for one in ready:
            step, rows = one.flight[0], one.engine.result(ACTION_LIMIT_S)
            step.taken.add(0)
            self._compare(one, step, 0, rows)

    def _do_release(self, session: Session) -> None:
        session.engine.release()
        if session.flight:
            session.flight.popleft()

    def _do_signal_dummy(self, session: Session) -> None:
        session.engine.signal_dummy_outputs(int(self.rng.integers(0, MAX_TOKENS)))
        session.dummies.append(set())

    # ---- faults -------------------------------------------------------------------------------------------------------

    def _do_reconnect(self, session: Session) -> None:
        """Also when nothing is wrong. A stopped worker is let go on first: `long_stop` tries the other thing."""
        if self.stopped:
            self._signal_worker(signal.SIGCONT)
        lost = [s for s in session.flight if not s.dummy and len(s.taken) < len(LAYERS)]
        error = _error_of(session.engine.reconnect)
        session.forget()
        _demand((error is None) == (self.worker is not None), f"reconnecting: {error!r}")
        session.shaken = error is not None
        for step in lost:
            _demand(_error_of(lambda: session.engine.check(step.number)) is not None, "a step given up had no error")  # noqa: B023
        if self.break_engine:
            session.engine.run(self.break_engine)

    def _do_stop(self, session: Session) -> None:
        """The worker stands still; the next take wakes it up in its middle."""
        if self.worker is not None:
            self._signal_worker(signal.SIGCONT if self.stopped else signal.SIGSTOP)

    def _do_long_stop(self, session: Session) -> None:
        """It stands still for longer than a client waits. When it goes on, nobody reads what it writes."""
        if self.worker is None:
            return
        self._do_prepare(session)
        self._signal_worker(signal.SIGSTOP)
        session.shaken = True
        for _ in range(2):
            self._do_take(session, meanwhile=lambda: None)
        reconnected = _error_of(session.engine.reconnect)
        session.forget()
        _demand(isinstance(reconnected, ConnectionLostError), f"reconnected to a stopped worker: {reconnected!r}")
        self._signal_worker(signal.SIGCONT)
        self._do_reconnect(session)

    def _do_kill_worker(self, session: Session) -> None:
        if self.worker is not None:
            self._kill_worker()

    def _do_kill_worker_in_a_take(self, session: Session) -> None:
        if self.worker is None:
            return
        self._worker_runs()
        self._do_prepare(session)
        for other in self.sessions:
            other.shaken = True
        self._do_take(session, meanwhile=self._kill_worker)

    def _do_kill_engine(self, session: Session) -> None:
        self._worker_runs()
        self._replace_engine(session)

    def _do_kill_engine_in_a_take(self, session: Session) -> None:
        self._worker_runs()
        if session.flight:
            session.engine.begin("take", 0, session.flight[0].padded)
        self._replace_engine(session)

    # ---- what the processes hold ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything connected anew and nothing in flight, so that what is held can be compared."""
        self._worker_runs()
        for session in self.sessions:
            self._do_reconnect(session)
        time.sleep(0.1)  # the worker hears of the ends a little later

    def held(self) -> dict[str, tuple[int, int, int]]:
        """By process: descriptors, threads, private memory in KiB."""
        assert self.worker is not None
        processes = {"worker": self.worker.pid, **{s.name: s.engine.pid for s in self.sessions}}
        return {name: _held(Path(f"/proc/{pid}")) for name, pid in processes.items()}

    def close(self) -> None:
        engines = [session.engine for session in getattr(self, "sessions", [])]
        for engine in [*engines, *([self.worker] if self.worker is not None else [])]:
            engine.kill()
            engine.close()
        for table in self.tables:
            table.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _held(proc: Path) -> tuple[int, int, int]:
    memory = (proc / "smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in memory if line.startswith(("Private_Clean", "Private_Dirty")))
    return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())), private


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise WrongError(otherwise)


def _error_of(call: Callable[[], Any]) -> PleOffloadError | None:
    try:
        call()
    except PleOffloadError as error:
        return error
    return None
