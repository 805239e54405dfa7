"""FP8 E4M3 times a scale, as bf16, many codes at a time: the bits of the table of 256 codes, at a third of its cost.

A table of codes costs two loads per element, one after the other: so many instructions that the processor cannot look
ahead into the next row, and the gather waits for memory it could have asked for. Two ways avoid that.

In registers, where the processor can pick bytes from two of them (AVX-512 VBMI: Intel since Ice Lake, AMD since Zen 4), 64
codes at a time. Half the table suffices, 128 codes without a sign, as 128 low and 128 high bytes; the sign is put back,
except for 0xFF, which is the NaN of 0x7F. The last 64 codes of a row may overlap those before: they are done twice.

By arithmetic, on any processor, on vectors the compiler cuts to its registers. For a code s.eeee.mmm and a scale c in bf16:

* e > 0: the seven bits eeee.mmm become the upper exponent and mantissa bits of a float32 whose exponent is re-biased
  (127 - 7 = 120); e = 0: m * 2**-9. Both are exact.
* times c: exact in float32, since 4 bits times 8 bits make 12 of mantissa.
* rounded once to bf16, nearest even, on the integer of the float32; the sign is put back; 0x7F and 0xFF are NaN.

That is exact unless a product leaves float32's normal range, so `vector_tables` tries all 256 codes on the scale at hand.
"""

from __future__ import annotations

import math
from functools import lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ple_offload import native
from ple_offload.formats.base import RowFormat

_I64 = ir.IntType(64)
_LANES = 32  # by arithmetic
_PICKED = 64  # in registers
_SMALLEST_NORMAL = 2.0**-126
Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=16)
def vector_tables(row_format: RowFormat, dtype: str) -> tuple[np.float32, Bytes] | None:
    """(scale, halves) to decode these rows with; None where `decode_e4m3` does not give exactly the table's values.

    halves: (256,) uint8, the low bytes of the values of codes 0 to 127, then the high bytes.
    """
    if row_format.name != "fp8_e4m3" or dtype != "bf16" or row_format.scale is None:
        return None
    scale = np.float32(row_format.scale).astype(ml_dtypes.bfloat16).astype(np.float32)
    # a product below the normal range would depend on the thread's flush-to-zero mode
    if not math.isfinite(scale) or abs(float(scale)) * 2.0**-9 < _SMALLEST_NORMAL:
        return None
    expected = row_format.codes_to_values(dtype)
    assert expected is not None  # fp8 codes are never the values
    halves = np.ascontiguousarray(expected[:128].view(np.uint8).reshape(128, 2).T).reshape(-1)
    values, codes = np.empty(256, np.uint16), np.arange(256, dtype=np.uint8)
    for piece in (256, _LANES):  # both ways
        _decode_pieces(codes, piece, scale, halves, values)
        if not np.array_equal(values, expected):
            return None
    return scale, halves


@native.kernel()
def _decode_pieces(codes, piece, scale, halves, out):  # type: ignore[no-untyped-def]
    tables = np.uint64(halves.ctypes.data)
    for i in range(0, codes.size, piece):
        target, source = np.uint64(out.ctypes.data + 2 * i), np.uint64(codes.ctypes.data + i)
        decode_e4m3(target, source, np.uint64(piece), scale, tables)


@intrinsic
def decode_e4m3(typing_context, target, source, count, scale, halves):  # type: ignore[no-untyped-def]
    """Decode `count` codes at address `source` to bf16 at address `target` (2-byte aligned); checks nothing.

    halves: the address of the 256 bytes.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        to, start, num_codes, factor, tables = arguments
        features = (
            context.codegen().magic_tuple()[2].split(",")
        )  # of the processor compiled for; part of the cache's key
        if "+avx512vbmi" in features:
            enough = builder.icmp_unsigned(">=", num_codes, _I64(_PICKED))
            with builder.if_else(enough) as (long, short):
                with long:
                    _pick_all(builder, to, start, num_codes, tables)
                with short:
                    _compute_all(builder, to, start, num_codes, factor)
        else:
            _compute_all(builder, to, start, num_codes, factor)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.float32, types.uint64), generate


def _pick_all(builder: ir.IRBuilder, to: ir.Value, start: ir.Value, num_codes: ir.Value, tables: ir.Value) -> None:
    """Codes [0, 64), [64, 128), ... and the last 64, which may overlap."""
    with cgutils.for_range(builder, builder.udiv(num_codes, _I64(_PICKED)), intp=_I64) as loop:
        _pick(builder, to, start, builder.mul(loop.index, _I64(_PICKED)), tables)
    _pick(builder, to, start, builder.sub(num_codes, _I64(_PICKED)), tables)


def _pick(builder: ir.IRBuilder, to: ir.Value, start: ir.Value, index: ir.Value, tables: ir.Value) -> None:
    """Decode 64 codes from `index` on."""
    kind = ir.VectorType(ir.IntType(8), _PICKED)

    def load(address: ir.Value) -> ir.Value:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)

    def number(value: int) -> ir.Constant:
        return ir.Constant(kind, [value] * _PICKED)

    pick = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), "llvm.x86.avx512.vpermi2var.qi.512"
    )
    codes = load(builder.add(start, index))
    # bits 0 to 6 of each code choose one of 128 bytes; bit 7 is not looked at
    low, high = (
        builder.call(pick, [load(builder.add(tables, _I64(at))), codes, load(builder.add(tables, _I64(at + _PICKED)))])
        for at in (0, 2 * _PICKED)
    )
    is_nan = builder.icmp_unsigned("==", codes, number(0xFF))
    sign = builder.select(is_nan, number(0), builder.and_(codes, number(0x80)))
    order = [i // 2 + _PICKED * (i % 2) for i in range(2 * _PICKED)]  # low byte, high byte, low byte, ...
    picked_order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * _PICKED), order)
    values = builder.shuffle_vector(low, builder.xor(high, sign), picked_order)
    place = builder.add(to, builder.shl(index, _I64(1)))
    builder.store(values, builder.inttoptr(place, values.type.as_pointer()), align=2)


def _compute_all(builder: ir.IRBuilder, to: ir.Value, start: ir.Value, num_codes: ir.Value, factor: ir.Value) -> None:
    """Whole vectors, then the rest one by one."""
    chunks = builder.udiv(num_codes, _I64(_LANES))
    done = builder.mul(chunks, _I64(_LANES))
    for lanes, first, steps in ((_LANES, _I64(0), chunks), (1, done, builder.sub(num_codes, done))):
        byte_pointer = ir.VectorType(ir.IntType(8), lanes).as_pointer()
        short_pointer = ir.VectorType(ir.IntType(16), lanes).as_pointer()
        scales = _spread(builder, factor, lanes)
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            index = builder.add(first, builder.mul(loop.index, _I64(lanes)))
            codes = builder.load(builder.inttoptr(builder.add(start, index), byte_pointer), align=1)
            place = builder.inttoptr(builder.add(to, builder.shl(index, _I64(1))), short_pointer)
            builder.store(_compute(builder, codes, scales, lanes), place, align=2)


def _spread(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """A vector of `lanes` times one float."""
    kind = ir.VectorType(ir.FloatType(), lanes)
    undefined, i32 = ir.Constant(kind, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(undefined, value, i32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(i32, lanes), [0] * lanes))


def _compute(builder: ir.IRBuilder, codes: ir.Value, scales: ir.Value, lanes: int) -> ir.Value:
    """bf16 bits <lanes x i16> of codes <lanes x i8>."""
    i16, i32, f32 = (ir.VectorType(kind, lanes) for kind in (ir.IntType(16), ir.IntType(32), ir.FloatType()))

    def number(value: int) -> ir.Constant:
        return ir.Constant(i32, [value] * lanes)

    wide = builder.zext(codes, i32)
    magnitude = builder.and_(wide, number(0x7F))
    normal = builder.bitcast(builder.add(builder.shl(magnitude, number(20)), number(120 << 23)), f32)
    subnormal = builder.fmul(builder.sitofp(magnitude, f32), ir.Constant(f32, [2.0**-9] * lanes))
    value = builder.select(builder.icmp_unsigned("<", magnitude, number(8)), subnormal, normal)
    bits = builder.bitcast(builder.fmul(value, scales), i32)
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.lshr(builder.add(builder.add(bits, number(0x7FFF)), odd), number(16))
    signed = builder.xor(rounded, builder.shl(builder.and_(wide, number(0x80)), number(8)))
    finite = builder.icmp_unsigned("!=", magnitude, number(0x7F))
    return builder.trunc(builder.select(finite, signed, number(0x7FC0)), i16)
