"""The arithmetic of the GPU benchmarks, and what they keep of a run that fails; the figures themselves need a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

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


def load_beside(name: str) -> ModuleType:
    """A module that imports others of its folder; they are forgotten again, for their names are plain ones."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    try:
        return load(name)
    finally:
        sys.path[:] = path
        for other in set(sys.modules) - before:
            if str(FOLDER.parent) in str(getattr(sys.modules[other], "__file__", "")):
                del sys.modules[other]


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


def test_auto_is_compared_with_the_better_of_its_routes_and_all_with_the_better_plain_gather() -> None:
    times = {
        "uva": [10.0, 30.0, 20.0],
        "uva fused": [5.0, 15.0, 10.0],
        "direct": [8.0, 8.0, 8.0],
        "staged": [4.0, 6.0, 2.0],
        "auto": [6.0, 9.0, 3.0],
        "auto tokens": [1.0, 1.0, 1.0],  # its routes were not measured
    }
    found = load_beside("comparisons").comparisons("wall", times)
    assert found["wall_over_uva"]["base"] == "uva fused"
    assert found["wall_over_uva"]["uva"]["p50"] == 2
    assert "uva fused" not in found["wall_over_uva"]
    assert (found["wall_over_uva"]["direct"]["low"], found["wall_over_uva"]["direct"]["high"]) == (0.5333, 1.6)
    assert set(found["wall_regret"]) == {"auto"}
    assert found["wall_regret"]["auto"]["better"] == "staged"
    assert found["wall_regret"]["auto"]["p50"] == 1.5
    assert load_beside("comparisons").comparisons("wall", {"direct": [1.0]}) == {}


def test_in_a_race_auto_meets_its_routes_and_a_plain_gather_and_no_other_auto() -> None:
    """Two would page-lock the worker's table twice, beside this process's own."""
    worlds = load("worlds")
    for race, end in (("", ""), ("from ids", " tokens")):
        racing = worlds.WORLDS["fp8"].racing(race, None)
        assert {"uva", f"direct{end}", f"staged{end}"} <= set(racing)
        assert [name for name in racing if name.startswith("auto")] == [f"auto{end}"]
    assert set(worlds.RACES[""]) | set(worlds.RACES["from ids"]) >= set(worlds.OURS)
    assert worlds.WORLDS["file"].racing("from ids", ["uva", "direct", "direct tokens"]) == ["direct tokens"]
    assert worlds.kind_name("text", "from ids") == "text, from ids"


MACHINE = {
    "gpu": "a GPU",
    "driver": [580, 1],
    "pcie_h2d_gb_per_s": 50.0,
    "cores": 4,
    "cpu": "a CPU",
    "memory_gib": 8,
    "kernel": "6",
    "torch": "2",
    "triton": "3",
}


def test_tables_show_the_faster_kind_and_name_who_is_missing(tmp_path: Path) -> None:
    summary, comparisons = load_beside("intervals").summary, load_beside("comparisons").comparisons
    times = {
        "uva": [40.0, 60.0, 50.0],
        "uva fused": [30.0, 20.0, 25.0],
        "direct": [10.0, 12.0, 11.0],
        "staged": [100.0, 100.0, 100.0],
        "auto": [22.0, 24.0, 22.0],
    }
    one = {"wall_us": {name: {**summary(values), "late": 0} for name, values in times.items()}, "pcie_limit_us": 2.0}
    one |= {"chosen": {"auto": "direct"}, **comparisons("wall", times)}
    found = {
        "machine": MACHINE,
        "tables": {"fp8": {"num_rows": 1000, "row_bytes": 160, "tier": "ram"}},
        "pools": {"fp8": {"random": "random ids"}},
        "lookup": {"fp8": {"random": {"64": one}}},
        "failed": {"start": {"fp8": {"hbm": {"error": "CudaError: no\nmore", "trace": "..."}}}},
        "wrong": {"fp8": {"random": {"64": {"cross-process": "WrongRowsError: eager"}}}},
    }
    text = load_beside("tables").lookup(found)
    head, row = (line.split(" | ") for line in text.splitlines() if line.startswith(("| tokens", "| 64 ")))
    cells = dict(zip(head, row, strict=True))
    assert cells["uva"] == "25.0 (20.0-30.0)"
    assert "hbm" not in cells
    assert cells["direct / uva"] == "0.44 (0.33-0.60)"
    assert cells["ours / limit"] == "5.50"
    assert row[-1] == "2.00 (2.00-2.20), direct; chose direct |"
    assert "failed: start fp8 hbm: CudaError: no\n" in text
    assert "wrong: fp8 random 64 cross-process: WrongRowsError: eager" in text
    assert "### fp8, random rows\n" in text
    times = {f"{name} tokens" if name in ("direct", "staged", "auto") else name: t for name, t in times.items()}
    one = {"wall_us": {name: summary(values) for name, values in times.items()}, "pcie_limit_us": 2.0}
    one |= {"chosen": {"auto tokens": "direct"}, **comparisons("wall", times)}
    text = load_beside("tables").lookup(
        {**found, "lookup": {"fp8": {"random, from ids": {"8": one, "64": one, "1": one}}}}
    )
    assert "### fp8, random rows, from ids\n" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = dict(zip(lines[0], lines[-1], strict=True))
    assert cells["direct, from ids / uva"] == "0.44 (0.33-0.60)"
    assert cells["auto tokens / better |"] == "2.00 (2.00-2.20), direct tokens; chose direct |"
    assert [line[0] for line in lines[-3:]] == ["| 1", "| 8", "| 64"]
    load_beside("plot").draw(found, "fp8", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_written_once_and_holds_what_it_must(tmp_path: Path) -> None:
    file_world = load_beside("file_world")
    with file_world.FileWorld.make(tmp_path, 100_000, 45.0) as made:
        rows = np.random.default_rng(0).integers(0, made.spec.num_rows, (7, 16))
        assert np.array_equal(made.table.gather(rows).view(np.uint16).reshape(7, -1), made.reference(rows))
        assert made.describe()["cached_share"] == 1
        written = made.describe()["written_s"]
    with file_world.FileWorld.make(tmp_path, 100_000, 45.0) as again:
        assert again.describe()["written_s"] == written


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


def test_lookups_that_do_not_fit_are_skipped_and_made_up_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way through worlds, races and sizes; contenders and their times are stand-ins for a GPU's."""
    pytest.importorskip("triton", reason="the plain GPU gather is a Triton kernel")
    lookup, budget_class = load_beside("lookup"), load_beside("budget").Budget
    now, seconds, measured, opened = [0.0], [14.0], [], set()

    class StandIn(lookup.Contender):
        def __init__(self, name: str) -> None:
            self.name = name
            opened.add(name)
            assert len({"auto", "auto tokens"} & opened) < 2

        def close(self) -> None:
            opened.remove(self.name)

    def measure(options: argparse.Namespace, record: Any, bench: Any, place: list[str]) -> None:
        now[0] += seconds[0]
        measured.append((*place[1:], sorted(bench.contenders) == sorted(opened)))
        record.put({}, "lookup", *place)

    names = [name for race in lookup.RACES.values() for name in race if name not in ("ipc", "ipc tokens")]
    makers = {name: lambda _, name=name: StandIn(name) for name in names} | {"staged": lambda _: 1 / 0}
    monkeypatch.setattr(lookup, "factories", lambda world, worker: makers)
    monkeypatch.setattr(lookup, "Bench", lambda world, pool, contenders, *_: argparse.Namespace(contenders=contenders))
    monkeypatch.setattr(lookup, "random_pool", lambda world, tokens: argparse.Namespace(what="random ids"))
    monkeypatch.setattr(lookup, "_measure", measure)
    monkeypatch.setattr(lookup, "DEVICE", lookup.torch.device("cpu"))
    monkeypatch.setattr(lookup.torch, "set_num_threads", lambda threads: None)
    options = argparse.Namespace(
        worlds=["fp8"], text=None, only=None, tokens=[64, 1], rows=20_000, quick=True, pause_us=0
    )
    record = load("record").Record(tmp_path / "one.json")
    found, just_enough = record.found, lookup.WORLDS["fp8"].expected_s + lookup.START_S + lookup.SIZE_S
    options.budget = budget_class(just_enough - 1, lambda: now[0])
    lookup.run(options, record)
    assert not measured
    assert set(found["skipped"]["world"]) == {"fp8"}
    options.budget = budget_class(just_enough, lambda: now[0])
    lookup.run(options, record)
    assert measured == [("random", "64", True), ("random", "1", True)]
    assert set(found["skipped"]["race"]["fp8"]) == {"from ids"}
    measured.clear()
    seconds[0] = just_enough
    options.budget = budget_class(just_enough, lambda: now[0])
    lookup.run(options, record)
    assert measured == [("random, from ids", "64", True)]
    assert set(found["skipped"]["lookup"]["fp8"]["random, from ids"]) == {"1"}
    measured.clear()
    options.budget = budget_class(None)
    lookup.run(options, record)
    assert measured == [("random, from ids", "1", True)]
    assert "skipped" not in found
    assert set(found["failed"]["start"]["fp8"]) == {"staged"}
    assert not opened


def test_what_failed_or_was_skipped_is_forgotten_once_it_went_well(tmp_path: Path) -> None:
    budget_class, record = load_beside("budget").Budget, load("record").Record(tmp_path / "one.json")
    now = [100.0]
    budget = budget_class(20.0, lambda: now[0])
    assert budget.allows(20.0, record, "lookup", "fp8", "8")
    now[0] = 111.0
    assert not budget.allows(10.0, record, "lookup", "fp8", "8")
    assert not budget.allows(10.0, record, "lookup", "fp8", "64")
    with record.failing("start", "uva"):
        raise ValueError("no such thing")
    kept = json.loads(record.path.read_text())
    assert kept["skipped"]["lookup"]["fp8"] == dict.fromkeys(("8", "64"), "it takes about 10 s, and 9 s were left")
    assert budget.allows(9.0, record, "lookup", "fp8", "8")
    with record.failing("start", "uva"):
        record.put(1, "starts", "uva")
    kept = json.loads(record.path.read_text())
    assert set(kept["skipped"]["lookup"]["fp8"]) == {"64"}
    assert "failed" not in kept
    assert budget_class(None).allows(1e9, record, "lookup", "fp8", "64")
    assert "skipped" not in json.loads(record.path.read_text())
    record.put("all of it", "skipped", "lookup")
    record.forget("skipped", "lookup", "fp8")
    assert record.found["skipped"] == {"lookup": "all of it"}


def test_a_gather_alone_is_right_in_every_way_and_told_from_the_others(tmp_path: Path) -> None:
    """Times are not looked at."""
    cpu_gather, record = load_beside("cpu_gather"), load("record").Record(tmp_path / "one.json")
    with cpu_gather.World.make("fp8", 40_000, threads=2) as world, ExitStack() as stack:
        bench = cpu_gather.Bench(world, 128, stack)
        cpu_gather.measure(record, bench, 51_200_000_000, 2, 2)
        assert {region.out.shape for region in bench.regions.values()} == {(2048, 160)}
        rows = world.random_rows(np.random.default_rng(0), 50, 0.05)
        place = (rows - world.spec.family.head_offsets) / world.spec.family.head_sizes
        assert ((place >= 0) & (place < 0.05)).all()
        found = cpu_gather.ordered(rows)
        assert found["tokens"][17] == rows[1, 1]
        assert found["heads"][51] == rows[1, 1]
        assert (np.diff(found["sorted"]) >= 0).all()
        way = next(iter(cpu_gather.ways(2)))
        right = bench._raw
        bench._raw = right ^ 1
        with pytest.raises(RuntimeError, match="2048 rows are wrong"):
            bench.check(way)
        bench._raw = right
        bench.regions[way.region].readers.shared[2] = 9  # a page was gone meanwhile: nobody may be told
        with pytest.raises(RuntimeError, match="found -2"):
            bench.check(way)
    ways = record.found["gather"]["ways"]
    assert len(ways) == 2 * 2 * 4 * 3
    one = ways["4 KiB region, blocks told, 10.2 GB, tokens, 2 threads"]
    assert one["us"]["n"] == 2
    assert one["over_tokens"]["p50"] == 1
    assert record.found["gather"]["rounds"] == 2
    text = load_beside("tables").gather({"machine": MACHINE, **record.found})
    assert text.count("| 51.2 | heads | ") == 4
    by_hand = cpu_gather.Way("4 KiB", "nobody", 1.0, "heads", 2)
    times = {
        by_hand: [3.0, 8.0],
        by_hand._replace(order="tokens"): [6.0, 16.0],
        by_hand._replace(share=0.05): [1.0, 4.0],
    }
    times |= {by_hand._replace(order="tokens", share=0.05): [1.0, 4.0]}
    found = cpu_gather.found_of(times, 10**9)["4 KiB region, nobody told, 1 GB, heads, 2 threads"]
    assert (found["over_tokens"]["p50"], found["over_smallest"]["p50"]) == (0.5, 2.5)


def test_threads_change_as_seldom_as_they_can() -> None:
    cpu_gather = load_beside("cpu_gather")
    all_ways = list(cpu_gather.ways(16))
    turns = cpu_gather.in_turns(all_ways, np.random.default_rng(0))
    assert set(turns) == set(all_ways)
    assert len(turns) == len(all_ways) == 240
    assert sum(a.threads != b.threads for a, b in itertools.pairwise(turns)) == 4
    assert turns != cpu_gather.in_turns(all_ways, np.random.default_rng(1))


def test_the_world_is_the_released_models(tmp_path: Path) -> None:
    world = load("world")
    assert world.family(world.FULL_ROWS).num_rows == 320_001_536
    with world.World.make("fp8", 20_000, threads=2) as made:
        assert not ((made.store.raw & 0x7F) == 0x7F).any()
        rows = made.random_rows(np.random.default_rng(0), 5)
        values = made.table.gather(rows).view(np.uint16).reshape(5, -1)
        assert np.array_equal(values, made.reference(rows))
        first = made.store.raw[:1000].copy()
        raw = made.store.raw[rows[:2].reshape(-1)]
        plain = made.spec.format.decode_reference(raw, "bf16").view(np.uint16)
        assert np.array_equal(made.reference(rows[:2]), plain.reshape(2, -1))
    with world.World.make("fp8", 20_000, threads=1, huge=False) as made:
        assert np.array_equal(made.store.raw[:1000], first)


def drive(folder: Path, program: str) -> None:
    """Run a program that imports the benchmarks and leaves its results in the folder."""
    (folder / "drive.py").write_text(program)
    command = [sys.executable, str(folder / "drive.py"), str(FOLDER), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr


STEP = """
import sys, json
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
import torch, bare_gather, concurrency, decoder, lookups, step
from loop import Batch, Inputs
from record import Record
from world import World, LAYER

torch.set_num_threads(1)
decoder.LAYERS, step.BLOCK_S, step.MIN_ROUNDS = 3, 1e-4, 2
DECODE, PREFILL = Batch("decode", 2), Batch("prefill", 5)

if __name__ == "__main__":
    with World.make("fp8", 20_000, threads=2) as world, world.worker() as worker:
        def plain(address, rows, out, scale):  # the interpreter of Triton rounds to bf16 in its own way
            out.copy_(world.table.gather(rows))
        bare_gather.copy_and_decode = plain
        inputs = Inputs(torch.device("cpu"))
        ways = {name: lookups.make(name, world, inputs, worker.address) for name in ("none", "hbm", "direct", "staged")}
        record = Record(Path(sys.argv[2]) / "out.json", again=True)
        cases = ((DECODE, 1), (PREFILL, 1))
        model = decoder.Decoder(32, inputs.device)
        step.measure(record, "small", model, ways, inputs, world, 0.0, cases)
        right = ways["direct"].take
        ways["direct"].take = lambda hidden: right(hidden) + 1
        few = {name: ways[name] for name in ("none", "hbm", "direct")}
        step.measure(record, "wrong", model, few, inputs, world, 0.0, cases[:1])
        with concurrency.engines(world, worker.address, ["staged"], [0], 0, (DECODE, PREFILL)) as pair:
            record.put(concurrency.measure(pair, world, "staged", 0, 2, 0.1), "concurrency")
        for way in ways.values():
            way.close()
"""


def test_a_step_is_checked_and_timed_and_wrong_rows_are_not(tmp_path: Path) -> None:
    """On the CPU, with plain forwards in the place of graphs; times are not looked at."""
    pytest.importorskip("triton", reason="the plain GPU gather is a Triton kernel")
    drive(tmp_path, STEP)
    found = json.loads((tmp_path / "out.json").read_text())
    ways = {"none", "hbm", "direct", "staged"}
    for case, tokens in (("decode 2", 2), ("prefill 5", 5)):
        assert set(found["small"][case]["rows"]) == ways
        timed = found["small"][f"{case}, 1 in flight"]
        assert set(timed) == ways
        for one in timed.values():
            assert one["tokens_per_s"] == pytest.approx(tokens / one["step_ms"]["p50"] * 1e3, rel=0.02, abs=1)
        assert timed["hbm"]["throughput_of_hbm"]["p50"] == 1
        far = found["small"][case]["distance from hbm"]
        assert far["none"] > 0.1
        assert far["direct"] == far["staged"] == 0
    assert "tokens have wrong rows" in found["failed"]["wrong"]["decode 2"]["rows"]["direct"]["error"]
    assert "direct" not in found["wrong"]["decode 2, 1 in flight"]
    assert "small" not in found["failed"]
    assert {"decode 2", "prefill 5", "host_gb_per_s"} == set(found["concurrency"])
    tables = load_beside("tables")
    text = tables.step({"machine": MACHINE, "step small": found["small"], "failed": found["failed"]})
    assert "| decode 2, 1 in flight |" in text
    assert "tokens have wrong rows" in text
    text = tables.concurrency({"machine": MACHINE, "lookup alone": {"staged": found["concurrency"]}})
    assert "| lookup alone | staged | decode 2 " in text


START = """
import argparse, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
import start
from budget import Budget
from record import Record

start.WARM_ROWS = 100_000
if __name__ == "__main__":
    out = Path(sys.argv[2])
    options = argparse.Namespace(budget=Budget(None), shards=out / "shards", rows=200_000, quick=True)
    record = Record(out / "first.json")
    start.run(options, record)
    for shard in sorted((out / "shards").glob("table-2*/model-*"))[1:]:  # the first also holds the scale
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) // 4] + bytes(len(data) - len(data) // 4))
    folders = [next((out / "shards").glob(f"table-{rows}*")) for rows in "21"]
    with start.started(*(argparse.Namespace(folder=folder) for folder in folders)) as (_, found):
        record.put(found, "zeroed")
"""


def test_a_start_is_timed_and_its_first_row_is_compared(tmp_path: Path) -> None:
    """On the CPU; times are not looked at."""
    pytest.importorskip("triton", reason="the benchmarks of a GPU import it")
    drive(tmp_path, START)
    found = json.loads((tmp_path / "first.json").read_text())
    if "start" not in found["cold"]:
        assert "stayed in the page cache" in found["failed"]["cold"]["error"]
        pytest.skip("this file system has nothing but memory")
    starts = [*found["warm"].values(), found["second"]["first"], found["second"]["second"], found["cold"]["start"]]
    assert len(starts) == 5
    for one in starts:
        assert one["right"]
        assert one["first_row_s"] == pytest.approx(one["open_s"] + one["connect_s"] + one["lookup_s"], abs=0.002)
    assert found["cold"]["cached_share_before_start"] < 0.01
    assert "failed" not in found
    text = load_beside("tables").start({"machine": MACHINE, **found})
    assert text.count("| yes |") == 5
    assert not found["zeroed"]["right"]


def test_a_decoder_is_as_wide_as_its_step_is_to_be_long() -> None:
    width_for = load_beside("decoder").width_for
    assert width_for(8e-3, lambda width: 1e-3 + width * 1e-7) == 69_888  # 70,000, to a multiple of 256
    assert width_for(1e-9, lambda width: 1e-3 + width * 1e-7) == 256


def test_hot_rows_are_the_commonest_and_are_found() -> None:
    hot_set = load_beside("hot_set")
    rows = np.array([[1, 10], [1, 11], [2, 10], [1, 12], [2, 10]])
    chosen = hot_set.commonest(rows, 3)
    assert chosen.tolist() == [1, 2, 10]
    assert hot_set.commonest(rows, 100).tolist() == [1, 2, 10, 11, 12]
    found = hot_set.contains(chosen, np.array([[1, 10], [3, 12], [2, 99]]))
    assert found.tolist() == [[True, True], [False, False], [True, False]]
    eos = hot_set.EOS
    first, second = hot_set.halves(np.array([5, 6, eos, 7, 8, 9, eos, 4, eos]))
    assert first.tolist() == [5, 6, eos]
    assert second.tolist() == [7, 8, 9, eos, 4, eos]


def test_wall_times_of_both_races_are_put_together() -> None:
    def size(**times: float) -> dict[str, object]:
        return {"wall_us": {name: {"p50": time} for name, time in times.items()}}

    found = {
        "random": {"8192": size(hbm=1.0, uva=2.0), "1": size(hbm=3.0), "64": size(hbm=4.0)},
        "random, from ids": {"8192": size(tokens=5.0, uva=6.0)},
    }
    times = load_beside("hot_set").wall_times(found)
    assert {tokens: {name: one["p50"] for name, one in of.items()} for tokens, of in times.items()} == {
        "1": {"hbm": 3.0},
        "8192": {"hbm": 1.0, "uva": 2.0, "tokens": 5.0},
    }


def test_the_cost_of_a_prefill_with_a_hot_set() -> None:
    """A quarter of the growing part is left, or a tenth; looking into GPU memory adds 30 us."""
    hot_set = load_beside("hot_set")
    names = {"direct tokens": (20.0, 1020.0), "staged tokens": (100.0, 500.0), "hbm fused": (10.0, 40.0)}
    times = {tokens: {name: {"p50": both[i]} for name, both in names.items()} for i, tokens in enumerate(("1", "8192"))}
    found = hot_set.costs(times, {"hit": 0.75, "distinct_missed": 0.1})
    assert found == {
        "direct": 300.0,
        "direct distinct": 150.0,
        "direct without a set": 1020.0,
        "staged": 230.0,
        "staged distinct": 170.0,
        "staged without a set": 500.0,
    }
