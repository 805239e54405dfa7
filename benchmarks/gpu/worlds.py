"""What `lookup` measures: which tables, of which contenders, in which sizes. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192)
OURS = ("direct", "direct tokens", "staged", "staged tokens", "ipc", "ipc tokens", "auto", "auto tokens")


@dataclass(frozen=True)
class Plan:
    """One table and what is measured of it."""

    kind: str  # a key of world.FORMATS
    huge: bool = True  # on 2 MiB pages
    on_disk: bool = False  # a checkpoint, through the page cache
    text: bool = False  # rows of real text beside random ones
    contenders: tuple[str, ...] = ()  # none: all


WORLDS = {
    "fp8": Plan("fp8", text=True),
    "bf16": Plan("bf16"),
    "fp8-small-pages": Plan("fp8", huge=False, contenders=("uva", "uva fused", "transformers", *OURS)),
    "file": Plan("fp8", on_disk=True, contenders=OURS),
}
