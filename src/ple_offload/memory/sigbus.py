"""A worker survives a file that is cut under its map: instead of dying of SIGBUS it reads zeros and knows it.

Touching a mapped page behind a file's new end raises SIGBUS, and Python cannot handle that: it would return to the same
instruction for ever. The handler here is compiled code. If the address lies in a guarded range it maps a page of zeros over
it, counts, and returns; the read goes on. Whoever reads guarded memory compares `count()` before and after, and throws the
rows away if it grew. An address outside of every guarded range gets the default action: the process dies, as it should.

It is installed in worker processes, and in another process only by whoever asks: a handler belongs to the whole process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from ple_offload.memory.mapping import PAGE_BYTES

MAX_RANGES = 4096
_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000

# count, number of ranges, then first and end address of each; read by the handler, so it stays where it is
_state = np.zeros(2 + 2 * MAX_RANGES, np.uint64)
_lock = threading.RLock()  # a signal handler may close a table in the middle of this
_installed: object = None


class _SigAction(ctypes.Structure):  # glibc's struct sigaction on Linux, 64-bit
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@intrinsic
def _word(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

    return types.uint64(types.uint64), generate


@intrinsic
def _set_word(typing_context, address, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def install() -> None:
    """Install the handler; more than once is once. Compiles for about a second."""
    global _installed
    with _lock:
        if _installed is not None:
            return
        mmap = types.ExternalFunction(
            "mmap", types.uint64(types.uint64, types.uint64, types.int32, types.int32, types.int32, types.int64)
        )
        set_action = types.ExternalFunction("signal", types.uint64(types.int32, types.uint64))
        state, page = int(_state.ctypes.data), PAGE_BYTES

        @cfunc(types.void(types.int32, types.uint64, types.uint64))
        def handle(number, info, context):  # type: ignore[no-untyped-def]
            address = _word(info + np.uint64(16))  # siginfo_t.si_addr
            ranges = _word(np.uint64(state + 8))
            for i in range(ranges):
                first = _word(np.uint64(state + 16) + np.uint64(i * 16))
                end = _word(np.uint64(state + 24) + np.uint64(i * 16))
                if first <= address < end:
                    start = address // np.uint64(page) * np.uint64(page)
                    # PROT_READ; MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS
                    if mmap(start, np.uint64(page), 1, 0x32, -1, 0) == start:
                        _set_word(np.uint64(state), _word(np.uint64(state)) + np.uint64(1))
                        return
            set_action(number, np.uint64(0))  # SIG_DFL: the same access now ends the process

        action = _SigAction(handler=handle.address, flags=_SA_SIGINFO | _SA_ONSTACK)
        libc = ctypes.CDLL(None, use_errno=True)
        if platform.system() != "Linux" or libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None):
            raise OSError(ctypes.get_errno(), "sigaction(SIGBUS)")
        _installed = handle


def guard(address: int, num_bytes: int) -> None:
    """Guard a mapped range; without `install` this changes nothing. The oldest ranges win when there are too many."""
    with _lock:
        ranges = int(_state[1])
        if ranges < MAX_RANGES:
            _state[2 + 2 * ranges], _state[3 + 2 * ranges] = address, address + num_bytes
            _state[1] = ranges + 1


def release(address: int) -> None:
    """Take back the `guard` of the range that starts at `address`, before it is unmapped."""
    with _lock:
        ranges = int(_state[1])
        for i in range(ranges):
            if int(_state[2 + 2 * i]) == address:
                last = _state[2 * ranges : 2 * ranges + 2].copy()
                _state[1] = ranges - 1
                _state[2 + 2 * i : 4 + 2 * i] = last
                return


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the old one may be that of a thread which is not here


os.register_at_fork(after_in_child=_after_fork)


def count() -> int:
    """Pages of guarded ranges that were gone when they were read, since the process began."""
    return int(_state[0])


def count_address() -> int:
    """Where compiled code finds `count()`, as a uint64."""
    return int(_state.ctypes.data)
