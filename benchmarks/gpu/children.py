"""Child processes that are told what to do, and answer, line by line: JSON each way."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import ple_offload

ANSWER_LIMIT_S = 150.0


def start_child(*command: str, pass_fds: list[int] | None = None) -> subprocess.Popen[str]:
    """A Python process that answers on its output what it is told on its input; errors go to ours."""
    source = str(Path(ple_offload.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds or [],
        env={**os.environ, "PYTHONPATH": paths},
    )


def read_answer(child: subprocess.Popen[str], name: str, limit_s: float = ANSWER_LIMIT_S) -> Any:
    """One JSON line; raises RuntimeError for an end, an "error" answer, or nothing within the limit."""
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], limit_s)[0]:
        raise RuntimeError(f"{name}: no answer within {limit_s:g} s")
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{name}: ended with status {child.wait(10)}")
    answer = json.loads(line)
    if isinstance(answer, dict) and "error" in answer:
        raise RuntimeError(f"{name}: {answer['error']}")
    return answer


def end_child(child: subprocess.Popen[str], limit_s: float = 20.0) -> None:
    """End its input, and it if that does not help."""
    with contextlib.suppress(OSError):
        assert child.stdin is not None
        child.stdin.close()
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)
