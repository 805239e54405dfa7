"""Every benchmark runs from start to report on a toy table. Times are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def table_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy table is written once and found again."""
    return tmp_path_factory.mktemp("bench")


@pytest.mark.parametrize("name", ["gather", "hashing", "load", "memory", "startup", "serving"])
def test_a_toy_run_gives_a_result_and_a_report(name: str, table_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("a token of text, and a token more of text\n" * 2000)
    command = [sys.executable, str(RUN), name, "--toy", "--folder", str(table_folder), "--text", str(text)]
    done = subprocess.run(
        [*command, "--results", str(tmp_path), "--threads", "2"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["machine"]["cores"] >= 1
    assert result["table"]["num_rows"] == 41_216
    assert done.stdout == (tmp_path / "README.md").read_text()
    assert f"## {name}" in done.stdout
    if name == "gather":
        assert (tmp_path / "gather.png").stat().st_size > 0
        assert {row["tokens"] for row in result["results"]} == {1, 64, 4096}
        assert {row["ids"] for row in result["results"]} == {"random", "text"}


def test_toy_figures_never_replace_real_ones() -> None:
    done = subprocess.run([sys.executable, str(RUN), "--toy"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert "--results" in done.stderr
