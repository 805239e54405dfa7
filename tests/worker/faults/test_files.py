"""A checkpoint's file is cut, replaced or changed in place while its rows are served from it (tier "file")."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint import tiny
from engine import Engine, all_nan, same
from ple_offload import Table, open_table
from ple_offload.errors import StepError, StoreError
from ple_offload.table import CHECK_INTERVAL_S
from worker.faults.conftest import Worker

Start = Callable[..., Engine]
StartWorker = Callable[..., Worker]
PAGES = 64  # of a table that is larger than a page, unlike the tiny one


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def cut(path: Path) -> None:
    os.truncate(path, 0)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))


@pytest.mark.parametrize("harm", [cut, change])
def test_the_table_is_closed_for_good(
    harm: Callable[[Path], None],
    copy: Path,
    start_worker: StartWorker,
    start_engine: Start,
    table: Table,
) -> None:
    """The step fails with the reason, and so do those after it, also when the file looks as before again: what was read
    may be anything. The worker lives."""
    worker = start_worker(path=copy, guard=True)
    engine = start_engine(worker.address)
    engine.prepare([1, 2, 3])
    assert same(engine.take(), table.lookup([1, 2, 3]))
    engine.release()
    file = next(copy.glob("*.safetensors"))
    before, times = file.read_bytes(), file.stat()
    harm(file)
    time.sleep(CHECK_INTERVAL_S)
    for _ in range(2):
        step = engine.prepare([1, 2, 3])
        assert all_nan(engine.take())
        with pytest.raises(StepError, match=rf"{file}: changed while its table .* was open.*Replace files by rename"):
            engine.check(step)
        engine.release()
        file.write_bytes(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        time.sleep(CHECK_INTERVAL_S)
    start_engine(worker.address, session="a newcomer").disconnect()


def test_replaced_by_rename_serves_on(copy: Path, start_worker: StartWorker, start_engine: Start, table: Table) -> None:
    """The rows stay those of the file that was opened."""
    engine = start_engine(start_worker(path=copy).address)
    for file in copy.glob("*.safetensors"):
        new = file.with_suffix(".new")
        new.write_bytes(bytes(file.stat().st_size))
        new.replace(file)
    time.sleep(CHECK_INTERVAL_S)
    engine.prepare([1, 2, 3])
    assert same(engine.take(), table.lookup([1, 2, 3]))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of 64 pages and more, each in a file of its own, on decoder layers 1 and 3."""
    config = {**tiny.CONFIG, "ple_layer_ids": [2, 4], "ngram_vocab_size_base": PAGES * 4096 // 32 // 4}
    files = {}
    before = tiny.CONFIG
    tiny.CONFIG = config  # `family` reads it
    try:
        for index, layer in enumerate((1, 3)):
            data = np.full(tiny.family(index).num_rows * tiny.ROW_DIM, 0x3F80, np.uint16).tobytes()
            files[f"{layer}.safetensors"] = tiny.tensors(layer=layer, layer_index=index, data=data, cuts=None)
    finally:
        tiny.CONFIG = before
    return tiny.write(tmp_path_factory.mktemp("large") / "large", files, config=config)


def test_pages_that_are_gone_fail_the_step(
    large: Path, tmp_path: Path, start_worker: StartWorker, start_engine: Start
) -> None:
    """The file is cut between two looks at its size: the read itself faults. The worker survives SIGBUS, the step fails,
    the other table of the worker is served on."""
    copy = Path(shutil.copytree(large, tmp_path / "copy"))
    worker = start_worker(path=copy, guard=True, check_interval_s=60)
    engine = start_engine(worker.address, layers=[1])
    other = start_engine(worker.address, layers=[3], session="other")
    ids = [i % 900 for i in range(2000)]

    def serves(rank: Engine) -> bool:
        rank.prepare(ids)
        right = bool((rank.take().astype(np.float32) == 1).all())
        rank.release()
        return right

    assert serves(engine)
    assert serves(other)
    os.truncate(copy / "1.safetensors", 8192)
    step = engine.prepare(ids)
    assert all_nan(engine.take())
    with pytest.raises(StepError, match=r"table layers\.1 cannot be read: a page of its file was gone"):
        engine.check(step)
    engine.release()
    assert serves(other)


INLINE = """
import os, sys
from ple_offload import open_table, table
from ple_offload.errors import StoreError
from ple_offload.memory import sigbus
guard, path, file = sys.argv[1:]
if guard == "guard":
    sigbus.install()
table.CHECK_INTERVAL_S = 60  # only the fault can tell
with open_table(path, 1, tier="file", threads=1) as opened:
    opened.lookup(range(900))
    os.truncate(file, 8192)
    try:
        opened.lookup(range(900))
    except StoreError as error:
        print(error)
"""


@pytest.mark.parametrize("guard", ["guard", "none"])
def test_inline_survives_a_cut_only_when_asked_to(guard: str, large: Path, tmp_path: Path) -> None:
    """A signal handler belongs to the whole process: only its owner may install the guard (`sigbus.install`)."""
    copy = Path(shutil.copytree(large, tmp_path / "copy"))
    ended = subprocess.run(
        [sys.executable, "-c", INLINE, guard, str(copy), str(copy / "1.safetensors")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if guard == "guard":
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "a page of its file was gone when it was read" in ended.stdout
    else:
        assert ended.returncode == -signal.SIGBUS


@pytest.mark.parametrize("harm", [cut, change])
def test_inline_finds_a_changed_file_by_its_size_and_time(
    harm: Callable[[Path], None], copy: Path, start_engine: Start, table: Table
) -> None:
    engine = start_engine("inline", tables=(str(copy), "file"))
    engine.prepare([1, 2, 3])
    assert same(engine.take(), table.lookup([1, 2, 3]))
    engine.release()
    harm(next(copy.glob("*.safetensors")))
    time.sleep(CHECK_INTERVAL_S)
    step = engine.prepare([1, 2, 3])
    assert all_nan(engine.take())
    with pytest.raises(StoreError, match="changed while its table"):
        engine.check(step)


def test_tier_ram_keeps_what_it_has_read(copy: Path, table: Table) -> None:
    """A cut file is nothing to a table that was read."""
    with open_table(copy, tier="ram", threads=1) as opened:
        for file in copy.glob("*.safetensors"):
            cut(file)
        assert same(opened.lookup([1, 2, 3]), table.lookup([1, 2, 3]))
