"""Everything that concerns compiled code: the numba decorator, its cache, its threads, and five instructions NumPy lacks.

Why one place: numba has traps that only show in production, and each is answered here once.

* A read-only home and a read-only package folder leave numba no folder for its cache and it then refuses to
  compile at all; a full disk or a damaged cache file fails the lookup that needed it. `kernel` compiles without a cache
  instead, and `cache_problem()` says why.
* The `workqueue` threading layer aborts the process when two threads run parallel kernels at once. `parallel_turn`
  gives the turn to one thread; the others run the serial kernel.
* The `omp` layer ends a forked child that runs a parallel kernel. `check_not_forked` refuses the parent's tables there,
  and `parallel_turn` leaves a table that the child opened to one thread.
* Waking the threads costs 5 to 150 us, depending on layer and machine. `wake_up_us` measures it.

Kernels address memory by number (uint64 addresses): rows live in mappings that no NumPy array describes well, and a row
may start at any byte. The caller checks every index before it becomes an address.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ple_offload.errors import ForkError

# More than any layer costs on an idle machine (150 us); what lies above is somebody else's load.
MAX_WAKE_UP_US = 200.0

_cache_problem: str | None = None
_turn = threading.Lock()


def kernel(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function without the GIL, and cache the machine code on disk where a cache folder is writable."""

    def decorate(function: Callable[..., Any]) -> Any:
        global _cache_problem
        options = {"nogil": True, "error_model": "numpy", "parallel": parallel}
        try:
            compiled = numba.njit(cache=True, **options)(function)
        except RuntimeError as error:  # numba: "no locator available for file"
            _cache_problem = str(error)
            compiled = numba.njit(**options)(function)
        else:
            compiled._cache = _Cache(compiled._cache)
        return compiled

    return decorate


class _Cache:
    """numba's cache of one function, except that what cannot be read or written costs a compilation and no error."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        try:
            return self._cache.load_overload(signature, target_context)
        except Exception as error:  # a damaged file fails in whatever way its bytes make unpickling fail
            self._note(error)
            with contextlib.suppress(Exception):
                self._cache.flush()  # else it would stay damaged for ever
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            self._cache.save_overload(signature, compiled)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        global _cache_problem
        _cache_problem = f"{self._cache.cache_path}: {type(error).__name__}: {error}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def cache_problem() -> str | None:
    """Why compiled kernels are not cached (numba's own words), or None when they are."""
    return _cache_problem


@contextlib.contextmanager
def parallel_turn(threads: int) -> Iterator[int]:
    """Yield how many threads the kernel may use: `threads` for the thread whose turn it is, 1 for any other.

    Always 1 in a forked child of a process that ran a parallel kernel: the child computes on one thread. The team is no
    larger than asked: numba's own has a thread for every core, and each would have to come to the end of the kernel, also
    the one whose core somebody else keeps busy.
    """
    global _threads_pid
    if threads <= 1 or _turn.locked():
        yield 1
        return
    # This may wait for the kernel of a thread that came since. Unlike with `acquire`, no interrupt can keep the lock.
    with _turn:
        if _threads_pid is None:
            _threads_pid = pid
        if _threads_pid != pid:
            yield 1
            return
        before = numba.get_num_threads()
        try:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            yield threads
        finally:
            numba.set_num_threads(before)


def wait_without_spinning() -> None:
    """Let threads that have nothing to do sleep instead of spin, unless the environment says otherwise.

    For worker processes, before anything parallel has run: OpenMP's threads spin by default, which takes the cores of the
    engine beside them, and a thread that does not get its core holds up all others (measured: 10 ms a step instead of 1).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "20000"
    )  # 0.3 ms on current servers: hashing and gathering follow each other


# This process; kept right by a hook, because every lookup compares it and asking the kernel takes as long as a lock.
pid = os.getpid()
# The process in which numba's threads were started. A forked child has none of them, and OpenMP ends a child that asks.
_threads_pid: int | None = None


def _after_fork() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def check_not_forked(owner_pid: int, what: str) -> None:
    """Raise ForkError when this process is not the one that made `what`."""
    if pid != owner_pid:
        raise ForkError(
            f"{what}: opened in process {owner_pid}, used in its forked child {pid}. Compiled parallel code "
            "does not survive a fork; open it again in the child, or start the child with spawn."
        )


_wake_up_us: dict[int, float] = {}  # by threads


def wake_up_us(threads: int) -> float:
    """Cost of one parallel region whose threads have slept, in microseconds; measured once (about 20 ms).

    The median of several, since a busy machine adds whole scheduler quanta now and then. The least would be far too good:
    20 us for 14 threads of a virtual machine that take 140 in the middle of its work.
    """
    if threads not in _wake_up_us:
        with _openmp_threads_kept(), parallel_turn(threads) as mine:
            if mine == 1:  # another thread computes just now: a cautious answer, not kept
                return MAX_WAKE_UP_US
            marks = np.zeros(threads, np.int64)
            _mark(marks)
            samples = []
            for _ in range(9):
                time.sleep(0.002)
                start = time.perf_counter()
                _mark(marks)
                samples.append((time.perf_counter() - start) * 1e6)
        _wake_up_us[threads] = min(statistics.median(samples), MAX_WAKE_UP_US)
    return _wake_up_us[threads]


@contextlib.contextmanager
def _openmp_threads_kept() -> Iterator[None]:
    """Undo what numba's start does to everyone else's OpenMP.

    When its threads start, numba sets the calling thread's number of OpenMP threads. If torch is loaded, its OpenMP library
    answers for numba too, so a user's torch.set_num_threads(1) would silently be undone by opening a table.
    """
    loaded = ctypes.CDLL(None)  # what is visible to every library of the process
    try:
        before = loaded.omp_get_max_threads()
    except AttributeError:  # no OpenMP that anyone shares
        yield
        return
    try:
        yield
    finally:
        loaded.omp_set_num_threads(before)


def wake(threads: int) -> None:
    """Wake the threads of a parallel kernel that will come in a moment."""
    with parallel_turn(threads) as shares:
        if shares > 1:
            _mark(np.zeros(shares, np.int64))


@kernel(parallel=True)
def _mark(marks):  # type: ignore[no-untyped-def]
    for i in numba.prange(marks.size):
        marks[i] += 1


# ---- instructions -------------------------------------------------------------------------------------------------
# Addresses are uint64. None checks anything: kernels call them with addresses of rows already checked.


@intrinsic
def take_ticket(typing_context, address):  # type: ignore[no-untyped-def]
    """The uint64 at an address, which is one more afterwards; no two threads get the same."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.uint64(types.uint64), generate


@intrinsic
def multiply_high(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The upper 64 bits of the product of two uint64."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide = [builder.zext(argument, ir.IntType(128)) for argument in arguments]
        return builder.trunc(builder.lshr(builder.mul(*wide), ir.IntType(128)(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def prefetch(typing_context, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an address; never faults, whatever the address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], byte_pointer)
        # read access, keep in L2 (locality 2 measured best, see docs/LOG.md), data cache
        builder.call(function, [pointer, i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@intrinsic
def copy_bytes(typing_context, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy between two addresses that do not overlap, any alignment: 32-byte vectors, then single bytes."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        to, start, length = arguments
        i64 = ir.IntType(64)

        def copy(kind: ir.Type, width: int, begin: ir.Value, count: ir.Value) -> None:
            pointer = kind.as_pointer()
            with cgutils.for_range(builder, count, intp=i64) as loop:
                offset = builder.add(begin, builder.mul(loop.index, i64(width)))
                value = builder.load(builder.inttoptr(builder.add(start, offset), pointer), align=1)
                builder.store(value, builder.inttoptr(builder.add(to, offset), pointer), align=1)

        vectors = builder.lshr(length, i64(5))
        copy(ir.VectorType(i64, 4), 32, i64(0), vectors)
        done = builder.shl(vectors, i64(5))
        copy(ir.IntType(8), 1, done, builder.sub(length, done))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@intrinsic
def load_item(typing_context, address, index, like):  # type: ignore[no-untyped-def]
    """Load item `index` (uint64) of an array of unsigned integers at any address; `like` only carries their type."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(like.bitwidth).as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=1)

    return like(types.uint64, types.uint64, like), generate
