"""`rows`: equal to the plain reference, continued by --context, and clear about what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ple_offload
from ple_offload.cli import main

TOKENS = [5, 6, 7, 8, 9, 10]  # 7 is the end-of-text id


def rows(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[list[int]]:
    assert main(["rows", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def spelled(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def test_equal_to_the_reference(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = ple_offload.inspect(checkpoint).table().family
    expected = family.row_numbers_reference(
        np.array(TOKENS), np.array([0, len(TOKENS)]), np.full((1, 2), family.filler)
    )
    assert rows([str(checkpoint), "--tokens", spelled(TOKENS)], capsys) == expected.tolist()


@pytest.mark.parametrize("cut", range(1, len(TOKENS)))
def test_context_continues_a_request(checkpoint: Path, cut: int, capsys: pytest.CaptureFixture[str]) -> None:
    """However much of the past is given, the rows are those of the whole."""
    whole = rows([str(checkpoint), "--tokens", spelled(TOKENS)], capsys)
    tail = [str(checkpoint), "--tokens", spelled(TOKENS[cut:]), "--context", spelled(TOKENS[:cut])]
    assert rows(tail, capsys) == whole[cut:]


def test_for_people(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = rows([str(checkpoint), "--tokens", "5 6"], capsys)
    assert main(["rows", str(checkpoint), "--tokens", "5 6"]) == 0
    assert capsys.readouterr().out == f"5: {' '.join(map(str, numbers[0]))}\n6: {' '.join(map(str, numbers[1]))}\n"


def test_several_tables_need_a_layer(make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    two = str(make_checkpoint(ple_layer_ids=[1, 2]))
    assert main(["rows", two, "--tokens", "1"]) == 2
    assert "0, 1" in capsys.readouterr().err
    first = rows([two, "--tokens", "1", "--layer", "0"], capsys)
    assert first != rows([two, "--tokens", "1", "--layer", "1"], capsys)
    assert main(["rows", two, "--tokens", "1", "--layer", "9"]) == 2


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ("", ["--tokens", "at least one"]),
        (" ", ["--tokens", "at least one"]),
        ("1,,3", ["--tokens", "''", "position 1"]),
        ("1,x,3", ["--tokens", "'x'", "position 1"]),
        ("1,2.5", ["--tokens", "'2.5'", "position 1"]),
        ("1,1000", ["input_ids[1] = 1000", "0 to 999"]),
        ("1,-1", ["input_ids[1] = -1", "0 to 999"]),
        ("1," + "9" * 30, ["9" * 30, "position 1"]),
        ("1," + "9" * 5000, ["9" * 40 + "... (5000 characters)", "position 1"]),
    ],
)
def test_bad_ids(tokens: str, parts: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", str(checkpoint), f"--tokens={tokens}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for part in parts:
        assert part in printed.err


def test_a_bad_context_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", str(checkpoint), "--tokens", "1", "--context", "1,5000"]) == 2
    assert "5000" in capsys.readouterr().err
