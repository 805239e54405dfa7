"""What `lookup` measures: which tables, of which contenders, in which sizes. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (8192, 64, 1, 1024, 256, 4096, 8)  # the most telling first: a run may be cut short
OURS = ("direct", "direct tokens", "staged", "staged tokens", "ipc", "ipc tokens", "auto", "auto tokens")
# Who races whom: from row numbers, and from ids that ours hash (to the plain gather row numbers are given all the same).
# `auto` has the worker's table page-locked beside this process's own; a third time would be refused. Hence two races.
RACES = {
    "": ("uva", "uva fused", "hbm", "hbm fused", "transformers", "cross-process", "direct", "staged", "ipc", "auto"),
    "from ids": ("uva", "uva fused", "direct tokens", "staged tokens", "ipc tokens", "auto tokens"),
}


@dataclass(frozen=True)
class Plan:
    """One table and what is measured of it."""

    kind: str  # a key of world.FORMATS
    huge: bool = True  # on 2 MiB pages
    on_disk: bool = False  # a checkpoint, through the page cache
    text: bool = False  # rows of real text beside random ones
    contenders: tuple[str, ...] = ()  # none: all
    expected_s: float = 25.0  # to make it, start its worker, and end both

    def racing(self, race: str, only: list[str] | None) -> list[str]:
        """Who takes part in a race, of the plan's contenders and those that are wanted."""
        wanted = [names for names in (self.contenders, only) if names]
        return [name for name in RACES[race] if all(name in names for names in wanted)]


def kind_name(rows: str, race: str) -> str:
    """How a race over "random" or "text" rows is called in the results."""
    return f"{rows}, {race}" if race else rows


WORLDS = {
    "fp8": Plan("fp8", text=True),
    "bf16": Plan("bf16"),
    "fp8-small-pages": Plan("fp8", huge=False, contenders=("uva", "uva fused", "transformers", *OURS)),
    "file": Plan("fp8", on_disk=True, contenders=OURS, expected_s=80.0),
}
