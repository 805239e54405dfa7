"""The layout of a region: as docs/PROTOCOL.md says to the byte, without overlaps, the same for both sides."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ipc.minimal_client import Client
from ple_offload.ipc.messages import Hello, LayerWish
from ple_offload.ipc.region import (
    DEVICE_BLOCK_ROWS,
    HEAD_WORDS,
    PAGE,
    WORD_ANNOUNCED,
    WORD_COMING,
    WORD_EXPECTED,
    WORD_RELEASED,
    WORD_WAITED,
    WORD_WAITERS,
    Layout,
)

layouts = st.builds(
    Layout,
    request=st.sampled_from(["tokens", "rows"]),
    slots=st.integers(1, 64),
    max_num_tokens=st.integers(1, 5000) | st.integers(1, 1 << 22),
    max_num_reqs=st.integers(1, 300) | st.integers(1, 1 << 22),
    context_len=st.integers(0, 64),
    has_inputs=st.booleans(),
    token_bytes=st.just(()),
    rows_per_token=st.lists(st.integers(1, 4096), min_size=1, max_size=5).map(tuple),
).flatmap(
    lambda layout: st.tuples(*[st.integers(1, 1 << 20)] * len(layout.rows_per_token)).map(
        lambda token_bytes: Layout(**{**layout.__dict__, "token_bytes": token_bytes})
    )
)


@given(layouts | layouts.map(lambda layout: layout.on_device))
def test_parts_do_not_overlap_and_lie_within(layout: Layout) -> None:
    parts = [(word, word + 8) for word in (WORD_ANNOUNCED, WORD_RELEASED, WORD_WAITED, WORD_WAITERS)]
    for layer, blocks in enumerate(layout.blocks):
        assert blocks * layout.block_rows >= layout.max_num_tokens * layout.rows_per_token[layer]
        for slot in range(layout.slots):
            first, last = layout.flag(layer, slot, 0), layout.flag(layer, slot, blocks - 1)
            assert first % 8 == 0
            parts.append((first, last + 8))
            output = layout.output(layer, slot)
            assert output % PAGE == 0
            parts.append((output, output + layout.max_num_tokens * layout.token_bytes[layer]))
    if layout.has_inputs:
        numbers = layout.max_num_tokens * sum(layout.rows_per_token)
        if layout.request == "tokens":
            numbers = layout.max_num_tokens + layout.max_num_reqs + 1 + layout.max_num_reqs * layout.context_len
        for slot in range(layout.slots):
            assert layout.input(slot) % 64 == 0
            parts.append((layout.input(slot), layout.input(slot) + (HEAD_WORDS + numbers) * 8))
    parts.sort()
    for (_, end), (begin, _) in itertools.pairwise(parts):
        assert end <= begin
    assert parts[-1][1] <= layout.num_bytes


@given(layouts)
def test_the_written_formulas_agree(layout: Layout) -> None:
    """The minimal client computes a region from docs/PROTOCOL.md; the worker must find the same one."""
    client = object.__new__(Client)
    client.request, client.slots = layout.request, layout.slots
    client.max_num_tokens, client.max_num_reqs = layout.max_num_tokens, layout.max_num_reqs
    client.context_len, client.rows = layout.context_len, layout.rows_per_token[0]
    client.token_bytes = layout.token_bytes[0]
    client.lay_out()
    first = {"has_inputs": True, "rows_per_token": (client.rows,), "token_bytes": (client.token_bytes,)}
    one = Layout(**{**layout.__dict__, **first})
    last = layout.slots - 1
    assert client.size == one.num_bytes
    assert client.blocks == one.blocks[0]
    assert client.flags_at + (last * client.blocks + client.blocks - 1) * 8 == one.flag(0, last, client.blocks - 1)
    assert client.inputs_at + last * client.input_bytes == one.input(last)
    assert client.outputs_at + last * client.output_bytes == one.output(0, last)


@given(layouts)
def test_memory_on_a_gpu_is_a_region_without_inputs_and_with_large_blocks(layout: Layout) -> None:
    on_device = layout.on_device
    assert not on_device.has_inputs
    assert on_device.num_bytes <= layout.num_bytes
    for layer, rows in enumerate(layout.rows_per_token):
        assert on_device.blocks[layer] == -(-layout.max_num_tokens * rows // DEVICE_BLOCK_ROWS)
    document = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    assert f"blocks of {DEVICE_BLOCK_ROWS:,} rows" in document


def test_the_example_of_the_document() -> None:
    hello = Hello(
        version=2,
        checkpoint="",
        session="example",
        step=0,
        worker_id=0,
        dp_rank=0,
        dp_size=1,
        tp_rank=0,
        tp_size=1,
        request="tokens",
        layers=[LayerWish(1, "stored")],
        max_num_tokens=1500,
        max_num_reqs=8,
        slots=2,
        context_len=2,
        rows_per_token=0,
    )
    layout = Layout.of(hello, (128,), (4,))
    ids = layout.input(0) + HEAD_WORDS * 8
    places = {
        "announced": WORD_ANNOUNCED,
        "coming": WORD_COMING,
        "expected": WORD_EXPECTED,
        "released": WORD_RELEASED,
        "waited": WORD_WAITED,
        "waiters": WORD_WAITERS,
        "flag of slot 0, block 0": layout.flag(0, 0, 0),
        "flag of slot 0, block 1": layout.flag(0, 0, 1),
        "flag of slot 1, block 0": layout.flag(0, 1, 0),
        "flag of slot 1, block 1": layout.flag(0, 1, 1),
        "head of slot 0: step, num_reqs at 584, num_tokens at 592": layout.input(0),
        "input_ids of slot 0": ids,
        "query_start_loc of slot 0": ids + 1500 * 8,
        "ngram_context of slot 0": ids + (1500 + 9) * 8,
        "head of slot 1": layout.input(1),
        "end of the inputs": layout.input(2),
        "output of slot 0": layout.output(0, 0),
        "output of slot 1": layout.output(0, 1),
        "size of the region": layout.num_bytes,
    }
    document = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    example = document.split("### Example")[1].split("## A step")[0]
    written = {what: int(byte) for byte, what in re.findall(r"^\| (\d+) \| (.+) \|$", example, re.MULTILINE)}
    assert written == places
