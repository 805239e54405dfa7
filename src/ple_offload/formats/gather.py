"""Gather rows by number and decode them on the way: the compiled half of the formats.

A store hands out segments: segment i holds rows [starts[i], starts[i + 1]) one after the other from address bases[i]
(any alignment). `step` is the rows per segment where all are equal (the last may be short), else 0: then the segment is
searched. Rows are asked for PREFETCH_ROWS ahead, since each is a cache miss and usually a TLB miss as well.

Every kernel checks a row number before it becomes an address, and returns the index of the first bad one, or -1. The
serial kernels do rows [first, last) of a request; the parallel ones deal equal shares to `shares` threads.

Shapes: bases (segments,) uint64, starts (segments + 1,) int64, rows (n,) int64.
`copy_*`: out (n, row_bytes) uint8. `decode_e4m3_*`: out (n, row_dim) uint16, see e4m3.py. `decode_*`: out (n, row_dim)
uint16/uint32, `values` the table of all codes of the same dtype (256 or 65,536 entries), `code` a zero of the stored
code's width (uint8/uint16), which only carries the type.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ple_offload import native
from ple_offload.formats.base import RowFormat
from ple_offload.formats.e4m3 import decode_e4m3, vector_tables
from ple_offload.native import copy_bytes, load_item, prefetch

PREFETCH_ROWS = 16


@native.kernel()
def _address(bases, starts, step, row, row_bytes):  # type: ignore[no-untyped-def]
    """The address of a row, uint64; 0 when there is no such row."""
    segments = bases.size
    if row < 0 or row >= starts[segments]:
        return np.uint64(0)
    low = 0
    if step > 0:
        low = row // step
    else:
        high = segments  # the segment is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if starts[middle] <= row:
                low = middle
            else:
                high = middle
    return bases[low] + np.uint64((row - starts[low]) * row_bytes)


@native.kernel()
def _ask_for(bases, starts, step, row, row_bytes):  # type: ignore[no-untyped-def]
    address = _address(bases, starts, step, row, row_bytes)
    for offset in range(0, row_bytes, 64):
        prefetch(address + np.uint64(offset))
    prefetch(address + np.uint64(row_bytes - 1))


@native.kernel()
def copy_rows(bases, starts, step, rows, row_bytes, out, first, last):  # type: ignore[no-untyped-def]
    target = np.uint64(out.ctypes.data)
    for i in range(first, min(last, first + PREFETCH_ROWS)):
        _ask_for(bases, starts, step, rows[i], row_bytes)
    for i in range(first, last):
        if i + PREFETCH_ROWS < last:
            _ask_for(bases, starts, step, rows[i + PREFETCH_ROWS], row_bytes)
        source = _address(bases, starts, step, rows[i], row_bytes)
        if source == 0:
            return i
        copy_bytes(target + np.uint64(i * row_bytes), source, np.uint64(row_bytes))
    return -1


@native.kernel()
def decode_rows(bases, starts, step, rows, row_bytes, code, values, out, first, last):  # type: ignore[no-untyped-def]
    for i in range(first, min(last, first + PREFETCH_ROWS)):
        _ask_for(bases, starts, step, rows[i], row_bytes)
    for i in range(first, last):
        if i + PREFETCH_ROWS < last:
            _ask_for(bases, starts, step, rows[i + PREFETCH_ROWS], row_bytes)
        source = _address(bases, starts, step, rows[i], row_bytes)
        if source == 0:
            return i
        for k in range(out.shape[1]):
            out[i, k] = values[load_item(source, np.uint64(k), code)]
    return -1


@native.kernel()
def decode_e4m3_rows(bases, starts, step, rows, row_bytes, scale, halves, out, first, last):  # type: ignore[no-untyped-def]
    target, tables = np.uint64(out.ctypes.data), np.uint64(halves.ctypes.data)
    for i in range(first, min(last, first + PREFETCH_ROWS)):
        _ask_for(bases, starts, step, rows[i], row_bytes)
    for i in range(first, last):
        if i + PREFETCH_ROWS < last:
            _ask_for(bases, starts, step, rows[i + PREFETCH_ROWS], row_bytes)
        source = _address(bases, starts, step, rows[i], row_bytes)
        if source == 0:
            return i
        decode_e4m3(target + np.uint64(2 * i * row_bytes), source, np.uint64(row_bytes), scale, tables)
    return -1


@native.kernel(parallel=True)
def copy_rows_parallel(bases, starts, step, rows, row_bytes, out, shares):  # type: ignore[no-untyped-def]
    bad = np.full(shares, -1, np.int64)
    share = (rows.size + shares - 1) // shares
    for s in numba.prange(shares):
        last = min(rows.size, (s + 1) * share)
        bad[s] = copy_rows(bases, starts, step, rows, row_bytes, out, s * share, last)
    for s in range(shares):
        if bad[s] >= 0:
            return bad[s]
    return -1


@native.kernel(parallel=True)
def decode_rows_parallel(bases, starts, step, rows, row_bytes, code, values, out, shares):  # type: ignore[no-untyped-def]
    bad = np.full(shares, -1, np.int64)
    share = (rows.size + shares - 1) // shares
    for s in numba.prange(shares):
        last = min(rows.size, (s + 1) * share)
        bad[s] = decode_rows(bases, starts, step, rows, row_bytes, code, values, out, s * share, last)
    for s in range(shares):
        if bad[s] >= 0:
            return bad[s]
    return -1


@native.kernel(parallel=True)
def decode_e4m3_rows_parallel(  # type: ignore[no-untyped-def]
    bases, starts, step, rows, row_bytes, scale, halves, out, shares
):
    bad = np.full(shares, -1, np.int64)
    share = (rows.size + shares - 1) // shares
    for s in numba.prange(shares):
        last = min(rows.size, (s + 1) * share)
        bad[s] = decode_e4m3_rows(bases, starts, step, rows, row_bytes, scale, halves, out, s * share, last)
    for s in range(shares):
        if bad[s] >= 0:
            return bad[s]
    return -1


class Gather:
    """Rows of one row map to one value dtype ("bf16", "fp16", "fp32", or "stored" for the bytes as they are).

    Chooses the kernel and holds the arguments that never change.
    """

    def __init__(
        self, row_format: RowFormat, bases: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], step: int, name: str
    ) -> None:
        self._where = (bases, starts, step)
        self._row_bytes = row_format.row_bytes
        plain = name in ("stored", row_format.name)
        self._vector_tables = None if plain else vector_tables(row_format, name)  # not None: many codes at a time
        # fp32 rows wanted in 16 bits are copied, then cast: they have too many codes for a table
        self._cast_from = row_format.stored_dtype if row_format.name == "fp32" and not plain else None
        self._codes = None if plain or self._cast_from else row_format.codes_to_values(name)
        self._code = _CODE_ZERO.get(row_format.stored_dtype.itemsize)

    def run(self, rows: npt.NDArray[np.int64], values: npt.NDArray[Any], shares: int) -> int:
        """Fill values [rows.size, row_dim]; returns the index of the first bad row number, or -1.

        shares: how many threads work; more than one only in a `native.parallel_turn`.
        """
        if self._vector_tables is not None:
            decoded = (*self._where, rows, self._row_bytes, *self._vector_tables, values.view(np.uint16))
            if shares > 1:
                return int(decode_e4m3_rows_parallel(*decoded, shares))
            return int(decode_e4m3_rows(*decoded, 0, rows.size))
        if self._codes is not None:
            target = values.view(self._codes.dtype)
            coded = (*self._where, rows, self._row_bytes, self._code, self._codes, target)
            return int(decode_rows_parallel(*coded, shares) if shares > 1 else decode_rows(*coded, 0, rows.size))
        raw = values if self._cast_from is None else np.empty(values.shape, self._cast_from)
        copied = (*self._where, rows, self._row_bytes, raw.view(np.uint8))
        bad = copy_rows_parallel(*copied, shares) if shares > 1 else copy_rows(*copied, 0, rows.size)
        if raw is not values and bad < 0:
            with np.errstate(over="ignore", invalid="ignore"):
                values[...] = raw
        return int(bad)


_CODE_ZERO = {1: np.uint8(0), 2: np.uint16(0)}
