"""An open table against the plain NumPy reference: every format, tier, dtype, kind of input; and every refusal."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ple_offload
from checkpoint import tiny
from ple_offload import (
    CheckpointError,
    ForkError,
    MemoryLimitError,
    StoreError,
    Table,
    TokenIdError,
    UsageError,
    native,
    open_table,
)
from ple_offload import table as table_module
from ple_offload.formats import VALUE_DTYPES
from ple_offload.memory import limits, mapping
from ple_offload.spec import fingerprint, inspect
from support import forked

IDS = np.array([1, 7, 7, 3, 999, 0, 7, 12, 13, 14, 15, 900] * 5)
STARTS = np.array([0, 1, 1, 20, 60])
CONTEXT = np.array([[3, 4], [7, 1], [5, 7], [0, 999]])


def expected(table: Table, raw: bytes, dtype: str) -> np.ndarray:
    """Values [num_tokens, embed_dim] by the specification: reference rows, reference bytes, reference decode."""
    spec = table.spec
    rows = spec.family.row_numbers_reference(IDS, STARTS, CONTEXT)
    stored = np.frombuffer(raw, np.uint8).reshape(-1, spec.row_bytes)
    return spec.format.decode_reference(stored[rows], dtype).reshape(len(IDS), -1)


def bits(values: Any) -> np.ndarray:
    """Values as float32 with NaN made equal; exact for every value dtype."""
    return np.nan_to_num(np.asarray(values).astype(np.float32), nan=12345.0, posinf=1e38, neginf=-1e38)


@pytest.fixture(params=["BF16", "F16", "F32", "F8_E4M3"])
def stored(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["ram", "file"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with open_table(tiny.write_default(tmp_path), tier="file") as opened:
        yield opened


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_lookups_equal_the_reference(tmp_path: Path, stored: str, tier: str, dtype: str) -> None:
    raw = tiny.table_bytes(tiny.ROWS, stored)
    folder = tiny.write_default(tmp_path, dtype=stored, cuts=(50, 77), data=raw)
    with open_table(folder, tier=tier, threads=2) as table:
        assert table.tier == tier
        for parallel_rows in (0, 10**9):
            table.parallel_rows = parallel_rows
            want = expected(table, raw, dtype)
            found = table.lookup(IDS, STARTS, CONTEXT, dtype=dtype)
            assert found.dtype == VALUE_DTYPES[dtype]
            assert np.array_equal(bits(found), bits(want))
            rows = table.row_numbers(IDS, STARTS, CONTEXT)
            assert np.array_equal(bits(table.gather(rows, dtype=dtype).reshape(found.shape)), bits(want))


def test_a_zeroed_table_fails_the_comparison(tmp_path: Path, stored: str) -> None:
    """The negative control: the comparison above must see it when the rows are not the table's."""
    raw = tiny.table_bytes(tiny.ROWS, stored)
    folder = tiny.write_default(tmp_path, dtype=stored, data=bytes(len(raw)))
    with open_table(folder, tier="ram") as table:
        found = table.lookup(IDS, STARTS, CONTEXT)
        assert not bits(found).any()
        assert not np.array_equal(bits(found), bits(expected(table, raw, table.spec.format.value_dtype)))


def test_the_natural_dtype_is_the_stored_one_and_bf16_for_fp8(tmp_path: Path, stored: str) -> None:
    natural = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "bfloat16"}[stored]
    with open_table(tiny.write_default(tmp_path, dtype=stored), tier="file") as table:
        assert table.lookup([1, 2]).dtype.name == natural


def test_torch_in_torch_out_and_numpy_in_numpy_out(table: Table) -> None:
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    want = table.lookup(IDS, STARTS, CONTEXT)
    for width in (torch.int32, torch.int64):
        inputs = [torch.from_numpy(x).to(width) for x in (IDS, STARTS, CONTEXT)]
        found = table.lookup(*inputs)
        assert found.dtype == torch.bfloat16
        assert np.array_equal(found.view(torch.int16).numpy(), want.view(np.int16))
        rows = table.row_numbers(*inputs)
        assert rows.dtype == torch.int64
        assert table.gather(rows, dtype=torch.float32).dtype == torch.float32
        out = torch.empty_like(found)
        assert table.lookup(*inputs, out=out) is out
        assert torch.equal(out.view(torch.int16), found.view(torch.int16))
        mixed = np.zeros_like(want)
        assert table.lookup(*inputs, out=mixed) is mixed
        assert np.array_equal(mixed.view(np.int16), want.view(np.int16))


def test_every_integer_width_and_plain_lists_give_the_same(table: Table) -> None:
    want = table.lookup(IDS).tobytes()
    for dtype in (np.int16, np.uint16, np.int32, np.uint32, np.uint64):
        assert table.lookup(IDS.astype(dtype)).tobytes() == want
    assert table.lookup(IDS.tolist()).tobytes() == want
    assert table.lookup(np.repeat(IDS, 2)[::2]).tobytes() == want


def test_out_buffers_are_filled_in_place(table: Table) -> None:
    rows = table.row_numbers(IDS)
    numbers = np.zeros_like(rows)
    assert table.row_numbers(IDS, out=numbers) is numbers
    assert np.array_equal(numbers, rows)
    values = np.zeros((*rows.shape, table.row_dim), ml_dtypes.bfloat16)
    assert table.gather(rows, out=values) is values
    assert values.tobytes() == table.gather(rows).tobytes() == table.lookup(IDS).tobytes()


def test_empty_inputs_give_empty_results(table: Table) -> None:
    assert table.lookup([]).shape == (0, table.embed_dim)
    assert table.lookup([], [0, 0, 0]).shape == (0, table.embed_dim)
    assert table.lookup([], [0]).shape == (0, table.embed_dim)
    assert table.gather([]).shape == (0, table.row_dim)
    assert table.gather(np.empty((3, 0), np.int64)).shape == (3, 0, table.row_dim)


def test_padding_behind_the_last_request_is_not_looked_at(table: Table) -> None:
    padded = np.concatenate([IDS, [-1, 10**12]])
    assert table.lookup(padded, STARTS, CONTEXT).tobytes() == table.lookup(IDS, STARTS, CONTEXT).tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, -1],), r"input_ids\[1\] = -1: expected a token id from 0 to 999"),
        (([1000],), r"input_ids\[0\] = 1000"),
        (([1, 2], [0, 1, 2], [[7, 7], [7, -3]]), r"ngram_context\[1, 1\] = -3"),
        (([1.0],), "input_ids: expected integers, found float64"),
        (([True],), "input_ids: expected integers, found bool"),
        (([[1]],), r"input_ids: expected 1 dimension, found shape \[1, 1\]"),
        (([1], []), "num_reqs \\+ 1 values"),
        (([1], [1, 1]), r"query_start_loc\[0\] = 1"),
        (([1], [0, 2]), r"query_start_loc\[1\] = 2"),
        (([1, 2], [0, 2, 1]), r"query_start_loc\[2\] = 1"),
        (([1], [0, -1]), r"query_start_loc\[1\] = -1"),
        (([1], [0, 1], [[7]]), r"ngram_context: expected shape .* = \[1, 2\], found \[1, 1\]"),
        (([1], None, [[7, 7], [7, 7]]), r"ngram_context: expected shape"),
        (([1], [0, 1], [7, 7]), "ngram_context: expected 2 dimensions"),
        (([2**63],), r"input_ids\[0\] = 9223372036854775807"),
        (([2**64],), "input_ids: expected integers"),
        (([[1], [2, 3]],), "input_ids: expected integers, found lists of different lengths"),
    ],
)
def test_bad_input_is_named(table: Table, arguments: tuple[Any, ...], words: str) -> None:
    for method in (table.lookup, table.row_numbers):
        with pytest.raises(UsageError, match=words):
            method(*arguments)
    assert table.lookup([1]).shape == (1, table.embed_dim)  # and nothing is broken


@pytest.mark.parametrize("bad", [-1, tiny.ROWS, 2**62])
def test_a_row_number_outside_the_table_is_named(table: Table, bad: int) -> None:
    with pytest.raises(TokenIdError, match=rf"row number {bad} \(at index 2 of 3\): expected 0 to {tiny.ROWS - 1}"):
        table.gather([0, 1, bad])


def test_out_may_share_memory_with_the_inputs(table: Table) -> None:
    rows = table.row_numbers(IDS, STARTS, CONTEXT)
    buffer = np.zeros(rows.size + 200, np.int64)
    for place in (0, rows.size - len(IDS)):  # at the start and at the end of what is written
        for name in ("ids", "starts", "context"):
            arguments = {"ids": IDS, "starts": STARTS, "context": CONTEXT}
            inside = buffer[place : place + arguments[name].size].reshape(arguments[name].shape)
            inside[:] = arguments[name]
            arguments[name] = inside
            out = buffer[: rows.size].reshape(rows.shape)
            assert np.array_equal(table.row_numbers(*arguments.values(), out=out), rows), (name, place)
    values = table.gather(rows, dtype="fp32")
    buffer = np.zeros(values.size, np.float32)
    for place in (0, values.size - 2 * rows.size):
        inside = buffer[place : place + 2 * rows.size].view(np.int64).reshape(rows.shape)
        inside[:] = rows
        found = table.gather(inside, dtype="fp32", out=buffer.reshape(values.shape))
        assert found.tobytes() == values.tobytes()


def test_inputs_that_compiled_code_would_see_as_another_kind_compile_nothing(table: Table) -> None:
    from ple_offload.families import qwen_ple

    want = table.row_numbers(IDS, STARTS, CONTEXT)
    kinds = len(qwen_ple._row_numbers.signatures)
    unaligned = np.frombuffer(b"." + IDS.tobytes(), np.uint8)[1:].view(np.int64)
    read_only = np.frombuffer(IDS.tobytes(), np.int64)
    for ids in (unaligned, read_only, IDS.astype(">i8"), np.repeat(IDS, 2)[::2]):
        assert np.array_equal(table.row_numbers(ids, STARTS, np.broadcast_to(CONTEXT, CONTEXT.shape)), want)
    assert len(qwen_ple._row_numbers.signatures) == kinds


def test_a_sparse_tensor_is_refused(table: Table) -> None:
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    with pytest.raises(UsageError, match="input_ids: expected a dense tensor"):
        table.lookup(torch.ones(2, dtype=torch.int64).to_sparse())


def test_one_row_number_gives_one_row(table: Table) -> None:
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    for row in (3, np.int64(3), np.array(3), torch.tensor(3)):
        assert tuple(table.gather(row).shape) == (table.row_dim,)


def test_every_spelling_of_a_dtype(table: Table) -> None:
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    spellings = {
        "bf16": ["bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16],
        "fp16": ["fp16", "float16", np.float16, np.dtype(np.float16), torch.float16],
        "fp32": ["fp32", "float32", np.float32, np.dtype(np.float32), torch.float32],
    }
    for name, ways in spellings.items():
        for way in ways:
            assert table.lookup([1], dtype=way).dtype == VALUE_DTYPES[name]


def test_bad_out_buffers_and_dtypes_are_refused(table: Table) -> None:
    bf16 = ml_dtypes.bfloat16
    shape = (1, table.embed_dim)
    read_only = np.empty(shape, bf16)
    read_only.flags.writeable = False
    for out in (
        np.empty(shape, np.float32),
        np.empty((2, shape[1]), bf16),
        np.empty((1, 2 * shape[1]), bf16)[:, ::2],
        read_only,
        [],
    ):
        with pytest.raises(UsageError, match="out: expected"):
            table.lookup([1], out=out)
    with pytest.raises(UsageError, match="dtype: expected bf16, fp16, fp32"):
        table.lookup([1], dtype="int8")


def test_bad_options_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_default(tmp_path)
    with pytest.raises(UsageError, match="tier: expected one of auto, ram, file, found 'disk'"):
        open_table(folder, tier="disk")
    for threads in (0, 4097, 1.5, "2"):
        with pytest.raises(UsageError, match="threads: expected a whole number from 1 to 4096"):
            open_table(folder, threads=threads)
    with pytest.raises(UsageError, match=r"layer: expected one that has a table \(1; counted from 0\), found 2"):
        open_table(folder, layer=2)
    for path in (None, 5, "", b"x"):
        with pytest.raises(UsageError, match="checkpoint: expected a path or a model id"):
            open_table(path)  # type: ignore[arg-type]


def test_a_gather_writes_no_wider_rows_than_there_is_room_for(table: Table) -> None:
    cases = (("bf16", 16, 8, np.uint16), ("bf16", 16, 32, np.uint16), ("stored", 32, 16, np.uint8))
    for name, right, wrong, dtype in cases:
        with pytest.raises(UsageError, match=f"values: expected rows of {right} elements, found {wrong}"):
            table._gather_to(name).run(np.arange(3), np.empty((3, wrong), dtype), 1)


def test_nothing_that_holds_memory_is_copied(tmp_path: Path, tier: str) -> None:
    """Half a copy would give the memory back."""
    with open_table(tiny.write_default(tmp_path), tier=tier) as table:
        expected = table.lookup([1, 2])
        for held in (table, table.store, [table]):
            for take in (copy.copy, copy.deepcopy, pickle.dumps):
                if take is copy.copy and held == [table]:
                    continue
                with pytest.raises(
                    TypeError, match=r"(Table|Store): cannot be copied or pickled.*open the table again"
                ):
                    take(held)
        gc.collect()
        assert np.array_equal(table.lookup([1, 2]), expected)
        assert repr(table) == f"<Table of layer 1: 120 rows x 16 bf16, tier {tier}>"


def test_a_table_that_does_not_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.write_default(tmp_path)
    report = limits.MemoryReport(1 << 20, "MemAvailable", 1 << 30, 1 << 20, None, None)
    monkeypatch.setattr(limits, "available_memory", lambda root: report)
    with pytest.raises(MemoryLimitError, match=r"table layers.1 in tier 'ram': needs .*Use tier 'file'"):
        open_table(folder, tier="ram")
    with open_table(folder, tier="auto") as table:
        assert table.tier == "file"
    assert "tier 'file' for table layers.1" in caplog.text
    assert "Use tier 'file'" not in caplog.text  # it is used already
    monkeypatch.setenv("PLE_OFFLOAD_SKIP_MEMORY_CHECK", "1")
    with open_table(folder, tier="ram") as table:
        assert table.tier == "ram"


def test_auto_takes_ram_where_it_fits(tmp_path: Path) -> None:
    with open_table(tiny.write_default(tmp_path)) as table:
        assert table.tier == "ram"


def test_a_closed_table_says_so_and_close_waits_for_running_lookups(tmp_path: Path) -> None:
    table = open_table(tiny.write_default(tmp_path), tier="ram")
    many = np.zeros(200_000, np.int64)
    results: list[object] = []

    def work() -> None:
        try:
            while True:
                results.append(table.gather(many).any())
        except StoreError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not results:
        time.sleep(0.001)
    table.close()
    for thread in threads:
        thread.join()
    table.close()
    assert sum(isinstance(r, StoreError) for r in results) == 3
    with pytest.raises(StoreError, match=r"table layers.1 cannot be read: it was closed"):
        table.lookup([1])


def test_threads_that_close_at_once_release_the_memory_once(tmp_path: Path, tier: str) -> None:
    folder = tiny.write_default(tmp_path)
    failures: list[BaseException] = []

    def close(table: Table, together: threading.Barrier) -> None:
        together.wait(10)
        try:
            table.close()
        except BaseException as error:
            failures.append(error)

    for _ in range(20):
        table = open_table(folder, tier=tier)
        together = threading.Barrier(4)
        threads = [threading.Thread(target=close, args=(table, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert not failures


def test_a_file_that_changes_closes_the_table_for_good(tmp_path: Path) -> None:
    folder = tiny.write_default(tmp_path)
    with open_table(folder, tier="file") as table:
        table.lookup([1])
        path = table.spec.segments[0].path
        stat = path.stat()
        os.utime(path, ns=(1, 1))
        time.sleep(0.15)
        with pytest.raises(StoreError, match="changed while its table"):
            table.lookup([1])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        time.sleep(0.15)
        with pytest.raises(StoreError, match="changed while its table"):
            table.lookup([1])


def test_a_forked_child_is_told_to_open_its_own(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "pid", 1)
    with pytest.raises(ForkError, match="open it again in the child"):
        table.lookup([1])


def test_a_forked_child_closes_what_a_thread_of_its_parent_reads(table: Table) -> None:
    table.lookup([1])
    with table._lock:
        table._users["a thread's"] = 0
        assert forked(table.close)
        table._users.clear()
    table.lookup([1])  # the parent's is open


def test_an_interrupted_lookup_does_not_keep_a_table_open(table: Table) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    rng = np.random.default_rng(0)
    try:
        for after_s in rng.uniform(1e-4, 8e-4, 300):
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, after_s)
                for _ in range(100_000):
                    table.gather([1])
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert not table._users


def test_a_signal_handler_that_closes_in_the_middle_of_a_lookup_is_told(table: Table) -> None:
    table._users["interrupted"] = threading.get_ident()
    with pytest.raises(UsageError, match="closed in the middle of a lookup of the same thread"):
        table.close()
    table._users.clear()
    table.lookup([1])


def test_a_signal_handler_that_closes_in_the_middle_of_close_ends(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_table(tiny.write_default(tmp_path), tier=tier)
    again = []

    def munmap(*arguments: Any) -> None:
        again.append(arguments)
        table.close()
        libc.munmap(*arguments)

    libc = mapping._libc
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_libc", SimpleNamespace(munmap=munmap))
        table.close()
    assert len(again) == len(set(again)) > 0
    with pytest.raises(StoreError, match="it was closed"):
        table.lookup([1])


def test_a_look_at_the_page_cache_leaves_the_programs_random_numbers_alone(tmp_path: Path) -> None:
    with open_table(tiny.write_default(tmp_path), tier="file") as table:
        random.seed(7)
        expected = random.random()
        random.seed(7)
        for _ in range(200):
            table.store.check()
        assert random.random() == expected


def test_a_table_is_not_closed_under_a_lookup_that_does_not_end(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "CLOSE_LIMIT_S", 0.05)
    table._users["a thread's"] = 0
    with pytest.raises(StoreError, match=r"1 lookups have not ended after 0\.05 s"):
        table.close()
    assert table.store.rows.bases.size
    ctypes.string_at(int(table.store.rows.bases[0]), 1)  # still mapped
    table._users.clear()
    table.close()


@pytest.mark.parametrize("change", ["replaced", "rewritten"])
def test_a_file_that_changes_before_its_rows_are_opened_is_refused(
    tmp_path: Path, tier: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets would be those of the old header."""
    folder = tiny.write(tmp_path / "old", {"a.safetensors": tiny.tensors()})
    other = tiny.write(tmp_path / "new", {"a.safetensors": {"first": ("U8", bytes(40), (40,)), **tiny.tensors()}})

    def inspect_then_change(path: Path) -> Any:
        spec = inspect(path)
        if change == "replaced":
            (other / "a.safetensors").rename(folder / "a.safetensors")
        else:
            os.utime(folder / "a.safetensors", ns=(1, 1))  # as a write does, if not in the same tick
        return spec

    monkeypatch.setattr(table_module, "inspect", inspect_then_change)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors: changed while its table was opened.*then open the table"
    ):
        open_table(folder, tier=tier)
    monkeypatch.undo()
    open_table(folder, tier=tier).close()


def test_a_file_that_changes_while_it_is_read_into_memory_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_default(tmp_path)
    path = inspect(folder).table().segments[0].path

    def change(num_bytes: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(
        CheckpointError, match=r"changed while its table was opened: expected .* found .* modified at 1 ns"
    ):
        open_table(folder, tier="ram", progress=change)


def test_a_fingerprint_is_that_of_the_rows_that_are_open(tmp_path: Path, tier: str, stored: str) -> None:
    folder, other = (
        tiny.write(
            tmp_path / str(seed),
            {"a.safetensors": tiny.tensors(dtype=stored, data=tiny.table_bytes(tiny.ROWS, stored, seed))},
        )
        for seed in (1, 2)
    )
    identity, another = (fingerprint(inspect(path).table()) for path in (folder, other))
    assert identity != another
    with open_table(folder, tier=tier) as table:
        assert table.fingerprint() == identity
        (other / "a.safetensors").rename(folder / "a.safetensors")
        assert fingerprint(inspect(folder).table()) == another
        assert table.fingerprint() == identity


def test_many_threads_share_one_table(table: Table) -> None:
    table.parallel_rows = 200
    jobs = [np.random.default_rng(i).integers(0, 1000, 1 + 7 * i) for i in range(40)]
    want = [table.lookup(job).tobytes() for job in jobs]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for i in range(len(jobs)):
            k = (i + offset) % len(jobs)
            if table.lookup(jobs[k]).tobytes() != want[k]:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(i * 5,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_describe_is_plain_and_complete(tmp_path: Path, tier: str) -> None:
    with open_table(tiny.write_default(tmp_path), tier=tier) as table:
        facts = json.loads(json.dumps(table.describe()))
        assert (facts["tier"], facts["num_rows"], facts["bytes"]) == (tier, tiny.ROWS, tiny.ROWS * tiny.ROW_DIM * 2)


def test_progress_is_drawn_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write_default(tmp_path)
    open_table(folder, tier="ram").close()
    assert capsys.readouterr().err == ""
    open_table(folder, tier="ram", progress=True).close()
    assert "loading table layers.1: " in capsys.readouterr().err


def test_importing_the_package_is_cheap() -> None:
    import subprocess
    import sys

    code = "import sys, ple_offload; print([m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    path = str(Path(ple_offload.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
