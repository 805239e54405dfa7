"""Gather rows by number and decode them on the way: the compiled half of the formats.

A store hands out segments: segment i holds rows [starts[i], starts[i + 1]) one after the other from address bases[i]
(any alignment). `step` is the rows per segment where all are equal (the last may be short), else 0: then the segment is
searched. The addresses of CHUNK_ROWS rows are found first, then the rows are read, and asked for PREFETCH_ROWS ahead, since
each is a cache miss and usually a TLB miss as well: whatever stands between two reads keeps the processor from seeing far.

Every row number is checked before it becomes an address. The kernels return the index of the first bad one, or GATHERED;
FAULTED where a mapped file was cut meanwhile. The parallel one deals blocks of rows to its threads, the next block to
whoever is free: one that is held up delays nothing but its block.

Readers in other processes are told of each block as soon as it is there (`Readers`), not at the end.

Shapes: bases (segments,) uint64, starts (segments + 1,) int64, rows (n,) int64. kind COPY: out (n, row_bytes) uint8.
VECTORS: out (n, row_dim) uint16, `scale` and, at the address `table`, `halves`: see e4m3.py. CODES: out (n, row_dim)
uint16/uint32, `table` the address of the values of all codes (256 or 65,536), of the same dtype; `code` and `value` are
zeros that only carry a type: of the stored codes (uint8/uint16) and of the values. Addresses, since an array that comes
from Python takes numba as long as a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ple_offload import native
from ple_offload.errors import UsageError
from ple_offload.formats.base import RowFormat
from ple_offload.formats.e4m3 import decode_e4m3, vector_tables
from ple_offload.ipc.words import load_acquire, publish_flag, store_release
from ple_offload.native import copy_bytes, load_item, prefetch, take_ticket

CHUNK_ROWS, PREFETCH_ROWS = 256, 16
COPY, CODES, VECTORS = 0, 1, 2
GATHERED, FAULTED = -1, -2
# columns of Readers.addresses, and entries of Readers.shared
OUT, FLAGS, FLAG, WAITERS = 0, 1, 2, 3
HEARTBEAT, FAULTS, FAULTS_BEFORE = 0, 1, 2


@dataclass(frozen=True)
class Readers:
    """Who waits for the blocks of one gather.

    addresses: uint64 (readers, 4): where each one's rows go, its first block's flag, the value of a flag that says "there",
        and its word that says whether it sleeps (ipc/words.py). The rows are gathered for the first and copied to others.
    shared: uint64 (3,): the address of the heartbeat word, which every block moves; the address of the count of pages
        that were gone, and that count before the gather.
    total: rows the readers expect; those behind the rows asked for are already there (zeros).
    """

    addresses: npt.NDArray[np.uint64]
    shared: npt.NDArray[np.uint64]
    block_rows: int
    total: int


@native.kernel()
def _find(bases, starts, step, rows, count, row_bytes, found):  # type: ignore[no-untyped-def]
    """The addresses of rows[:count] to found[:count]; GATHERED, or the index of the first that is no row."""
    segments = bases.size
    total = starts[segments]
    inverse = 1.0 / max(1, step)
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= total:
            return i
        low = np.int64(0)
        if segments == 1:
            pass
        elif step > 0:  # a division of integers would take as long as half the row
            low = np.int64(row * inverse)
            if starts[low] > row:
                low -= 1
            elif starts[low + 1] <= row:
                low += 1
        else:
            high = segments  # the segment is in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                if starts[middle] <= row:
                    low = middle
                else:
                    high = middle
        found[i] = bases[low] + np.uint64((row - starts[low]) * row_bytes)
    return GATHERED


@native.kernel()
def _ask_for(address, row_bytes):  # type: ignore[no-untyped-def]
    for offset in range(0, row_bytes, 64):
        prefetch(address + np.uint64(offset))
    prefetch(address + np.uint64(row_bytes - 1))


@native.kernel()
def _read(kind, found, count, row_bytes, code, value, scale, table, out, place):  # type: ignore[no-untyped-def]
    """The rows at the addresses found[:count] to out[place:]."""
    width = np.uint64(out.shape[1] * out.itemsize)
    to = np.uint64(out.ctypes.data) + np.uint64(place) * width
    for i in range(min(count, PREFETCH_ROWS)):
        _ask_for(found[i], row_bytes)
    for i in range(count):
        if i + PREFETCH_ROWS < count:
            _ask_for(found[i + PREFETCH_ROWS], row_bytes)
        source = found[i]
        if kind == COPY:
            copy_bytes(to, source, np.uint64(row_bytes))
        elif kind == VECTORS:
            decode_e4m3(to, source, np.uint64(row_bytes), scale, table)
        else:
            for k in range(out.shape[1]):
                out[place + i, k] = load_item(table, np.uint64(load_item(source, np.uint64(k), code)), value)
        to += width


@native.kernel()
def _tell(addresses, shared, number, first_byte, num_bytes):  # type: ignore[no-untyped-def]
    """Copy a block that is there to the other readers, and raise its flags; False where it cannot be trusted."""
    if addresses.shape[0] == 0:
        return True
    if load_acquire(shared[FAULTS]) != shared[FAULTS_BEFORE]:
        return False
    source = addresses[0, OUT] + np.uint64(first_byte)
    for r in range(1, addresses.shape[0]):
        copy_bytes(addresses[r, OUT] + np.uint64(first_byte), source, np.uint64(num_bytes))
    for r in range(addresses.shape[0]):
        publish_flag(addresses[r, FLAGS] + np.uint64(8 * number), addresses[r, FLAG], addresses[r, WAITERS])
    store_release(shared[HEARTBEAT], load_acquire(shared[HEARTBEAT]) + np.uint64(1))
    return True


@native.kernel()
def gather_blocks(  # type: ignore[no-untyped-def]
    kind,
    bases,
    starts,
    step,
    rows,
    row_bytes,
    code,
    value,
    scale,
    table,
    out,
    tickets,
    addresses,
    shared,
    block,
    total,
):
    """Gather block after block; those whose ticket is drawn at the address `tickets`, or all where that is 0.

    A step without rows has one block, whose flag says that nothing failed.
    """
    width = out.shape[1] * out.itemsize
    blocks = max(1, (total + block - 1) // block)
    # the rows may be in a reader's memory: what is checked must be what is used
    asked, found = np.empty(CHUNK_ROWS, np.int64), np.empty(CHUNK_ROWS, np.uint64)
    number = np.int64(take_ticket(tickets)) if tickets else 0
    while number < blocks:
        first, last = number * block, min(total, (number + 1) * block)
        end = min(rows.size, last)
        for begin in range(first, end, CHUNK_ROWS):
            count = min(CHUNK_ROWS, end - begin)
            for i in range(count):
                asked[i] = rows[begin + i]
            bad = _find(bases, starts, step, asked, count, row_bytes, found)
            if bad != GATHERED:
                return begin + bad
            _read(kind, found, count, row_bytes, code, value, scale, table, out, begin)
        if not _tell(addresses, shared, number, first * width, (last - first) * width):
            return FAULTED
        number = np.int64(take_ticket(tickets)) if tickets else number + 1
    return GATHERED


@native.kernel(parallel=True)
def gather_blocks_parallel(  # type: ignore[no-untyped-def]
    kind,
    bases,
    starts,
    step,
    rows,
    row_bytes,
    code,
    value,
    scale,
    table,
    out,
    tickets,
    addresses,
    shared,
    block,
    total,
    shares,
):
    done = np.full(shares, GATHERED, np.int64)
    for s in numba.prange(shares):
        done[s] = gather_blocks(
            kind,
            bases,
            starts,
            step,
            rows,
            row_bytes,
            code,
            value,
            scale,
            table,
            out,
            tickets,
            addresses,
            shared,
            block,
            total,
        )
    first_bad = GATHERED
    for s in range(shares):
        if done[s] == FAULTED:
            return FAULTED
        if done[s] >= 0 and (first_bad < 0 or done[s] < first_bad):
            first_bad = done[s]
    return first_bad


@native.kernel()
def _tell_all(addresses, shared, block, total, width):  # type: ignore[no-untyped-def]
    """`_tell` for every block of `total` rows; a step without rows has one block, whose flag says that nothing failed."""
    for number in range(max(1, (total + block - 1) // block)):
        first, last = number * block, min(total, (number + 1) * block)
        if not _tell(addresses, shared, number, first * width, (last - first) * width):
            return FAULTED
    return GATHERED


_ALL = np.uint64(0)
_NOBODY = np.empty((0, 4), np.uint64), np.zeros(3, np.uint64)


class Gather:
    """Rows of one row map to one value dtype ("bf16", "fp16", "fp32", or "stored" for the bytes as they are).

    Chooses the kernel's way and holds the arguments that never change.
    """

    def __init__(
        self, row_format: RowFormat, bases: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], step: int, name: str
    ) -> None:
        plain = name in ("stored", row_format.name)
        vectors = None if plain else vector_tables(row_format, name)  # not None: many codes at a time
        # fp32 rows wanted in 16 bits are copied, then cast: they have too many codes for a table
        self._cast_from = row_format.stored_dtype if row_format.name == "fp32" and not plain else None
        codes = None if plain or vectors or self._cast_from else row_format.codes_to_values(name)
        kind = VECTORS if vectors is not None else COPY if codes is None else CODES
        self._carrier = np.dtype(np.uint8 if kind == COPY else np.uint16 if codes is None else codes.dtype)
        self._code = _CODE_ZERO.get(row_format.stored_dtype.itemsize, np.uint8(0))
        scale, table = vectors or (np.float32(1), np.empty(0, np.uint8) if codes is None else codes)
        self._table: npt.NDArray[Any] = table  # kept alive: the kernel has its address
        self._width = row_format.row_bytes if name == "stored" else row_format.row_dim
        self._before = (kind, bases, starts, step)
        self._after = (
            row_format.row_bytes,
            self._code,
            np.zeros(1, self._carrier)[0],
            scale,
            np.uint64(self._table.ctypes.data),
        )

    def run(
        self, rows: npt.NDArray[np.int64], values: npt.NDArray[Any], shares: int, readers: Readers | None = None
    ) -> int:
        """Fill values [rows.size, row_dim]; returns GATHERED, FAULTED, or the index of the first bad row number.

        shares: how many threads work; more than one only in a `native.parallel_turn`. With readers, `values` is the first
        one's output, [readers.total, row_dim], and every reader is told of each block.
        """
        if values.shape[1] != self._width:  # the kernel would write beside it
            raise UsageError(f"values: expected rows of {self._width} elements, found {values.shape[1]}.")
        raw = values if self._cast_from is None else np.empty((rows.size, values.shape[1]), self._cast_from)
        fixed = (*self._before, rows, *self._after, raw.view(self._carrier))
        if readers is None or raw is not values:
            told = (*_NOBODY, max(1, -(-rows.size // shares)), rows.size)
        else:
            told = (readers.addresses, readers.shared, readers.block_rows, readers.total)
        if shares > 1:
            next_block = np.zeros(1, np.uint64)  # here: numba would free it once its address was taken
            done = int(gather_blocks_parallel(*fixed, np.uint64(next_block.ctypes.data), *told, shares))
        else:
            done = int(gather_blocks(*fixed, _ALL, *told))
        if done == GATHERED and raw is not values:
            with np.errstate(over="ignore", invalid="ignore"):
                values[: rows.size] = raw
            if readers is not None:
                width = values.shape[1] * values.itemsize
                done = int(_tell_all(readers.addresses, readers.shared, readers.block_rows, readers.total, width))
        return done


_CODE_ZERO = {1: np.uint8(0), 2: np.uint16(0)}
