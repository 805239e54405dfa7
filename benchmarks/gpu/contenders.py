"""What is compared: every one delivers bf16 [tokens, 2560] on the GPU from what a `Batch` holds on the GPU.

One lookup: `prepare` (not timed: puts the batch where the contender expects it) -> `begin` (what the host does before a
forward) -> `forward` (may be captured in a graph if `captured`) -> once the GPU is done, `finish` (not timed; raises if
the contender says that its rows are wrong).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import bare_gather
import torch
from batches import MAX_REQS, MAX_TOKENS, Batch
from on_device import page_locked, resident, words_of
from world import EMBED_DIM, LAYER, ROW_DIM, ROWS_PER_TOKEN, Worker, World

from ple_offload.connector import ConnectorConfig, PleOffloadConnector
from ple_offload.layer import PleOffloadLayer

DEVICE = torch.device("cuda", 0)


class Contender:
    """See the module. `chained`: `forward` reads the batch it is given, so several fit in one graph."""

    captured = True
    chained = True

    def prepare(self, batch: Batch) -> None:
        """Nothing to do."""

    def begin(self, batch: Batch) -> None:
        """Nothing to do."""

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def finish(self) -> None:
        """Nothing to do."""

    def before_capture(self, tokens: int) -> None:
        """Nothing to do."""

    def choice(self, tokens: int) -> str:
        """Which of several ways it goes with so many tokens, where it has several."""
        return ""

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing to do."""


class Decoder:
    """Stored rows as int64 words [n, row_bytes / 8] on the GPU -> bf16 [tokens, 2560], with torch's own operations."""

    def __init__(self, world: World) -> None:
        scale = world.spec.format.scale
        self.words = world.spec.row_bytes // 8
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.bfloat16, device=DEVICE)
        self.plain_scale = None if self.scale is None else float(self.scale)

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            values = stored.view(torch.bfloat16)
        else:
            values = stored.view(torch.float8_e4m3fn).to(torch.bfloat16) * self.scale
        return values.view(-1, EMBED_DIM)


class Hbm(Contender):
    """The whole table in GPU memory: `index_select` and torch's decode."""

    def __init__(self, world: World) -> None:
        self.decode = Decoder(world)
        self.table = resident(world, DEVICE)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.decode(torch.index_select(self.table, 0, batch.rows.view(-1)))


class Bare(Contender):
    """The plain kernel at an address the GPU can read; FP8 decoded by torch, or by the same kernel (`fused`)."""

    def __init__(self, address: int, decode: Decoder, *, fused: bool, keep: contextlib.ExitStack | None = None) -> None:
        self.address, self.decode, self.fused = address, decode, fused
        self.keep = keep or contextlib.ExitStack()  # what makes the address valid

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = batch.rows.view(-1)
        if self.fused and self.decode.plain_scale is not None:
            out = torch.empty((rows.numel(), ROW_DIM), dtype=torch.bfloat16, device=DEVICE)
            bare_gather.copy_and_decode(self.address, rows, out, self.decode.plain_scale)
            return out.view(-1, EMBED_DIM)
        stored = torch.empty((rows.numel(), self.decode.words), dtype=torch.int64, device=DEVICE)
        bare_gather.copy(self.address, rows, stored)
        return self.decode(stored)

    def close(self) -> None:
        self.keep.close()


class Transformers(Contender):
    """What transformers does with an embedding on the CPU: row numbers there, `F.embedding`, the rows back."""

    captured = False

    def __init__(self, world: World) -> None:
        self.table = words_of(world)
        self.decode = Decoder(world)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = torch.nn.functional.embedding(batch.rows.view(-1).cpu(), self.table)
        return self.decode(found.to(DEVICE))


class Ours(Contender):
    """The real connector and layer. Row numbers (request "rows") or token ids that are hashed (request "tokens")."""

    def __init__(self, name: str, request: str, *, worker: Worker | None = None, world: World | None = None) -> None:
        """worker: for all routes but `direct`; world: for `direct`, which reads its table."""
        self.layer = PleOffloadLayer(LAYER, EMBED_DIM)
        self.hidden = torch.empty((MAX_TOKENS, 1), device=DEVICE)
        self.rows = torch.zeros((MAX_TOKENS, ROWS_PER_TOKEN), dtype=torch.int64, device=DEVICE)
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=DEVICE)
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32, device=DEVICE)
        self.context = torch.zeros((MAX_REQS, 2), dtype=torch.int32, device=DEVICE)
        sources: dict[str, Any] = {"row_numbers_source": {LAYER: self.rows}}
        if request == "tokens":
            sources = {
                "input_ids_source": self.ids,
                "query_start_loc_source": self.starts,
                "ngram_context_source": self.context,
            }
        route = name.split()[0]
        # direct reads the forward's ids: several lookups of one step are several batches
        self.chained = route == "direct" and request == "tokens"
        self.connector = PleOffloadConnector(
            ConnectorConfig(MAX_TOKENS, MAX_REQS, session=name, request=request, route=route),
            self.layer,
            DEVICE,
            worker.address if worker else "inline",
            tables={LAYER: world.table} if world else None,
            **sources,
        )

    def prepare(self, batch: Batch) -> None:
        self.rows[: batch.tokens] = batch.rows
        self.ids[: batch.tokens] = batch.ids
        self.starts[: batch.num_reqs + 1] = batch.starts
        self.context[: batch.num_reqs] = batch.context

    def begin(self, batch: Batch) -> None:
        self.step = self.connector.prepare_forward(batch.num_reqs, batch.tokens)

    def forward(self, batch: Batch) -> torch.Tensor:
        rows: torch.Tensor = self.layer(self.hidden[: batch.tokens], batch.ids, batch.starts, batch.context)
        return rows

    def finish(self) -> None:
        try:
            self.connector.check(self.step)
        finally:
            self.connector.release_outputs()

    def before_capture(self, tokens: int) -> None:
        self.connector.signal_dummy_outputs(tokens)

    def choice(self, tokens: int) -> str:
        report = self.connector.route_report
        if self.connector.config.route != "auto":
            return ""
        return "direct" if tokens <= report.direct_tokens else "staged"

    def describe(self) -> dict[str, Any]:
        return {"report": asdict(self.connector.route_report), "device_bytes": self.connector.device_bytes}

    def close(self) -> None:
        self.connector.close()


Makers = dict[str, Callable[[dict[str, Contender]], Contender]]


def factories(world: World, worker: Worker) -> Makers:
    """How to make each contender, given those that were made before it."""
    from cross_process import CrossProcess

    def uva(_: dict[str, Contender]) -> Contender:
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(page_locked(world, DEVICE))
            return Bare(address, Decoder(world), fused=False, keep=stack.pop_all())

    def hbm_fused(made: dict[str, Contender]) -> Contender:
        hbm = made["hbm"]
        assert isinstance(hbm, Hbm)
        return Bare(hbm.table.data_ptr(), hbm.decode, fused=True)

    def uva_fused(made: dict[str, Contender]) -> Contender:
        plain = made["uva"]
        assert isinstance(plain, Bare)
        return Bare(plain.address, plain.decode, fused=True)

    found: Makers = {
        "hbm": lambda _: Hbm(world),
        "uva": uva,
        "transformers": lambda _: Transformers(world),
        "cross-process": lambda _: CrossProcess(world, Decoder(world)),
        "direct": lambda _: Ours("direct", "rows", world=world),
        "direct tokens": lambda _: Ours("direct tokens", "tokens", world=world),
        "staged": lambda _: Ours("staged", "rows", worker=worker),
        "staged tokens": lambda _: Ours("staged tokens", "tokens", worker=worker),
        "ipc": lambda _: Ours("ipc", "rows", worker=worker),
        "ipc tokens": lambda _: Ours("ipc tokens", "tokens", worker=worker),
        "auto": lambda _: Ours("auto", "rows", worker=worker),
        "auto tokens": lambda _: Ours("auto tokens", "tokens", worker=worker),
    }
    if world.spec.format.scale is not None:  # else there is nothing to fuse
        found |= {"hbm fused": hbm_fused, "uva fused": uva_fused}
    return found
