"""What a worker answers to a Borrow: a table's memory or files, part by part, as read-only descriptors."""

from __future__ import annotations

from ple_offload.errors import ProtocolError
from ple_offload.ipc.messages import Lent
from ple_offload.table import Table

MAX_SEGMENTS = 500  # of one message: each takes up to 28 bytes


def lend(peer: str, table: Table, part: int) -> tuple[Lent, int]:
    """Part number `part` of a table, and the descriptor that goes with it, which the table keeps.

    Raises StoreError for a table that can no longer be trusted, ProtocolError for a part that there is not.
    """
    pieces = [
        (found.fd, found.segments[first : first + MAX_SEGMENTS])
        for found in table.parts()
        for first in range(0, len(found.segments), MAX_SEGMENTS)
    ]
    if not 0 <= part < len(pieces):
        raise ProtocolError(f"{peer}: part: expected 0 to {len(pieces) - 1}, found {part}.")
    fd, segments = pieces[part]
    rows = [(segment.offset, segment.first_row, segment.num_rows) for segment in segments]
    return Lent(len(pieces), table.facts(), table.spec.family.numbers(), rows), fd
