"""Flags in shared memory: 64-bit words that one process writes and another waits for.

A flag word is `epoch << 48 | step`, compared for equality: what capture, an earlier step or an earlier connection left
there satisfies nothing. With FAILED set it says that this step's rows will not come.

A wait spins shortly, then sleeps in the kernel on a futex (the low half of the word: x86 and ARM are little-endian) for at
most the slice the caller gives, so the caller can look at the peer's socket in between. Nothing here waits longer.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ple_offload import native

FAILED = 1 << 47
MAX_STEP = (1 << 47) - 1
MAX_EPOCH = (1 << 15) - 1

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not PRIVATE: the word is shared between processes

_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.uint64, types.int64, types.int64, types.uint64, types.uint64, types.int64),
)


def flag(epoch: int, step: int) -> int:
    """The word that says: `step` of connection `epoch` is there."""
    return epoch << 48 | step


@intrinsic
def load_acquire(typing_context, address):  # type: ignore[no-untyped-def]
    """Load a uint64; what the writer stored before its `store_release` is visible afterwards."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.uint64(types.uint64), generate


@intrinsic
def store_release(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Store a uint64 after everything stored before it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        # sequentially consistent: a wake-up must not overtake it (see `_publish`)
        builder.store_atomic(arguments[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop (x86 `pause`; nothing elsewhere)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@native.kernel()
def wait_flag(address, expected, waiters, spins, slice_ns):  # type: ignore[no-untyped-def]
    """Wait until the word at `address` is `expected`, or says that this step failed; True when either is so.

    Spins `spins` times, then sleeps once for at most `slice_ns`, having counted itself at the address `waiters` (so that
    the writer knows that somebody must be woken), and looks once more.
    """
    failed = expected | np.uint64(FAILED)
    word = load_acquire(address)
    for _ in range(spins):
        if word in (expected, failed):
            return True
        _pause()
        word = load_acquire(address)
    if word in (expected, failed):
        return True
    store_release(waiters, np.uint64(1))
    word = load_acquire(address)
    if word not in (expected, failed):
        timespec = np.empty(2, np.int64)
        timespec[0] = slice_ns // 1_000_000_000
        timespec[1] = slice_ns % 1_000_000_000
        low = np.int64(word & np.uint64(0xFFFFFFFF))
        _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, low, np.uint64(timespec.ctypes.data), np.uint64(0), 0)
        timespec[0] = 0  # a use behind the call: numba may free it after its last
        word = load_acquire(address)
    store_release(waiters, np.uint64(0))
    return word in (expected, failed)


@native.kernel()
def wait_flags(address, count, expected, waiters, spins, slice_ns):  # type: ignore[no-untyped-def]
    """How many of the `count` flags from `address` on are `expected`, in order: all, or up to the first that is not.

    That one has been waited for as in `wait_flag`, or says that this step failed.
    """
    for i in range(count):
        flag_address = address + np.uint64(8 * i)
        if load_acquire(flag_address) != expected:
            wait_flag(flag_address, expected, waiters, spins, slice_ns)
            if load_acquire(flag_address) != expected:
                return i
    return count


@native.kernel()
def publish_flag(address, value, waiters):  # type: ignore[no-untyped-def]
    """Store a flag and wake whoever sleeps on it.

    Flag, then look at `waiters`; the waiter counts itself, then looks at the flag: one of the two sees the other.
    """
    store_release(address, value)
    if load_acquire(waiters) != 0:
        _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 64, np.uint64(0), np.uint64(0), 0)


@native.kernel()
def load_word(address):  # type: ignore[no-untyped-def]
    return load_acquire(address)


@native.kernel()
def store_word(address, value):  # type: ignore[no-untyped-def]
    store_release(address, value)
