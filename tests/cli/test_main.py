"""The border of the command line: help without heavy imports, errors as one sentence, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ple_offload import CheckpointError, MemoryLimitError, UsageError
from ple_offload.cli import main
from ple_offload.cli.main import COMMANDS

HEAVY = ("torch", "transformers", "numba", "numpy", "ml_dtypes")


def python(code: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, **kwargs)


@pytest.mark.parametrize("arguments", [["--help"], *([m.__name__.rpartition(".")[2], "--help"] for m in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from ple_offload.cli import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert stop.code == 0
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ple-offload")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in ("demo", "inspect", "rows", "lookup", "generate", "serve", "verify", "doctor"):
        assert f"\n    {name} " in text


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["rows"], ["inspect", "p", "--bad"], ["inspect", "p", "--js"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: ple-offload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("bad option"), 2),
        (CheckpointError("bad file"), 2),
        (MemoryLimitError("too big"), 1),
        (PermissionError(13, "Permission denied", "/some/file"), 1),
        (ZeroDivisionError("a bug"), 1),
        (ModuleNotFoundError("No module named 'numpy'"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_without_traceback(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr("ple_offload.inspect", fail)
    assert main(["inspect", "anything"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ple-offload: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nowhere/at/all", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_path_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nowhere/at/all"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_bad_environment_variable_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLE_OFFLOAD_THREADS", "many")
    assert main(["inspect", "/nowhere"]) == 2
    assert "PLE_OFFLOAD_THREADS" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet(checkpoint: Path) -> None:
    """`ple-offload inspect ... | true` must not print a traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", "import sys; from ple_offload.cli import main; sys.exit(main())"]
    done = subprocess.run([*command, "inspect", str(checkpoint)], stdout=write_end, stderr=subprocess.PIPE, timeout=50)
    os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == b""


COMMAND = [sys.executable, "-c", "import sys; from ple_offload.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_no_error(closed: str, checkpoint: Path, tmp_path: Path) -> None:
    """`ple-offload lookup ... >&-`: Python then has None for the stream."""
    arguments = ["lookup", str(checkpoint), "--tokens", "1", "--out", str(tmp_path / "values.npy")]
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *COMMAND, *arguments]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "values.npy").read_bytes().startswith(b"\x93NUMPY")


def test_a_name_that_the_terminal_cannot_show_is_escaped(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mod\N{LATIN SMALL LETTER E WITH GRAVE}le"
    folder.symlink_to(checkpoint)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND, "inspect", str(folder)], capture_output=True, text=True, timeout=50, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "mod\\xe8le: qwen4_exp" in done.stdout


def test_interrupt_is_status_130() -> None:
    code = """
import sys, os, signal, threading
import ple_offload.spec
from ple_offload.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, such as these tests', ignores it
def wait(path):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(30)
ple_offload.spec.inspect = wait
sys.exit(main(["inspect", "x"]))
"""
    done = python(code)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "ple-offload: interrupted\n"
