"""One worker, many ranks: real engine processes, DP x TP, several sessions, checkpoints and families; each gets its rows.

Engines write their inputs as `tests/engine.py` does: int64 ids, int32 starts, and take bfloat16 rows by the two ops.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.rig import Inputs, Made, Rank, make, random_inputs, reference
from engine import Engine, all_nan, same
from ple_offload import Table, open_table
from ple_offload.errors import ConnectionLostError, ProtocolError, StepError, UsageError
from ple_offload.formats.base import RowFormat
from ple_offload.spec import TableSpec
from ple_offload.stores import FileStore
from ple_offload.stores.base import Segment
from ple_offload.worker.server import PleOffloadWorker, Served
from ple_offload.worker.spawn import SpawnedWorker

SIZES = {"max_num_tokens": 64, "max_num_reqs": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("serving")
    return {name: make(folder / name, num_layers=2, seed=seed) for name, seed in (("one", 0), ("two", 10))}


@pytest.fixture(scope="module")
def serving(made: dict[str, Made]) -> Iterator[SpawnedWorker]:
    with SpawnedWorker(*(checkpoint.path for checkpoint in made.values()), tier="file", threads=1) as started:
        yield started


@contextlib.contextmanager
def worker_thread(*served: Served) -> Iterator[tuple[PleOffloadWorker, str]]:
    """A worker in a thread of this process: its counters and tables are at hand."""
    worker = PleOffloadWorker(list(served))
    address = f"unix:@ple-offload-test-{os.getpid()}-{secrets.token_hex(4)}"
    worker.listen(address)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker, address
    finally:
        worker.stop("the test is over")
        thread.join(20)
        assert not thread.is_alive()


def test_a_worker_whose_last_descriptor_another_thread_took_goes_on(
    made: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.ExitStack() as stack:
        one = served(made["one"], stack)
        worker, address = stack.enter_context(worker_thread(one))
        with monkeypatch.context() as patch:
            patch.setattr("ple_offload.worker.server.os.open", refuse)
            for _ in range(3):
                worker._accept(Full())  # type: ignore[arg-type]
        worker._accept(Full())  # type: ignore[arg-type]
        assert Path(f"/proc/self/fd/{worker._spare_fd}").readlink() == Path(os.devnull)
        Rank.of(made["one"], address).close()


@pytest.fixture
def engines() -> Iterator[Callable[[], Engine]]:
    with contextlib.ExitStack() as running:
        yield lambda: running.enter_context(Engine())


def served(made: Made, stack: contextlib.ExitStack) -> Served:
    tables = {t.layer: open_table(made.path, t.layer, "file", threads=1) for t in made.spec.tables}
    for table in tables.values():
        stack.enter_context(table)
    return Served(made.path, tables)


def begin_connect(engine: Engine, address: str, checkpoint: str = "one", **options: Any) -> Engine:
    options = {"layers": (1, 3), "checkpoint": checkpoint, **SIZES, **options}
    return engine.begin("connect", address, **options)


def connected(engine: Engine) -> bool:
    return bool(engine._pipe.poll(0))


def prepare(engine: Engine, inputs: Inputs) -> int:
    step = engine.prepare(inputs.ids.tolist(), inputs.starts.tolist(), inputs.context.tolist())
    assert isinstance(step, int)
    return step


def is_right(engine: Engine, made: Made, inputs: Inputs, layers: tuple[int, ...] = (0, 1)) -> bool:
    """Take the next step's rows of both layers and compare them."""
    specs = made.spec.tables
    expected = [reference(specs[i], made.raw[specs[i].layer], inputs, "bf16") for i in layers]
    return all(same(engine.take(i, inputs.padded), rows) for i, rows in zip(layers, expected, strict=True))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(30)


# ---- DP x TP ------------------------------------------------------------------------------------------------------


def test_two_by_two_ranks_begin_together_and_each_dp_rank_gets_its_rows_on_every_tp_rank(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    ranks = {(dp, tp): engines() for dp in range(2) for tp in range(2)}
    for (dp, tp), engine in ranks.items():
        if (dp, tp) == (1, 1):
            time.sleep(0.3)
            assert not any(connected(other) for other in ranks.values()), "ready without the last rank"
        begin_connect(engine, serving.address, session="2x2", dp_rank=dp, dp_size=2, tp_rank=tp, tp_size=2)
    for engine in ranks.values():
        engine.result()
    for round_ in range(4):
        inputs = [random_inputs(rng, 5 + 20 * dp + round_, 3) for dp in range(2)]
        for (dp, _), engine in ranks.items():
            assert prepare(engine, inputs[dp]) == 2 * round_ + 1
        for (dp, _), engine in ranks.items():
            assert is_right(engine, made["one"], inputs[dp])
            engine.check()
            engine.release()
        # one DP rank has nothing to do: it runs a dummy, on all its TP ranks, and keeps count
        for (dp, _), engine in ranks.items():
            assert prepare(engine, inputs[0]) == 2 * round_ + 2 if dp == 0 else engine.prepare([1], dummy=True)
        for (dp, _), engine in ranks.items():
            assert is_right(engine, made["one"], inputs[0]) if dp == 0 else not engine.take(0).any()
            engine.release()


def test_a_step_is_looked_up_once_and_only_tp_rank_0_publishes(
    made: dict[str, Made], engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    with contextlib.ExitStack() as stack:
        worker, address = stack.enter_context(worker_thread(served(made["one"], stack)))
        ranks = [begin_connect(engines(), address, session="once", tp_rank=tp, tp_size=3) for tp in range(3)]
        for engine in ranks:
            engine.result()
        for _ in range(5):
            inputs = random_inputs(rng, 20, 3)
            for engine in reversed(ranks):  # the others may be early: they only count
                prepare(engine, inputs)
            for engine in ranks:
                assert is_right(engine, made["one"], inputs)
                engine.release()
        counters = worker._sessions["once"].layers
        assert {layer: (count.steps, count.rows) for layer, count in counters.items()} == dict.fromkeys(
            (1, 3), (5, 400)
        )
        source = (
            "from ple_offload.ipc import words\n"
            "t = connector._transport\n"
            "result = int(words.load_word(t._announced)), len(t._heads), t.layout.input_bytes"
        )
        found = [engine.run(source) for engine in ranks]
        assert found[0][:2] == (5, 2)
        assert found[0][2] > 0
        assert found[1:] == [(0, 0, 0)] * 2, "a TP rank other than 0 has no inputs, and announces nothing"


def test_a_failed_step_fails_on_every_tp_rank_of_its_dp_rank_and_on_no_other(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    ranks = {(dp, tp): engines() for dp in range(2) for tp in range(2)}
    for (dp, tp), engine in ranks.items():
        begin_connect(engine, serving.address, session="failing", dp_rank=dp, dp_size=2, tp_rank=tp, tp_size=2)
    for engine in ranks.values():
        engine.result()
    good = random_inputs(rng, 20, 3)
    bad = Inputs(np.where(np.arange(20) == 7, -1, good.ids), good.starts, good.context, 20)
    steps = {(dp, tp): prepare(engine, bad if dp == 1 else good) for (dp, tp), engine in ranks.items()}
    for (dp, tp), engine in ranks.items():
        if dp == 0:
            assert is_right(engine, made["one"], good)
            engine.check(steps[dp, tp])
        else:
            assert all_nan(engine.take(0))
            assert all_nan(engine.take(1))
            with pytest.raises(StepError, match=r"DP 1 TP 0 step 1 layer 1: input_ids\[7\] = -1"):
                engine.check(steps[dp, tp])
        engine.release()
    for engine in ranks.values():
        prepare(engine, good)
        assert is_right(engine, made["one"], good)
        engine.release()


def test_a_lagging_tp_rank_keeps_its_rows_until_it_has_released_them(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    limits = {"no_progress_s": 2.0}
    fast, slow = (
        begin_connect(engines(), serving.address, session="lag", tp_rank=tp, tp_size=2, staging="async", limits=limits)
        for tp in range(2)
    )
    fast.result(), slow.result()
    steps = [random_inputs(rng, 20 + i, 3) for i in range(5)]
    for inputs in steps[:2]:
        prepare(slow, inputs)
        prepare(fast, inputs)
        assert is_right(fast, made["one"], inputs)
        fast.release()
    prepare(fast, steps[2])  # its slot is the one that the slow rank has not read yet
    fast.begin("take", 0)
    time.sleep(2.5)  # longer than no_progress_s: a worker that waits for a rank is not a silent one
    assert not connected(fast)
    assert is_right(slow, made["one"], steps[0])
    slow.release()
    specs = made["one"].spec.tables
    assert same(fast.result(), reference(specs[0], made["one"].raw[1], steps[2], "bf16"))
    assert is_right(fast, made["one"], steps[2], layers=(1,))
    fast.release()
    prepare(slow, steps[2])
    for inputs in steps[1:3]:
        assert is_right(slow, made["one"], inputs)
        slow.release()
    for inputs in steps[3:]:
        for engine in (fast, slow):
            prepare(engine, inputs)
            assert is_right(engine, made["one"], inputs)
            engine.release()


def test_requests_that_pile_up_are_queued_and_none_is_dropped(
    made: dict[str, Made], engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    """Four steps are published while the worker stands still; it serves them all, in order."""
    with SpawnedWorker(made["one"].path, tier="file", threads=1) as own:
        engine = begin_connect(engines(), own.address, staging="async", max_concurrent_batches=4)
        engine.result()
        for _ in range(3):
            steps = [random_inputs(rng, 20 + i, 3) for i in range(4)]
            os.kill(own.pid, signal.SIGSTOP)
            try:
                for inputs in steps:
                    prepare(engine, inputs)
                with pytest.raises(UsageError, match="at most 4 steps in flight"):
                    prepare(engine, steps[0])
            finally:
                os.kill(own.pid, signal.SIGCONT)
            for inputs in steps:
                assert is_right(engine, made["one"], inputs)
            for _ in steps:
                engine.release()


# ---- who is let in ------------------------------------------------------------------------------------------------


def test_ranks_that_do_not_belong_together_are_refused(serving: SpawnedWorker, engines: Callable[[], Engine]) -> None:
    waiting = begin_connect(engines(), serving.address, session="belong", dp_size=2)
    time.sleep(0.3)
    other = engines()
    for options, message in (
        ({"dp_rank": 0}, "expected one connection of DP rank 0 TP rank 0, found two. Give every engine"),
        ({"dp_rank": 1, "worker_id": 0}, "worker id 0 is already connected"),
        ({"dp_rank": 1, "max_num_tokens": 65}, "expected max_num_tokens 64, as its other ranks said, found 65"),
        ({"dp_rank": 1, "max_num_reqs": 9}, "expected max_num_reqs 8"),
        ({"dp_rank": 1, "tp_size": 2}, "expected tp_size 1"),
        ({"dp_rank": 1, "dp_size": 3}, "expected dp_size 2"),
        ({"dp_rank": 1, "max_concurrent_batches": 3}, "expected slots 2"),
        ({"dp_rank": 1, "layers": (1,)}, "session 'belong' reads other tables"),
        ({"dp_rank": 1, "output": "values"}, "expected layers "),
        ({"dp_rank": 1, "checkpoint": "two"}, "session 'belong' reads other tables"),
    ):
        with pytest.raises(ProtocolError, match=message):
            begin_connect(other, serving.address, **{"session": "belong", "dp_size": 2, **options}).result()
        assert not connected(waiting)
    begin_connect(other, serving.address, session="belong", dp_size=2, dp_rank=1, worker_id=7).result()
    waiting.result()


def test_a_session_that_is_not_complete_in_time_says_what_it_waits_for(
    serving: SpawnedWorker, engines: Callable[[], Engine]
) -> None:
    lonely = begin_connect(engines(), serving.address, session="lonely", tp_size=2, limits={"ready_s": 0.3})
    with pytest.raises(ConnectionLostError, match=r"limit ready_s.*every rank.*Session 'lonely' needs 1 x 2 ranks"):
        lonely.result()
    # it has left no trace: the same rank may come again, and now its partner comes too
    partner = begin_connect(engines(), serving.address, session="lonely", tp_rank=1, tp_size=2)
    begin_connect(lonely, serving.address, session="lonely", tp_size=2).result()
    partner.result()


def test_an_engine_that_died_comes_back_under_its_old_name(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    for _ in range(3):
        engine = begin_connect(engines(), serving.address, session="reborn")
        engine.result()
        inputs = random_inputs(rng, 20, 3)
        for _ in range(2):
            assert prepare(engine, inputs) > 0
            assert is_right(engine, made["one"], inputs)
            engine.release()
        prepare(engine, inputs)
        engine.kill()
        assert engine.exit_status() == -signal.SIGKILL


# ---- several sessions, checkpoints, families ----------------------------------------------------------------------


def test_two_processes_with_two_checkpoints_on_one_worker(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine], rng: np.random.Generator
) -> None:
    pair = {name: begin_connect(engines(), serving.address, name, session=name) for name in made}
    for engine in pair.values():
        engine.result()
    for _ in range(5):
        inputs = {name: random_inputs(rng, 30, 4) for name in made}
        for name, engine in pair.items():
            prepare(engine, inputs[name])
        for name, engine in reversed(pair.items()):
            assert is_right(engine, made[name], inputs[name])
            engine.release()
    same_ids = random_inputs(rng, 30, 4)
    for engine in pair.values():
        prepare(engine, same_ids)
    one, two = (engine.take(0) for engine in pair.values())
    assert not same(one, two), "two checkpoints gave the same rows: this test would not see them mixed up"


def test_a_flood_of_large_steps_does_not_starve_another_rank(made: dict[str, Made], rng: np.random.Generator) -> None:
    """Turns, step by step: the worker stands in the first lookup while one rank has four more steps and another two."""
    with contextlib.ExitStack() as stack:
        worker, address = stack.enter_context(worker_thread(served(made["one"], stack)))
        options = {"session": "turns", "dp_size": 2, "max_concurrent_batches": 5, "checkpoint": "one"}
        ranks: list[Rank] = []

        def connect(dp_rank: int) -> None:
            ranks.append(Rank.of(made["one"], address, dp_rank=dp_rank, **options))

        threads = [threading.Thread(target=connect, args=(dp_rank,)) for dp_rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for one in ranks:
            stack.enter_context(one)
        flooding, calm = sorted(ranks, key=lambda one: one.config.dp_rank)
        served_steps: list[tuple[int, int]] = []
        begun, go_on = threading.Event(), threading.Event()
        serve = worker._serve

        def gated(lane: Any, step: int) -> None:
            served_steps.append((lane.dp_rank, step))
            begun.set()
            assert go_on.wait(20)
            serve(lane, step)

        worker._serve = gated  # type: ignore[method-assign]
        large, small = random_inputs(rng, 64, 8), random_inputs(rng, 1, 1)
        flooding.prepare(large)
        assert begun.wait(20)
        for _ in range(4):
            flooding.prepare(large)
        for _ in range(2):
            calm.prepare(small)
        go_on.set()
        for _ in range(2):
            assert calm.right(calm.forward(1), small)
        for _ in range(5):
            assert flooding.right(flooding.forward(64), large)
        order = [dp_rank for dp_rank, _ in served_steps]
        assert sorted(served_steps) == [*((0, step) for step in range(1, 6)), (1, 1), (1, 2)]
        # while both have steps they take turns, whoever was heard first
        assert order[1:5] in ([0, 1, 0, 1], [1, 0, 1, 0]), order


FLOOD = """
import time
from engine import same
end, count = time.monotonic() + seconds, 0
first = None
while time.monotonic() < end:
    engine.prepare(ids)
    rows = engine.take(0)
    engine.release()
    first = rows if first is None else first
    assert same(rows, first)
    count += 1
result = count
"""


def test_both_progress_in_real_processes(
    made: dict[str, Made], serving: SpawnedWorker, engines: Callable[[], Engine]
) -> None:
    large, small = engines(), engines()
    begin_connect(large, serving.address, session="large", layers=(1,), max_num_tokens=8192).result()
    begin_connect(small, serving.address, session="small", layers=(1,)).result()
    large.begin("run", FLOOD, ids=[5] * 8192, seconds=1.0)
    small.begin("run", FLOOD, ids=[1, 2, 3], seconds=1.0)
    assert large.result() >= 3
    assert small.result() >= 10


@dataclass(frozen=True)
class Plain:
    """A rule that does not look back: token t reads rows 3t, 3t + 1, 3t + 2. No released family is like this yet."""

    vocab_size: int = 40
    name: str = "plain"
    context_len: int = 0
    filler: int = 0
    rows_per_token: int = 3
    num_rows: int = 120

    def row_numbers_reference(self, input_ids: Any, query_start_loc: Any, ngram_context: Any) -> Any:
        return input_ids[: query_start_loc[-1], None] * 3 + np.arange(3)

    def row_numbers(self, input_ids: Any, query_start_loc: Any, ngram_context: Any, out: Any) -> int:
        assert ngram_context.shape == (len(query_start_loc) - 1, 0)
        ids = input_ids[: query_start_loc[-1]]
        bad = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        out[...] = ids[:, None] * 3 + np.arange(3)
        return int(bad[0]) if bad.size else -1


@pytest.mark.parametrize("place", ["inline", "worker"])
@pytest.mark.parametrize("request_kind", ["tokens", "rows"])
def test_a_family_that_does_not_look_back_takes_no_context(
    tmp_path: Path, rng: np.random.Generator, place: str, request_kind: str
) -> None:
    row_format = RowFormat("bf16", 16)
    raw = rng.standard_normal(120 * 16).astype(row_format.stored_dtype).tobytes()
    (tmp_path / "rows").write_bytes(raw)
    spec = TableSpec(Plain(), row_format, 0, 120, (Segment(tmp_path / "rows", 0, 0, 120),), False)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(Table(spec, FileStore(spec.segments, spec.row_bytes, name="plain"), threads=1))
        address = "inline"
        if place == "worker":
            _, address = stack.enter_context(worker_thread(Served(tmp_path, {0: table})))
        options: dict[str, Any] = {"request": request_kind, "opened": {0: table}}
        one = stack.enter_context(Rank([spec], {0: raw}, address, **options))
        for tokens, reqs in ((1, 1), (0, 3), (50, 7), (64, 8)):
            inputs = random_inputs(rng, tokens, reqs, vocab=40, context_len=0, padded=64)
            assert one.right(one.run(inputs), inputs)
        if request_kind == "tokens":
            one.load(inputs)
            one.ids[3] = 40
            one.connector.prepare_forward(8, 64)
            with pytest.raises(StepError, match=r"input_ids\[3\] = 40: expected a token id from 0 to 39"):
                one.forward(64)
            one.connector.release_outputs()
            one.close()
            from ple_offload.connector import PleOffloadConnector

            with pytest.raises(UsageError, match="ngram_context: expected None for a family that does not look back"):
                PleOffloadConnector(
                    one.config,
                    one.model,
                    "cpu",
                    address,
                    input_ids_source=one.ids,
                    query_start_loc_source=one.starts,
                    ngram_context_source=one.context,
                    tables={0: table},
                )
