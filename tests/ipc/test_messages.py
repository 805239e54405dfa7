"""Messages: what goes in comes out, anything else is a ProtocolError, and the document lists every record and field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ple_offload.errors import ProtocolError
from ple_offload.ipc import messages
from ple_offload.ipc.messages import DESCRIPTORS, MAX_MESSAGE_BYTES, Message, decode, encode, plain

RECORDS = get_args(Message)
text = st.text(max_size=50)
number = st.integers(-(1 << 63), (1 << 64) - 1)


def records() -> st.SearchStrategy[Message]:
    facts = st.builds(
        messages.LayerFacts,
        number,
        text,
        *[number] * 3,
        *[number] * 3,
        text,
        st.none() | st.floats(allow_nan=False),
    )
    of_type = {
        int: number,
        str: text,
        bytes: st.binary(max_size=80),
        messages.LayerFacts: facts,
        dict[str, int]: st.dictionaries(text, number, max_size=3),
        list[tuple[int, int, int]]: st.lists(st.tuples(number, number, number), max_size=3),
        list[messages.LayerWish]: st.lists(st.builds(messages.LayerWish, number, text, text), max_size=3),
        list[messages.LayerFacts]: st.lists(facts, max_size=3),
    }
    built = []
    for record in RECORDS:
        fields = {field.name: of_type[field.type] for field in msgspec.structs.fields(record)}
        built.append(st.builds(record, **fields))
    return st.one_of(built)


@given(records())
def test_round_trip(message: Message) -> None:
    assert decode(encode(message), "peer") == message


@given(st.binary(max_size=300))
def test_bytes_are_refused(packet: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^peer: expected a message of protocol 2, found"):
        decode(packet, "peer")


@given(records(), st.data())
def test_damaged_messages_are_refused_or_are_messages(message: Message, data: st.DataObject) -> None:
    packet = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packet)))
    for damaged in (bytes(packet), bytes(packet[:cut])):
        try:
            found = decode(damaged, "peer")
        except ProtocolError as error:
            found = str(error)
        assert isinstance(found, RECORDS) or found.isprintable()


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc"])))
def test_any_reason_can_be_sent_and_logged(reason: str) -> None:
    said = plain(reason)
    assert said.isprintable()
    assert decode(encode(messages.Refused(said)), "peer") == messages.Refused(said)


def test_the_longest_reason_fits_a_message() -> None:
    assert len(encode(messages.StepFailed(1 << 47, plain("\U0001f600" * 100_000)))) < MAX_MESSAGE_BYTES
    assert len(encode(messages.StepFailed(1 << 47, plain("\0" * 100_000)))) < MAX_MESSAGE_BYTES


def test_the_document_lists_every_record_and_field() -> None:
    document = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    assert f"at most {MAX_MESSAGE_BYTES:,} bytes" in document
    for record in (*RECORDS, messages.LayerWish, messages.LayerFacts):
        if record in RECORDS:
            assert re.search(rf"^(### {record.__name__} |\| {record.__name__} \|)", document, re.MULTILINE), record
        for field in record.__struct_fields__:
            assert re.search(rf"\b{field}\b", document), (record, field)
    for record, count in DESCRIPTORS.items():
        how_many = {1: "one descriptor", 2: "two descriptors"}[count]
        assert re.search(rf"^### {record.__name__} \(\w+, {how_many}", document, re.MULTILINE)
