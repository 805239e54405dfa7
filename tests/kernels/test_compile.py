"""Every kernel compiles for a GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are written in Triton")


@pytest.mark.timeout(180)
def test_every_launch_compiles_and_none_is_compiled_anew_for_a_number() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launches compiled" in done.stdout
