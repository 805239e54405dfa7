"""What a process pays before its first lookup, and what a parallel region costs by numba's threading layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from calm import Calm
from random_table import Made
from timing import spread

from memory import CHILD

LAYERS = ("omp", "workqueue")
PAUSES_US = "0,50,2000"


def run(made: Made, calm: Calm, *, rounds: int) -> dict[str, Any]:
    starts: dict[str, list[dict[str, float]]] = {"compiling": [], "cached": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("compiling", "cached"):
                calm.wait()
                starts[state].append(_child("start", str(made.folder), NUMBA_CACHE_DIR=cache))
    return {
        "start": {
            state: {key: spread([one[key] for one in found]) for key in found[0]} for state, found in starts.items()
        },
        "parallel_region": [_wake(layer, 4 * rounds, calm.patience_s) for layer in LAYERS],
    }


def _wake(layer: str, rounds: int, patience_s: float) -> dict[str, Any]:
    try:
        return {"asked": layer, **_child("wake", PAUSES_US, str(rounds), str(patience_s), NUMBA_THREADING_LAYER=layer)}
    except subprocess.CalledProcessError as error:  # a layer that is not installed here
        return {"asked": layer, "refused": error.stderr.strip().splitlines()[-1:]}


def _child(*job: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, CHILD, *job],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
