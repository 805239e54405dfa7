"""What a connector refuses, by name and with what was expected and found; and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint import tiny
from connector.rig import Made, Rank, make, random_inputs
from ple_offload.connector import ConnectorConfig, PleOffloadConnector, registry
from ple_offload.connector.config import Limits
from ple_offload.errors import ConnectionLostError, PleOffloadError, ProtocolError, UsageError
from ple_offload.layer import PleOffloadLayer
from ple_offload.spec import fingerprint
from ple_offload.worker.spawn import SpawnedWorker


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def sources(**changes: Any) -> dict[str, Any]:
    good = {
        "input_ids_source": torch.zeros(64, dtype=torch.int64),
        "query_start_loc_source": torch.zeros(9, dtype=torch.int32),
        "ngram_context_source": torch.zeros((8, 2), dtype=torch.int32),
    }
    return {**good, **changes}


@pytest.fixture
def connect(made: dict[str, Made], worker: SpawnedWorker, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """connect(sources, model=..., **options): a connector of the BF16 checkpoint, closed at once; leaks are failures."""
    spec = made["BF16"].spec

    def connect_and_close(given: dict[str, Any], model: Any = None, device: Any = "cpu", **options: Any) -> None:
        options = {"checkpoint": "BF16", "session": request.node.name[:200], **options}
        model = model or torch.nn.ModuleList([PleOffloadLayer(t.layer, t.embed_dim) for t in spec.tables])
        before, served = descriptors(), len(registry._served)
        try:
            PleOffloadConnector(ConnectorConfig(64, 8, **options), model, device, worker.address, **given).close()
        finally:
            assert descriptors() == before
            assert len(registry._served) == served

    return connect_and_close


def test_good_sources_connect(connect: Callable[..., Any]) -> None:
    connect(sources())
    connect(sources(input_ids_source=torch.zeros(100, dtype=torch.int32), query_start_loc_source=torch.zeros(10).int()))
    rows = {layer: torch.zeros((64, 4), dtype=torch.int64) for layer in (1, 3)}
    connect({"row_numbers_source": rows}, request="rows")


BAD_SOURCES = {
    "missing ids": (sources(input_ids_source=None), r"input_ids: expected .*found None"),
    "missing starts": (sources(query_start_loc_source=None), r"query_start_loc: expected .*found None"),
    "missing context": (sources(ngram_context_source=None), r"ngram_context: expected .*found None"),
    "dtype": (
        sources(input_ids_source=torch.zeros(64, dtype=torch.int16)),
        r"input_ids: expected a CPU tensor of int32 or int64 of shape >= 64, found torch.int16 of shape \[64\] on cpu",
    ),
    "floats": (sources(input_ids_source=torch.zeros(64)), r"input_ids: .*found torch.float32"),
    "short": (
        sources(query_start_loc_source=torch.zeros(8, dtype=torch.int32)),
        r"query_start_loc: .*>= 9, found .*\[8\]",
    ),
    "rank": (
        sources(ngram_context_source=torch.zeros(16, dtype=torch.int32)),
        r"ngram_context: .*>= 8 x 2, found .*\[16\]",
    ),
    "width": (
        sources(ngram_context_source=torch.zeros((8, 3), dtype=torch.int32)),
        r"ngram_context: .*>= 8 x 2, found .*\[8, 3\]",
    ),
    "device": (
        sources(input_ids_source=torch.zeros(64, dtype=torch.int64, device="meta")),
        r"input_ids: expected a CPU tensor .*found .* on meta",
    ),
    "rows with tokens": (sources(row_numbers_source={}), r"row_numbers: expected None with request 'tokens'"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_source_that_does_not_fit_is_named(connect: Callable[..., Any], case: str) -> None:
    given, message = BAD_SOURCES[case]
    with pytest.raises(UsageError, match=message):
        connect(given)


def test_all_sources_on_a_foreign_device_are_refused(connect: Callable[..., Any]) -> None:
    foreign = {name: source.to("meta") for name, source in sources().items()}
    for staging in ("auto", "async", "mirror"):
        with pytest.raises(UsageError, match=r"input_ids: .*on meta"):
            connect(foreign, staging=staging)


def test_row_number_sources_are_checked(connect: Callable[..., Any]) -> None:
    rows = {layer: torch.zeros((64, 4), dtype=torch.int64) for layer in (1, 3)}
    for given, message in (
        (
            {"row_numbers_source": {1: rows[1]}},
            r"row_numbers: expected one source for each of layers \[1, 3\], found \[1\]",
        ),
        ({}, r"row_numbers: expected .*found \[\]"),
        ({"row_numbers_source": {**rows, 3: torch.zeros((64, 5)).long()}}, r"row_numbers\[3\]: .*>= 64 x 4.*\[64, 5\]"),
        ({"row_numbers_source": {**rows, 3: torch.zeros((63, 4)).long()}}, r"row_numbers\[3\]: .*\[63, 4\]"),
        ({"row_numbers_source": rows, **sources()}, r"input_ids: expected None with request 'rows'"),
    ):
        with pytest.raises(UsageError, match=message):
            connect(given, request="rows")


def test_a_model_that_cannot_be_served_is_refused(connect: Callable[..., Any]) -> None:
    def model(*layers: tuple[Any, ...]) -> torch.nn.Module:
        return torch.nn.ModuleList([PleOffloadLayer(*layer) for layer in layers])

    for wrong, message in (
        (torch.nn.Linear(2, 2), "at least one PleOffloadLayer, found none in Linear"),
        (model((1, 63)), "layer 1: expected an output of 64 elements a token, as the table has, found 63"),
        (model((2, 64)), r"expected tables of layers \[2\], found \[1, 3\]"),
        (model((1, 64), (1, 64)), r"one PleOffloadLayer for a decoder layer, found \[1, 1\]"),
        (model((1, 64, torch.int8)), "layer 1: output dtype: expected bfloat16, float16 or float32, found torch.int8"),
    ):
        with pytest.raises(UsageError, match=message):
            connect(sources(), wrong)
    with pytest.raises(UsageError, match="device: expected 'cpu' or 'cuda', found 'meta'"):
        connect(sources(), device="meta")


def test_one_layer_of_several_may_be_served(made: dict[str, Made], worker: SpawnedWorker) -> None:
    checkpoint = made["F16"]
    with Rank([checkpoint.spec.table(3)], checkpoint.raw, worker.address, checkpoint="F16", session="one layer") as one:
        inputs = random_inputs(np.random.default_rng(0), 20, 3)
        assert one.right(one.run(inputs), inputs)


def test_a_layer_is_served_by_one_connector(rank: Callable[..., Rank], worker: SpawnedWorker) -> None:
    one = rank()
    before = descriptors()
    options = ConnectorConfig(64, 8, checkpoint="BF16", session="twice")
    with pytest.raises(UsageError, match=r"layer number \d+: expected a layer that no connector serves"):
        PleOffloadConnector(options, one.model, "cpu", worker.address, **sources())
    assert descriptors() == before
    inputs = random_inputs(np.random.default_rng(0), 20, 3)
    assert one.right(one.run(inputs), inputs)  # the first one is unharmed
    one.close()
    PleOffloadConnector(options, one.model, "cpu", worker.address, **sources()).close()


@pytest.mark.parametrize("place", ["worker", "inline"])
def test_a_table_with_another_fingerprint_is_refused(
    made: dict[str, Made], worker: SpawnedWorker, place: str, request: pytest.FixtureRequest
) -> None:
    """Two checkpoints of one worker; the zeroed twin has the same shape and rule, and other bytes."""
    from ple_offload import open_table

    spec = made["BF16"].spec
    prints = {table.layer: fingerprint(table) for table in spec.tables}
    for name in ("BF16", "zero"):
        opened = {t.layer: open_table(made[name].path, t.layer, "file") for t in spec.tables}
        address, options = ("inline", {"opened": opened}) if place == "inline" else (worker.address, {})
        try:
            if name == "BF16":
                Rank.of(made[name], address, fingerprints=prints, session="prints", **options).close()
                continue
            with pytest.raises(
                (ProtocolError, UsageError), match=rf"layer 1.*expected the table with fingerprint {prints[1]}"
            ):
                Rank.of(made[name], address, fingerprints=prints, session="prints", **options)
            with pytest.raises((ProtocolError, UsageError), match=r"layer 3.*given different checkpoints"):
                Rank.of(made[name], address, fingerprints={3: prints[3]}, session="prints", **options)
        finally:
            for table in opened.values():
                table.close()


def test_a_checkpoint_must_be_named_where_there_are_several(made: dict[str, Made], worker: SpawnedWorker) -> None:
    for name in ("", "other"):
        with pytest.raises(ProtocolError, match=rf"expected one of the checkpoints .*BF16.*found '{name}'"):
            Rank.of(made["BF16"], worker.address, checkpoint=name)
    Rank.of(made["BF16"], worker.address, checkpoint=str(made["BF16"].path), session="by path").close()


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"staging": "fast"}, "staging: expected one of auto, async, mirror, found 'fast'"),
    ({"request": "ids"}, "request: expected one of tokens, rows"),
    ({"output": "bf16"}, "output: expected one of stored, values"),
    ({"dp_size": "2"}, "dp_size: expected an integer from 1 to 1024, found '2'"),
    ({"session": None}, "session: expected a name of 1 to 200 characters, found None"),
    ({"dp_rank": 2, "dp_size": 2}, "dp_rank: expected an integer from 0 to 1, found 2"),
    ({"tp_rank": -1}, "tp_rank: expected an integer from 0 to 0, found -1"),
    ({"max_concurrent_batches": 0}, "max_concurrent_batches: expected an integer from 1 to 64"),
    ({"worker_id": -2}, "worker_id: expected an integer from -1 to"),
    ({"worker_id": True}, "worker_id: expected an integer"),
    ({"session": ""}, "session: expected a name"),
    ({"session": "x" * 201}, "session: expected a name"),
    ({"max_num_tokens": 0}, "max_num_tokens: expected an integer from 1"),
    ({"max_num_reqs": 1.5}, "max_num_reqs: expected an integer from 1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConnectorConfig(**{"max_num_tokens": 8, "max_num_reqs": 8, **options})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_every_limit_is_a_limit(value: float) -> None:
    with pytest.raises(UsageError, match=r"Limits\.ready_s: expected 0 to 1000000 seconds"):
        Limits(ready_s=value)


def test_worker_ids_count_every_rank(made: dict[str, Made]) -> None:
    ids = [
        ConnectorConfig(8, 8, dp_rank=dp, dp_size=2, tp_rank=tp, tp_size=3).worker_id
        for dp in range(2)
        for tp in range(3)
    ]
    assert ids == list(range(6))
    assert ConnectorConfig(8, 8, worker_id=17).worker_id == 17  # pipeline ranks are counted by the engine


def test_nobody_at_the_address(made: dict[str, Made]) -> None:
    before, started = descriptors(), time.monotonic()
    with pytest.raises(ConnectionLostError, match=r"connecting failed within 0.2 s.*Is `ple-offload serve` running"):
        Rank.of(made["BF16"], "unix:@ple-offload-nobody", limits=Limits(connect_s=0.2))
    assert time.monotonic() - started < 5
    assert descriptors() == before
    with pytest.raises(UsageError, match="address: expected unix:/path/to/socket, found 'tcp:1'"):
        Rank.of(made["BF16"], "tcp:1")
    with pytest.raises(UsageError, match=r"worker 'inline': expected open tables for layers \[1, 3\], found \[\]"):
        Rank.of(made["BF16"], "inline")


def test_close_is_safe_twice_and_ends_everything(rank: Callable[..., Rank]) -> None:
    one = rank()
    inputs = random_inputs(np.random.default_rng(0), 20, 3)
    one.run(inputs)
    one.prepare(inputs)
    one.close()
    one.close()
    for call in (
        lambda: one.connector.prepare_forward(1, 1),
        lambda: one.connector.signal_dummy_outputs(1),
        lambda: one.connector.check(),
        lambda: one.connector.release_outputs(),
        lambda: one.connector.reconnect(),
    ):
        with pytest.raises(UsageError, match="the connector is closed"):
            call()
    with pytest.raises(UsageError, match="no connector serves this layer"):
        one.forward(20)


def test_a_connector_whose_reconnect_failed_says_so_and_touches_nothing(made: dict[str, Made]) -> None:
    """Its old buffers are unmapped: using them would be the end of the process."""
    checkpoint = made["BF16"]
    with SpawnedWorker(checkpoint.path, tier="file", threads=1) as own:
        one = Rank.of(checkpoint, own.address, limits=Limits(connect_s=0.1))
        inputs = random_inputs(np.random.default_rng(0), 20, 3)
        assert one.right(one.run(inputs), inputs)
    for _ in range(2):
        with pytest.raises(ConnectionLostError):
            one.connector.reconnect()
        for call in (lambda: one.prepare(inputs), lambda: one.run(inputs)):
            with pytest.raises(PleOffloadError):
                call()
    one.close()


@pytest.mark.parametrize(
    "change",
    [
        {},  # other values
        {"ple_embed_dim": 128},
        {"ple_embed_dim": 32},
        {"ngram_vocab_size_base": 30},
        {"ngram_size": 5, "heads_per_ngram": 1},
        {"ngram_size": 2, "heads_per_ngram": 4},
        {"vocab_size": 900},
    ],
    ids=str,
)
@pytest.mark.parametrize("output", ["stored", "values"])
def test_a_worker_with_another_table_is_refused_by_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], output: str
) -> None:
    """Buffers are sized for the first one's rows."""
    right = make(tmp_path / "right" / "it")
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "CONFIG", {**tiny.CONFIG, **change})
        patch.setattr(tiny, "ROW_DIM", tiny.CONFIG["ple_embed_dim"] // 4)
        wrong = make(tmp_path / "wrong" / "it", seed=1)
    inputs = random_inputs(np.random.default_rng(0), 20, 3)
    with (
        SpawnedWorker(right.path, tier="file", threads=1) as first,
        SpawnedWorker(wrong.path, tier="file", threads=1) as second,
    ):
        one = Rank.of(right, first.address, output=output)
        assert one.right(one.run(inputs), inputs)
        for _ in range(2):
            with pytest.raises(
                (UsageError, ProtocolError),  # of the worker, where the rows that travel would not fit
                match=r"layer 1: expected the table of the first connection again|expected a region of \d+ bytes",
            ):
                one.connector.reconnect(second.address)
            for call in (lambda: one.prepare(inputs), lambda: one.run(inputs)):
                with pytest.raises(PleOffloadError):
                    call()
        one.connector.reconnect(first.address)
        assert one.right(one.run(inputs), inputs)
        one.close()


def test_connections_leave_no_descriptors_maps_or_threads(made: dict[str, Made], worker: SpawnedWorker) -> None:
    def held(pid: int) -> tuple[int, int, int]:
        proc = Path(f"/proc/{pid}")
        maps = sum("ple-offload" in line for line in (proc / "maps").read_text().splitlines())
        return len(list((proc / "fd").iterdir())), maps, len(list((proc / "task").iterdir()))

    def connect_and_run(session: str) -> None:
        with Rank.of(made["BF16"], worker.address, session=session) as one:
            inputs = random_inputs(np.random.default_rng(0), 20, 3)
            one.run(inputs)
            one.prepare(inputs)  # left in flight

    def settled() -> tuple[tuple[int, int, int], ...]:
        """What both hold once it no longer changes: the worker hears of a goodbye a little later."""
        limit, found, since = time.monotonic() + 10, None, time.monotonic()
        while time.monotonic() < min(limit, since + 0.4):
            now = held(os.getpid()), held(worker.pid)
            if now != found:
                found, since = now, time.monotonic()
            time.sleep(0.02)
        assert found is not None
        return found

    connect_and_run("leaks")
    before = settled()
    for i in range(10):
        connect_and_run("leaks" if i % 2 else f"leaks {i}")
    assert settled() == before


PROGRAM = """
import sys, torch
from pathlib import Path
from connector.rig import Made, Rank, random_inputs
import numpy as np
one = Rank.of(Made(Path(sys.argv[1]), {1: b"", 3: b""}), sys.argv[2], session="exit")
one.run(random_inputs(np.random.default_rng(0), 20, 3))
one.prepare(random_inputs(np.random.default_rng(0), 20, 3))
print("ready", flush=True)
if sys.argv[3] == "raise":
    raise KeyError("on purpose")
"""


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_a_process_that_ends_without_closing_says_goodbye(
    made: dict[str, Made], worker: SpawnedWorker, ending: str
) -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(made["BF16"].path), worker.address, ending],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "ready\n", done.stderr
    assert done.returncode == (ending == "raise")
    assert ("on purpose" in done.stderr) == (ending == "raise")
    left = [line for line in worker.log_path.read_text().splitlines() if "'exit' DP 0 TP 0 left" in line]
    assert left
    assert "WARNING" not in left[-1]
