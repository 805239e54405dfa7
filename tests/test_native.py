"""numba's production traps, each in a process of its own: no cache folder, fork, concurrent callers, both layers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ple_offload
from checkpoint import tiny

PACKAGE = Path(ple_offload.__file__).parent


def run(code: str, *, source: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds ple_offload in `source` (default: where this one found it)."""
    path = str(source or PACKAGE.parent)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_default(tmp_path / "checkpoint")


LOOK_UP = """
    import sys
    import numpy as np
    import ple_offload
    table = ple_offload.open_table(sys.argv[1] if len(sys.argv) > 1 else FOLDER, tier="file")
    ids = np.arange(40) % 9
    rows = table.row_numbers(ids)
    starts, context = np.array([0, 40]), np.full((1, 2), table.spec.family.filler)
    assert np.array_equal(rows, table.spec.family.row_numbers_reference(ids, starts, context))
"""


def test_without_a_writable_cache_folder_it_runs_and_says_so(folder: Path, tmp_path: Path) -> None:
    """A package folder and a home that are no folders to write to: numba alone refuses even to import."""
    source = tmp_path / "site"
    shutil.copytree(PACKAGE, source / "ple_offload", ignore=shutil.ignore_patterns("__pycache__"))
    for parent in [source / "ple_offload", *(p for p in (source / "ple_offload").rglob("*") if p.is_dir())]:
        (parent / "__pycache__").write_text("a file, so that no cache folder can be made here, not even by root")
    home = tmp_path / "home"
    home.write_text("a file as well")
    code = LOOK_UP.replace("FOLDER", repr(str(folder))) + "    print(table.describe()['kernel_cache'])\n"
    done = run(
        code, source=source, HOME=str(home), XDG_CACHE_HOME=str(home), NUMBA_CACHE_DIR="", PYTHONDONTWRITEBYTECODE="1"
    )
    assert done.returncode == 0, done.stderr
    assert "cannot cache" in done.stdout


@pytest.mark.parametrize("damage", ["index", "code", "full"])
def test_a_cache_that_fails_costs_a_compilation_and_no_error(folder: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    code = LOOK_UP.replace("FOLDER", repr(str(folder))) + "    print(table.describe()['kernel_cache'])\n"
    if damage == "full":  # no file may grow beyond 100 bytes
        limit = "    import resource, signal\n    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        limit += "    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        done = run(limit + code, NUMBA_CACHE_DIR=str(cache), PLE_OFFLOAD_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert "File too large" in done.stdout
        return
    assert run(code, NUMBA_CACHE_DIR=str(cache), PLE_OFFLOAD_THREADS="1").stdout == "on disk\n"
    files = list(cache.rglob("*.nbi" if damage == "index" else "*.nbc"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-40])
    done = run(code, NUMBA_CACHE_DIR=str(cache), PLE_OFFLOAD_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert str(cache) in done.stdout
    again = run(code, NUMBA_CACHE_DIR=str(cache), PLE_OFFLOAD_THREADS="1")
    assert again.stdout == "on disk\n", again.stderr  # it has mended itself


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_concurrent_callers_of_parallel_kernels(folder: Path, layer: str) -> None:
    """Eight threads, every gather parallel: `workqueue` alone would abort the process here."""
    code = (
        LOOK_UP.replace("FOLDER", repr(str(folder)))
        + """
    import threading
    table.parallel_rows = 0
    many = np.tile(rows.reshape(-1), 60)
    expected = table.gather(many).tobytes()
    wrong = []
    def work():
        for _ in range(40):
            if table.gather(many).tobytes() != expected:
                wrong.append(1)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong
    import numba
    print(numba.threading_layer())
    """
    )
    done = run(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2", PLE_OFFLOAD_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == layer


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_use_after_a_fork_is_refused_and_harms_nobody(folder: Path, layer: str) -> None:
    code = (
        LOOK_UP.replace("FOLDER", repr(str(folder)))
        + """
    import os
    table.parallel_rows = 0
    before = table.gather(rows).tobytes()
    child = os.fork()
    if child == 0:
        try:
            table.gather(rows)
        except ple_offload.ForkError as error:
            assert "open it again in the child" in str(error)
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert table.gather(rows).tobytes() == before
    """
    )
    done = run(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2", PLE_OFFLOAD_THREADS="2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_forked_child_may_open_its_own_table(folder: Path, layer: str) -> None:
    """OpenMP ends a child that runs a parallel kernel, so the child must do without its parent's threads."""
    code = (
        LOOK_UP.replace("FOLDER", repr(str(folder)))
        + """
    import os
    table.parallel_rows = 0
    before = table.gather(rows).tobytes()
    child = os.fork()
    if child == 0:
        own = ple_offload.open_table(table.spec.segments[0].path.parent, tier="file", threads=2)
        own.parallel_rows = 0
        os._exit(17 if own.gather(rows).tobytes() == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    """
    )
    done = run(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2", PLE_OFFLOAD_THREADS="2")
    assert done.returncode == 0, done.stderr


def test_kernels_come_from_the_cache_the_second_time(folder: Path, tmp_path: Path) -> None:
    code = (
        LOOK_UP.replace("FOLDER", repr(str(folder)))
        + """
    table.lookup(ids)
    from ple_offload.families import qwen_ple, ragged
    from ple_offload.formats import gather
    kernels = (qwen_ple._row_numbers, ragged.bad_query_start_loc, gather.gather_blocks, gather.gather_blocks_parallel)
    print(sum(sum(k.stats.cache_misses.values()) for k in kernels), sum(sum(k.stats.cache_hits.values()) for k in kernels))
    """
    )
    cache = str(tmp_path / "cache")
    first, second = (run(code, NUMBA_CACHE_DIR=cache, PLE_OFFLOAD_THREADS="2") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.split() == ["4", "0"]
    assert second.stdout.split() == ["0", "4"]


def test_waking_threads_is_measured_within_bounds() -> None:
    from ple_offload import native

    assert 0 < native.wake_up_us(2) <= native.MAX_WAKE_UP_US


def test_torchs_number_of_threads_is_left_alone(folder: Path) -> None:
    """numba's threads start under torch's OpenMP library and would set its number of threads, too."""
    code = """
        import torch
        import ple_offload
        torch.set_num_threads(1)
        assert torch.get_num_threads() == 1  # from here on torch no longer sets it by itself
        table = ple_offload.open_table(FOLDER, tier="file", threads=2)
        table.gather(torch.zeros(table.parallel_rows, dtype=torch.long))
        assert torch.get_num_threads() == 1, torch.get_num_threads()
    """.replace("FOLDER", repr(str(folder)))
    done = run(code, NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import signal
import numpy as np
from ple_offload import native, open_table

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

with open_table(PATH, tier="ram", threads=2) as table:
    table.parallel_rows = 1
    signal.signal(signal.SIGALRM, interrupt)
    for after_s in np.random.default_rng(0).uniform(1e-4, 2e-3, 300):
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            for _ in range(300):
                table.gather([1, 2, 3])
        except Interrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    with native.parallel_turn(2) as shares:
        assert shares == 2, "the turn is lost"
"""


def test_an_interrupt_does_not_lose_the_turn(tmp_path: Path) -> None:
    done = run(INTERRUPTED.replace("PATH", repr(str(tiny.write_default(tmp_path)))))
    assert done.returncode == 0, done.stderr[-2000:]


FREED = """
import time
import numpy as np
from ple_offload import open_table
from ple_offload.ipc import words

with open_table(PATH, tier="ram", threads=2) as table:
    rows = np.random.default_rng(0).integers(0, table.num_rows, 50_000)
    table.parallel_rows = rows.size + 1
    alone = table.gather(rows).tobytes()
    table.parallel_rows = table.parallel_tokens = 1
    for _ in range(20):
        assert table.gather(rows).tobytes() == alone
word, waiters = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
began_s = time.monotonic()
assert not words.wait_flag(np.uint64(word.ctypes.data), np.uint64(2), np.uint64(waiters.ctypes.data), 1, 100_000_000)
assert time.monotonic() - began_s > 0.05, "it did not sleep"
"""


def test_compiled_code_uses_no_memory_that_it_has_freed(tmp_path: Path) -> None:
    """Python's debugging allocator fills what is freed. numba frees an array behind its last use; an address is none."""
    done = run(FREED.replace("PATH", repr(str(tiny.write_default(tmp_path)))), PYTHONMALLOC="debug")
    assert done.returncode == 0, done.stderr[-2000:]
