"""The arithmetic of the GPU benchmarks, and what they keep of a run that fails; the figures themselves need a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("count", "expected"),
    # tables of the sign test: with 6 values the extremes, with 25 the 8th and 18th, with 60 the 22nd and 39th
    [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (25, (7, 17)), (60, (21, 38))],
)
def test_order_interval(count: int, expected: tuple[int, int]) -> None:
    assert load("intervals").order_interval(count) == expected


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    intervals, rng = load("intervals"), np.random.default_rng(0)
    found = [intervals.summary(rng.exponential(size=25)) for _ in range(2000)]
    share = np.mean([one["low"] <= np.log(2) <= one["high"] for one in found])
    assert 0.94 < share < 0.985
    assert all(one["low"] <= one["p50"] <= one["high"] and one["n"] == 25 for one in found)


def test_ratio_is_taken_round_by_round() -> None:
    times = [10.0, 200.0, 30.0, 4000.0, 50.0, 6.0, 7.0]
    found = load("intervals").ratio([2 * t for t in times], times)
    assert (found["low"], found["p50"], found["high"]) == (2.0, 2.0, 2.0)


def test_fastest_by_median_among_those_measured() -> None:
    fastest = load("intervals").fastest
    assert fastest({"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0], "c": [0.0]}, ["a", "b"]) == "b"
    assert fastest({"c": [1.0]}, ["a", "b"]) is None


def test_a_record_keeps_what_came_before_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_class = load("record").Record
    path = tmp_path / "out" / "one.json"
    record = record_class(path)
    record.put(3, "lookup", "fp8", "64")
    with record.failing("start", "uva"):
        raise ValueError("no such thing")
    assert "no such thing" in capsys.readouterr().err
    kept = json.loads(path.read_text())
    assert kept["lookup"] == {"fp8": {"64": 3}}
    assert kept["failed"]["start"]["uva"]["error"] == "ValueError: no such thing"
    again = record_class(path)
    assert again.has("lookup", "fp8", "64")
    assert not again.has("lookup", "fp8", "1")
    assert not record_class(path, again=True).found


def test_the_world_is_the_released_models(tmp_path: Path) -> None:
    world = load("world")
    assert world.family(world.FULL_ROWS).num_rows == 320_001_536
    with world.World.make("fp8", 20_000, threads=2) as made:
        assert not ((made.store.raw & 0x7F) == 0x7F).any()
        rows = made.random_rows(np.random.default_rng(0), 5)
        values = made.table.gather(rows).view(np.uint16).reshape(5, -1)
        assert np.array_equal(values, made.reference(rows))
        with made.again() as other:
            assert np.array_equal(other.store.raw[:100], made.store.raw[:100])
        first = made.store.raw[:1000].copy()
    with world.World.make("fp8", 20_000, threads=1, huge=False) as made:
        assert np.array_equal(made.store.raw[:1000], first)
