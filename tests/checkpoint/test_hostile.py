"""Every hostile checkpoint is refused, with a message a person can act on, in bounded memory and time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from checkpoint import tiny
from checkpoint.hostile import ATTACKS, Attack
from ple_offload.errors import CheckpointError
from ple_offload.spec import inspect


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
@pytest.mark.timeout(20)
def test_is_refused(attack: Attack, tmp_path: Path) -> None:
    attack.build(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message  # the place
    for part in attack.says:
        assert part in message
    assert len(message) < 1500
    message.encode()  # can be printed


def test_the_valid_neighbours_are_accepted(tmp_path: Path) -> None:
    """The attacks start from these; they must pass without the damage, or the tests above show nothing."""
    for dtype in tiny.ITEM_BYTES:
        assert inspect(tiny.write_default(tmp_path / dtype, dtype=dtype)).table().num_rows == tiny.ROWS


@pytest.mark.parametrize("name", ["enormous_header", "forty_megabytes_of_brackets", "nested_a_million_deep"])
def test_memory_is_bounded(name: str, tmp_path: Path) -> None:
    next(attack for attack in ATTACKS if attack.name == name).build(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            inspect(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20  # parsing the brackets would take over a gigabyte
