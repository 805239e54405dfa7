"""The messages of the protocol, in the order of a connection's life. Plain records: nothing is ever unpickled.

    client                          worker
    Ask                        ->
                               <-   Facts                    or Refused
    Hello  + region, doorbell  ->
                               <-   Welcome + heartbeat      or Refused, and the connection ends
                               <-   Ready                    once every rank of the session has said Hello; later, once
                                                             every rank of the DP group has
    (steps: shared memory only)
                               <-   StepFailed               one step's rows cannot be delivered; the next ones can
                               <-   RankLost                 another rank of the same DP group has gone: this connection
                                                             ends too, and all ranks of the group connect anew
                               <-   Closing                  the worker stops; what was published is still served
    Goodbye                    ->                            the client is done; it expects nothing more

A client that reads the rows itself asks for the table's memory instead, part by part, on a connection of its own:

    Borrow                     ->
                               <-   Lent + descriptor        or Refused, and the connection ends
    (the connection stays open: its end is the worker's)

One message is one packet of a SOCK_SEQPACKET socket: msgpack of a map whose "type" names the record.
"""

from __future__ import annotations

import msgspec

from ple_offload.errors import ProtocolError

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 32 << 10


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """First message of a connection: what do you serve? The answer tells how large the region must be."""

    version: int
    checkpoint: str  # which of the worker's: its path, name, or a table's fingerprint; "" where it serves one


class LayerWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer a client wants served."""

    layer: int  # decoder layer, from 0
    output: str  # "stored": the rows' bytes; or "bf16", "fp16", "fp32": decoded values
    fingerprint: str = ""  # of the table the client expects (`spec.fingerprint`); "" for any


class LayerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the worker serves for a layer."""

    layer: int
    family: str
    vocab_size: int
    context_len: int
    filler: int
    num_rows: int
    rows_per_token: int
    row_dim: int
    format: str  # of the stored bytes
    scale: float | None  # fp8_e4m3: one scale for the table
    fingerprint: str  # of the rows that are served (`spec.fingerprint`)
    tier: str = ""  # where the worker has the rows: for messages, nothing follows from it


class Facts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the worker serves of the checkpoint that was asked for."""

    version: int
    pid: int  # in the worker's PID namespace: for messages, never to decide anything
    log: str  # where the worker writes its log, "" if to its terminal
    layers: list[LayerFacts]


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank presents itself; carries two descriptors: the region memfd and the doorbell eventfd."""

    version: int
    checkpoint: str  # which of the worker's: its path, name, or a table's fingerprint; "" where it serves one
    session: str  # one engine on this host; the ranks of an engine agree on it
    step: int  # the last step this rank has counted; 0 in a new process
    worker_id: int  # the rank's number among all workers of the engine, pipeline ranks counted
    dp_rank: int
    dp_size: int  # on this host
    tp_rank: int
    tp_size: int
    request: str  # "tokens": the worker hashes; "rows": the client gives row numbers
    layers: list[LayerWish]
    max_num_tokens: int
    max_num_reqs: int
    slots: int  # batches in flight
    context_len: int
    rows_per_token: int  # of request "rows", 0 for "tokens"
    direct_tokens: int = 0  # steps of up to this many tokens this rank can do without the worker, and wants to
    device: str = ""  # UUID of the GPU to whose memory the worker copies the rows; "" for none: they stay in the region
    handle: bytes = b""  # of that memory (cuIpcGetMemHandle), laid out as Layout.on_device; b"" for none


class Borrow(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Lend me part of a layer's table: the client will map it, read-only, and look rows up itself."""

    version: int
    checkpoint: str  # as in Ask
    layer: int  # decoder layer, from 0
    fingerprint: str  # of the table the client expects; "" for any
    part: int  # from 0


class Lent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Part of a table; carries one read-only descriptor: sealed memory (tier "ram") or a file (tier "file")."""

    parts: int  # of this table
    facts: LayerFacts
    rule: dict[str, int]  # the numbers of the family's rule, by name
    segments: list[tuple[int, int, int]]  # (offset in bytes, first row, number of rows) behind the descriptor


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The region fits and is mapped; carries one descriptor: the heartbeat page, read-only."""

    epoch: int  # 1..32767, of this connection: another one than this rank's connection before; part of every flag


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Steps may be published."""

    step: int  # the highest `Hello.step` of the DP group: all its ranks count on from here
    direct_tokens: int = 0  # the lowest `Hello.direct_tokens` of the DP group: steps up to it are not announced


class StepFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    step: int
    reason: str


class RankLost(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """This rank of the receiver's DP group has gone, or came anew; the worker closes the receiver's connection."""

    dp_rank: int
    tp_rank: int


class Closing(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    reason: str


class Goodbye(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


Message = Ask | Facts | Borrow | Lent | Hello | Welcome | Refused | Ready | StepFailed | RankLost | Closing | Goodbye

# How many descriptors each message carries.
DESCRIPTORS: dict[type[Message], int] = {Hello: 2, Welcome: 1, Lent: 1}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def plain(text: str, max_characters: int = 4000) -> str:
    """Text that can be sent and logged whatever a peer or a path put into it: printable, on one line, not too long."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:max_characters])[:max_characters]


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(packet: bytes, sender: str) -> Message:
    """Decode one packet; ProtocolError, naming the sender, for anything that is not a message."""
    try:
        return _decoder.decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"{sender}: expected a message of protocol {PROTOCOL_VERSION}, found {len(packet)} bytes that are none: "
            f"{plain(str(error), 200)}. Both sides must run compatible versions of ple-offload."
        ) from None
