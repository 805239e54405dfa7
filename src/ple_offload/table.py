"""An open table: the one place where family, format and store meet.

A lookup is three plain steps: the family turns ids into row numbers, the store says where those rows are, the format
gathers and decodes them. Large gathers are shared among threads; small ones are not worth waking anyone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ple_offload import config, native
from ple_offload.errors import MemoryLimitError, StoreError, TokenIdError, UsageError
from ple_offload.families.ragged import bad_query_start_loc
from ple_offload.formats.base import VALUE_DTYPES
from ple_offload.formats.gather import FAULTED, FAULTS_BEFORE, Gather, Readers
from ple_offload.ipc.messages import LayerFacts
from ple_offload.memory import sigbus
from ple_offload.memory.limits import require_memory
from ple_offload.memory.mapping import NotCopied
from ple_offload.progress import ByteProgress
from ple_offload.spec import TableSpec, fingerprint_of, inspect, sampled_rows
from ple_offload.stores import FileStore, Part, RamStore, Store

log = logging.getLogger(__name__)

TIERS = ("auto", "ram", "file")
# Loading and warming up takes this much beside the table itself.
OVERHEAD_BYTES = 64 << 20
# One thread gathers a 160-byte row in about this time (2 MiB and 4 KiB pages; docs/LOG.md); only used to decide how many
# rows repay the waking of threads, so its order of magnitude is enough.
ROW_US = {"ram": 0.05, "file": 0.1}
HASH_US = 0.04  # one thread computes the 16 row numbers of a token in about this time; used in the same way
CHECK_INTERVAL_S = 0.1
CLOSE_LIMIT_S = 60.0


def open_table(
    path: str | Path,
    layer: int | None = None,
    tier: str = "auto",
    *,
    threads: int | None = None,
    progress: bool | Callable[[int], None] = False,
    skip_memory_check: bool | None = None,
) -> Table:
    """Open one table of a checkpoint.

    path: a checkpoint folder, or a model id that the local hub cache holds.
    layer: the decoder layer (from 0) that consumes the rows; may be left out when the checkpoint has one table.
    tier: "ram" copies the table into sealed memory; "file" reads the checkpoint's own files through the page cache;
        "auto" takes "ram" when it fits this process's memory limits, else "file".
        Under "file" a changed file is found at most 0.1 s later and closes the table for good. Reading a page of a file
        that was cut ends the process with SIGBUS, as with any mapped file, unless the process has called
        `ple_offload.memory.sigbus.install()`, which turns it into a StoreError; worker processes do.
    threads: for loading and for large gathers; default PLE_OFFLOAD_THREADS, else the usable CPUs.
    progress: True draws a line on stderr while loading; a function is called with the bytes of each part that was loaded,
        from several threads.
    skip_memory_check: open even when the memory check says that the table does not fit.

    Raises UsageError, CheckpointError (what is refused and why), MemoryLimitError (before anything is allocated),
    StoreError.
    """
    if tier not in TIERS:
        raise UsageError(f"tier: expected one of {', '.join(TIERS)}, found {tier!r}.")
    if threads is None:
        threads = config.num_threads()
    elif not isinstance(threads, int) or not 1 <= threads <= config.MAX_THREADS:
        raise UsageError(f"threads: expected a whole number from 1 to {config.MAX_THREADS}, found {threads!r}.")
    if skip_memory_check is None:
        skip_memory_check = config.settings().skip_memory_check
    spec = inspect(path).table(layer)
    if tier != "file" and not skip_memory_check:
        try:
            require_memory(spec.size_bytes + OVERHEAD_BYTES, f"table {spec.name} in tier 'ram'")
        except MemoryLimitError as error:
            if tier == "ram":
                raise MemoryLimitError(
                    f"{error} Use tier 'file', which reads the checkpoint in place; make room; or skip this check "
                    "(skip_memory_check, --skip-memory-check) if the host's memory grows on demand."
                ) from None
            log.warning("tier 'file' for table %s: %s", spec.name, error)
            tier = "file"
    if tier == "file":
        return Table(spec, FileStore(spec.segments, spec.row_bytes, name=spec.name), threads=threads)
    with contextlib.ExitStack() as bar:
        if progress is True:
            progress = bar.enter_context(
                contextlib.closing(ByteProgress(f"loading table {spec.name}", spec.size_bytes))
            )
        store = RamStore(spec.segments, spec.row_bytes, name=spec.name, threads=threads, progress=progress or None)
    return Table(spec, store, threads=threads)


class Table(NotCopied):
    """Rows of one table by token id or by row number; made by `open_table`, used from any thread, closed once.

    NumPy arrays (or lists) in, NumPy arrays out, bfloat16 as `ml_dtypes.bfloat16`; torch CPU tensors in, torch tensors
    out. Integer inputs of any width are accepted. `dtype` is "bf16", "fp16" or "fp32", or a NumPy or torch dtype of
    those; by default the stored one, bf16 for FP8. Every `out` must be C-contiguous and of the exact shape and dtype.
    """

    def __init__(self, spec: TableSpec, store: Store, *, threads: int) -> None:
        self.spec = spec
        self.store = store
        self.threads = threads
        # plain attributes: they are read in every lookup
        self.num_rows = spec.num_rows
        self.row_dim = spec.row_dim
        self.rows_per_token = spec.rows_per_token
        self.embed_dim = spec.embed_dim
        self.context_len = spec.family.context_len
        self._value_dtype = spec.format.value_dtype
        self._no_context = np.full((1, self.context_len), spec.family.filler, np.int64)
        self._gathers: dict[str, Gather] = {}
        self._fingerprint: str | None = None  # once somebody has asked
        self._pid = native.pid
        self._failure: str | None = None
        self._users: dict[object, int] = {}  # the thread of each lookup that is running; close waits for them
        self._lock = threading.Lock()  # of the check of the store
        self._closing = threading.RLock()  # so that a signal handler which closes in the middle of `close` is not stuck
        self._next_check_s = 0.0
        # rows from which a parallel gather pays: sharing must save more time than the waking takes
        saved_us = ROW_US[store.tier] * (1 - 1 / threads)
        self.parallel_rows = math.ceil(native.wake_up_us(threads) / saved_us) if threads > 1 else sys.maxsize
        saved_us = HASH_US * (1 - 1 / threads)
        self.parallel_tokens = math.ceil(native.wake_up_us(threads) / saved_us) if threads > 1 else sys.maxsize
        self.prepare(spec.format.value_dtype)

    def __repr__(self) -> str:
        spec = self.spec
        what = f"{spec.num_rows:,} rows x {spec.row_dim} {spec.format.name}, tier {self.tier}"
        return f"<Table of layer {spec.layer}: {what}>"

    # ---- facts ----------------------------------------------------------------------------------------------------

    @property
    def tier(self) -> str:
        return self.store.tier

    def describe(self) -> dict[str, object]:
        """What is open, where it lives and how it is read; plain values, fit for JSON."""
        return {
            "layer": self.spec.layer,
            "family": self.spec.family.name,
            "format": self.spec.format.name,
            "num_rows": self.num_rows,
            "row_bytes": self.spec.row_bytes,
            **self.store.describe(),
            "threads": self.threads,
            "parallel_from_rows": self.parallel_rows,
            "kernel_cache": native.cache_problem() or "on disk",
        }

    def facts(self) -> LayerFacts:
        """What a client of this table must know."""
        family = self.spec.family
        return LayerFacts(
            self.spec.layer,
            family.name,
            family.vocab_size,
            family.context_len,
            family.filler,
            self.num_rows,
            self.rows_per_token,
            self.row_dim,
            self.spec.format.name,
            self.spec.format.scale,
            self.fingerprint(),
            self.tier,
        )

    def fingerprint(self) -> str:
        """`spec.fingerprint` of the rows that are open, whatever has become of the files since."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(
                self.spec, self.gather(sampled_rows(self.spec), dtype="stored").tobytes()
            )
        return self._fingerprint

    def parts(self) -> list[Part]:
        """What another process maps to read this table itself; StoreError when its rows can no longer be trusted."""
        with self._lock:
            self._next_check_s = 0.0  # look now
            self._check_store()
        user = object()
        try:
            self._enter(user)
            return self.store.parts()
        finally:
            self._users.pop(user, None)

    # ---- lookups --------------------------------------------------------------------------------------------------

    def row_numbers(
        self, input_ids: Any, query_start_loc: Any = None, ngram_context: Any = None, *, out: Any = None
    ) -> Any:
        """Row numbers [num_tokens, rows_per_token] int64 of a ragged step.

        input_ids: [>= num_tokens] token ids, request after request; ids from num_tokens on are not looked at.
        query_start_loc: [num_reqs + 1], request r owns tokens [query_start_loc[r], query_start_loc[r + 1]); num_tokens
            is its last value. None: one request.
        ngram_context: [num_reqs, context_len] the tokens before each request's first, oldest first. None: every request
            starts here.

        Raises TokenIdError naming the position and value of the first bad id, UsageError for shapes and dtypes.
        """
        ids, starts, context = self._step(input_ids, query_start_loc, ngram_context)
        shape = (int(starts[-1]), self.rows_per_token)
        result, array = _output(out, shape, np.dtype(np.int64), _is_torch(input_ids))
        if out is not None:
            ids, context = _apart(ids, array), _apart(context, array)
        self.row_numbers_into(ids, starts, context, array)
        return result

    def gather(self, rows: Any, *, dtype: Any = None, out: Any = None) -> Any:
        """Values [*rows.shape, row_dim] of row numbers of any shape; dtype "stored": their bytes [*, row_bytes] uint8.

        Raises TokenIdError naming the first row number outside the table.
        """
        numbers = _integers("rows", rows)
        name = "stored" if isinstance(dtype, str) and dtype == "stored" else self._dtype_name(dtype)
        width, value_dtype = self._row_of(name)
        result, array = _output(out, (*numbers.shape, width), value_dtype, _is_torch(rows))
        if out is not None:
            numbers = _apart(numbers, array)
        self.gather_into(numbers.reshape(-1), name, array)
        return result

    def lookup(
        self,
        input_ids: Any,
        query_start_loc: Any = None,
        ngram_context: Any = None,
        *,
        dtype: Any = None,
        out: Any = None,
    ) -> Any:
        """Values [num_tokens, embed_dim] of a ragged step: `row_numbers`, then `gather`, each token's rows in a row."""
        ids, starts, context = self._step(input_ids, query_start_loc, ngram_context)
        name = self._dtype_name(dtype)
        num_tokens = int(starts[-1])
        result, array = _output(out, (num_tokens, self.embed_dim), VALUE_DTYPES[name], _is_torch(input_ids))
        rows = np.empty((num_tokens, self.rows_per_token), np.int64)
        self.row_numbers_into(ids, starts, context, rows)
        self.gather_into(rows.reshape(-1), name, array)
        return result

    def prepare(self, dtype: Any) -> None:
        """Compile what lookups of this value dtype need, so that none has to wait for it."""
        none, starts = np.empty(0, np.int64), np.zeros(1, np.int64)
        name = "stored" if isinstance(dtype, str) and dtype == "stored" else self._dtype_name(dtype)
        gather = self._gather_to(name)
        nothing = np.empty((0, self._row_of(name)[0]), self._row_of(name)[1])
        gather.run(none, nothing, 1)
        rows = np.empty((0, self.rows_per_token), np.int64)
        context = np.empty((0, self.context_len), np.int64)
        if self.threads > 1:
            with native.parallel_turn(self.threads) as shares:
                gather.run(none, nothing, shares)
                self.spec.family.row_numbers(none, starts, context, rows, shares)
        self.spec.family.row_numbers(none, starts, context, rows)
        bad_query_start_loc(starts, 0)

    def check(self) -> None:
        """Raise StoreError when the rows can no longer be trusted, for readers that do without `gather` and `lookup`."""
        user = object()
        try:
            self._enter(user)
        finally:
            self._users.pop(user, None)

    def close(self) -> None:
        """Wait for the lookups that are running, then release the memory; safe to call twice.

        Raises StoreError, and keeps the memory, when a lookup has not ended after CLOSE_LIMIT_S (a disk that hangs), and
        UsageError when a lookup of this very thread is running, which a signal handler has interrupted.
        """
        if native.pid != self._pid:  # in a forked child nobody looks up, and a lock that another thread held stays so
            self.store.close()
            return
        if threading.get_ident() in list(self._users.values()):
            raise UsageError(
                f"table {self.spec.name}: closed in the middle of a lookup of the same thread, by a signal handler? Let "
                "the handler raise an exception instead, as SystemExit, and close behind it."
            )
        self._failure = self._failure or "it was closed"
        with self._closing:  # of two threads that close, the second finds nothing left
            end_s = time.monotonic() + CLOSE_LIMIT_S
            while self._users:
                if time.monotonic() > end_s:
                    raise StoreError(
                        f"table {self.spec.name} cannot be closed: {len(self._users)} lookups have not ended after "
                        f"{CLOSE_LIMIT_S:g} s. Does the disk of {self.spec.segments[0].path} answer?"
                    )
                time.sleep(0.001)
            self.store.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _step(
        self, input_ids: Any, query_start_loc: Any, ngram_context: Any
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Check a step's shapes and bring its inputs to C-contiguous int64."""
        ids = _integers("input_ids", input_ids, ndim=1)
        if query_start_loc is None:
            starts = _one_request(ids.size)
        else:
            # a copy: what was checked must not change before the last use, it decides where results are written
            starts = _integers("query_start_loc", query_start_loc, ndim=1).copy()
            if starts.size == 0:
                raise UsageError("query_start_loc: expected num_reqs + 1 values, found none.")
            self.check_query_start_loc(starts, ids.size)
        shape = (starts.size - 1, self.context_len)
        if ngram_context is None:
            context = self._no_context if shape[0] == 1 else self._no_context.repeat(shape[0], axis=0)
        else:
            context = _integers("ngram_context", ngram_context, ndim=2)
            if context.shape != shape:
                raise UsageError(
                    f"ngram_context: expected shape [num_reqs, context_len] = {list(shape)}, found {list(context.shape)}."
                )
        return ids, starts, context

    # ---- lookups of callers in this package that hold int64 C-contiguous arrays of the right shapes: no conversions

    def check_query_start_loc(self, starts: npt.NDArray[np.int64], num_ids: int) -> None:
        """Raise UsageError for offsets that do not start at 0, fall, or end beyond `num_ids`."""
        bad = bad_query_start_loc(starts, num_ids)
        if bad >= 0:
            raise UsageError(
                f"query_start_loc[{bad}] = {starts[bad]}: expected values that start at 0, never fall and end at most "
                f"at {num_ids}, the number of ids."
            )

    def row_numbers_into(
        self,
        ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        context: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
    ) -> None:
        """`row_numbers` into out [starts[-1], rows_per_token]; `starts` was checked."""
        family = self.spec.family
        if len(out) < self.parallel_tokens:
            bad = family.row_numbers(ids, starts, context, out)
        else:
            with native.parallel_turn(self.threads) as shares:
                bad = family.row_numbers(ids, starts, context, out, shares)
        if bad >= 0:
            num_tokens = int(starts[-1])
            if bad < num_tokens:
                place, value = f"input_ids[{bad}]", ids[bad]
            else:
                request, column = divmod(bad - num_tokens, self.context_len)
                place, value = f"ngram_context[{request}, {column}]", context[request, column]
            raise TokenIdError(
                f"{place} = {value}: expected a token id from 0 to {family.vocab_size - 1}. "
                "Placeholders (-1) and ids of another vocabulary cannot be looked up."
            )

    def gather_into(
        self, rows: npt.NDArray[np.int64], name: str, out: npt.NDArray[Any], readers: Readers | None = None
    ) -> None:
        """`gather` of flat row numbers as "bf16", "fp16", "fp32" or "stored" into `out`, of any shape of that many rows.

        With readers `out` has readers.total rows; what this raises, they must be told.
        """
        gather = self._gathers.get(name) or self._gather_to(name)
        values = out.reshape(rows.size if readers is None else readers.total, self._row_of(name)[0])
        user = object()
        try:
            faults = self._enter(user)
            if readers is not None:
                readers.shared[FAULTS_BEFORE] = faults
            if rows.size < self.parallel_rows:
                bad = gather.run(rows, values, 1, readers)
            else:
                with native.parallel_turn(self.threads) as shares:
                    bad = gather.run(rows, values, shares, readers)
        finally:  # from `user` on: an interrupt, as of Ctrl-C, may come between any two lines
            self._users.pop(user, None)
        if bad == FAULTED or (sigbus.count() != faults and self.tier == "file"):
            self._fail(
                "a page of its file was gone when it was read (the file was cut, or the disk failed). Restore the file and "
                "open the table again"
            )
        if bad >= 0:
            raise TokenIdError(
                f"row number {rows[bad]} (at index {bad} of {rows.size}): expected 0 to {self.num_rows - 1}."
            )

    def _gather_to(self, name: str) -> Gather:
        at = self.store.rows
        return self._gathers.setdefault(name, Gather(self.spec.format, at.bases, at.starts, at.step, name))

    def _enter(self, user: object) -> int:
        """Begin a read of the store; raises when the table can no longer be read. Returns the faults so far.

        `user` is among the users then, whom the caller takes out again.
        """
        if native.pid != self._pid:  # asked here, so that the name is not put together in every lookup
            native.check_not_forked(self._pid, f"table {self.spec.name}")
        self._users[user] = threading.get_ident()  # first: who closes sets the failure, then looks who is here
        if self._failure is None and time.monotonic() >= self._next_check_s:
            with self._lock:
                self._check_store()
        if self._failure is not None:
            raise StoreError(f"table {self.spec.name} cannot be read: {self._failure}")
        return sigbus.count()

    def _check_store(self) -> None:
        if self._failure is None and time.monotonic() >= self._next_check_s:  # no other thread has, meanwhile
            try:
                self.store.check()
            except StoreError as error:
                self._failure = str(error)
            finally:
                self._next_check_s = time.monotonic() + CHECK_INTERVAL_S

    def _fail(self, reason: str) -> NoReturn:
        """Close the table for good: what was read may be wrong, and what comes may be too."""
        self._failure = self._failure or reason
        raise StoreError(f"table {self.spec.name} cannot be read: {self._failure}")

    def _row_of(self, name: str) -> tuple[int, np.dtype[Any]]:
        """Elements and dtype of one row as delivered."""
        return (self.spec.row_bytes, _BYTES) if name == "stored" else (self.row_dim, VALUE_DTYPES[name])

    def _dtype_name(self, dtype: Any) -> str:
        if dtype is None:
            return self._value_dtype
        name = _DTYPE_NAMES.get(str(dtype))
        if name is None:
            raise UsageError(f"dtype: expected {', '.join(VALUE_DTYPES)} (or such a dtype), found {dtype!r}.")
        return name


_BYTES = np.dtype(np.uint8)
_INT64 = np.dtype(np.int64)
_DTYPE_NAMES = {
    **{name: name for name in VALUE_DTYPES},
    **{str(dtype): name for name, dtype in VALUE_DTYPES.items()},
    **{str(dtype.type): name for name, dtype in VALUE_DTYPES.items()},
    **{f"torch.{dtype}": name for name, dtype in VALUE_DTYPES.items()},
}


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who passes a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _integers(what: str, value: Any, ndim: int | None = None) -> npt.NDArray[np.int64]:
    """A list, NumPy array or torch CPU tensor of integers as the int64 array that the kernels are compiled for.

    That is C-contiguous, aligned and writable (`carray`): for any other kind numba would compile in the middle of a lookup.
    """
    given = value
    if type(value) is not np.ndarray and _is_torch(value):
        if not value.is_cpu:
            raise UsageError(f"{what}: expected a CPU tensor, found one on {value.device}. Copy it to the CPU first.")
        value = _dense(what, value)
    if (
        type(value) is np.ndarray
        and value.dtype is _INT64
        and value.ndim == (ndim or value.ndim)
        and value.flags.carray
    ):
        return value  # as nearly always: no more questions
    try:
        array = np.asarray(value)
    except ValueError:
        raise UsageError(f"{what}: expected integers, found lists of different lengths.") from None
    if array.size == 0 and not isinstance(given, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise UsageError(f"{what}: expected integers, found {array.dtype}.")
    if ndim is not None and array.ndim != ndim:
        raise UsageError(f"{what}: expected {ndim} dimension{'s'[: ndim > 1]}, found shape {list(array.shape)}.")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(2**63 - 1))  # what int64 cannot hold must not come out negative
    return np.require(array, np.int64, ["C", "A", "W"])


def _dense(what: str, tensor: Any) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"{what}: expected a dense tensor with memory of its own: {error}") from error
    return array


def _apart(array: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """`array`, copied if it shares memory with `out`: kernels write results while they still read inputs."""
    return array.copy() if np.may_share_memory(array, out) else array


def _output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], torch_result: bool) -> tuple[Any, npt.NDArray[Any]]:
    """(what to return, a NumPy array of `dtype` over the same memory); checks `out` or makes it."""
    if out is None and not torch_result:
        out = np.empty(shape, dtype)
    if isinstance(out, np.ndarray):
        if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
            raise UsageError(
                f"out: expected a writable, C-contiguous {dtype.name} array of shape {list(shape)}, "
                f"found {out.dtype.name} of shape {list(out.shape)} and strides {list(out.strides)}."
            )
        return out, out
    torch = sys.modules.get("torch")
    if torch is None or not (out is None or isinstance(out, torch.Tensor)):
        raise UsageError(f"out: expected a NumPy array or a torch CPU tensor, found {type(out).__name__}.")
    torch_dtype, integers = _torch_dtypes(dtype)
    if out is None:
        out = torch.empty(shape, dtype=torch_dtype)
    elif out.shape != shape or out.dtype != torch_dtype or not out.is_contiguous() or not out.is_cpu:
        raise UsageError(
            f"out: expected a contiguous CPU tensor of {torch_dtype} of shape {list(shape)}, "
            f"found {out.dtype} of shape {list(out.shape)} and strides {list(out.stride())} on {out.device}."
        )
    raw = out.detach() if out.requires_grad else out
    return out, (raw if integers is None else raw.view(integers)).numpy().view(dtype)


@lru_cache(maxsize=8)
def _torch_dtypes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """(torch's own, the integers to see it as on the way to NumPy or None: NumPy has no bfloat16 that torch knows)."""
    torch = sys.modules["torch"]
    return getattr(torch, dtype.name), torch.uint16 if dtype.itemsize == 2 else None


@lru_cache(maxsize=64)
def _one_request(num_tokens: int) -> npt.NDArray[np.int64]:
    """The query_start_loc of a single request; never handed out."""
    return np.array([0, num_tokens], np.int64)
