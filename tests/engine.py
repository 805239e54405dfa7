"""A scripted engine: a real process with a connector and layers of its own, driven command by command.

    with Engine() as engine:
        engine.connect(worker.address, max_num_tokens=64, max_num_reqs=4)
        step = engine.prepare([1, 2, 3])
        rows = engine.take()                  # [3, embed_dim] bfloat16; NaN when they did not come, never raises for that
        engine.check(step)                    # raises here what it raises there
        engine.release()

Every command is a method of `Commands` and takes at most `limit_s`; `engine.begin("take")` sends one and returns at once,
`engine.result()` waits for it. `engine.run("result = ...")` executes any Python there. `engine.kill()` is SIGKILL.

Engines are forked from one process that has imported torch, which takes seconds; so a new engine takes milliseconds. All of
them end with the test process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ple_offload import errors

LIMIT_S = 20.0


# ---- in the test process ----------------------------------------------------------------------------------------------


class Engine:
    """One engine process, or a worker's. Closed, or killed if it does not end, by `close`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = _nursery().new(theirs)
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._status: int | None = None

    def __getattr__(self, command: str) -> Any:
        """`engine.prepare([1, 2])` runs `Commands.prepare` there."""
        if command.startswith("_") or not hasattr(Commands, command):
            raise AttributeError(command)
        return lambda *args, limit_s=LIMIT_S, **options: self.begin(command, *args, **options).result(limit_s)

    def begin(self, command: str, *args: Any, **options: Any) -> Engine:
        """Send a command and do not wait for it."""
        self._pipe.send((command, args, options))
        return self

    def result(self, limit_s: float = LIMIT_S) -> Any:
        """What the command that was sent returned; raises what it raised, EOFError when the process has died."""
        if not self._pipe.poll(limit_s):
            self.kill()
            raise TimeoutError(f"engine {self.pid}: no answer within {limit_s:g} s")
        try:
            kind, value, trace = self._pipe.recv()
        except ConnectionResetError:
            raise EOFError(f"engine {self.pid} has died") from None
        if kind == "":
            return value
        error = getattr(errors, kind, None)
        if error is None:
            raise RuntimeError(f"engine {self.pid}: {trace}")
        raise error(value)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def exit_status(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the process's end; negative: the signal that ended it."""
        if self._status is None:
            self._status = _nursery().wait(self.pid, limit_s)
        return self._status

    def close(self) -> None:
        self._pipe.close()
        try:
            self.exit_status(10)
        except TimeoutError:
            self.kill(signal.SIGCONT)
            self.kill()
            self.exit_status(10)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two bfloat16 arrays are equal bit by bit: NaNs of a random table are values like others."""
    return found.shape == expected.shape and found.tobytes() == np.ascontiguousarray(expected).tobytes()


def all_nan(found: np.ndarray) -> bool:
    return bool(np.isnan(found.astype(np.float32)).all())


class _Nursery:
    """The process that engines are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self._socket.settimeout(60)
        atexit.register(self.close)

    def new(self, theirs: socket.socket) -> int:
        socket.send_fds(self._socket, [b"new"], [theirs.fileno()])
        return int(self._socket.recv(100))

    def wait(self, pid: int, limit_s: float) -> int:
        deadline = time.monotonic() + limit_s
        while True:
            self._socket.send(b"%d" % pid)
            if status := self._socket.recv(100).decode().strip():
                return int(status)
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {pid}: still there after {limit_s:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


_the_nursery: list[_Nursery] = []


def _nursery() -> _Nursery:
    if not _the_nursery:
        _the_nursery.append(_Nursery())
    return _the_nursery[0]


# ---- in the engine process --------------------------------------------------------------------------------------------


class Commands:
    """What an engine can be told to do; the state is one connector and its model."""

    def connect(
        self,
        address: str,
        *,
        layers: Sequence[int] = (1,),
        embed_dim: int = 64,
        limits: dict[str, float] | None = None,
        tables: tuple[str, str] | None = None,
        **config: Any,
    ) -> None:
        """Make the connector. config: of `ConnectorConfig`; tables: (path, tier) for address "inline"."""
        import torch

        from ple_offload import open_table
        from ple_offload.connector import ConnectorConfig, PleOffloadConnector
        from ple_offload.connector.config import Limits
        from ple_offload.layer import PleOffloadLayer

        options = ConnectorConfig(limits=Limits(**(limits or {})), **config)
        self.layers = [PleOffloadLayer(layer, embed_dim) for layer in layers]
        self.model = torch.nn.ModuleList(self.layers)
        self.ids = torch.zeros(options.max_num_tokens, dtype=torch.int64)
        self.starts = torch.zeros(options.max_num_reqs + 1, dtype=torch.int32)
        self.context = torch.zeros((options.max_num_reqs, 2), dtype=torch.int64)
        self.tokens = 0
        opened = {layer: open_table(tables[0], layer, tables[1], threads=1) for layer in layers} if tables else None
        self.connector = PleOffloadConnector(
            options,
            self.model,
            "cpu",
            address,
            input_ids_source=self.ids,
            query_start_loc_source=self.starts,
            ngram_context_source=self.context,
            tables=opened,
        )

    def prepare(
        self, ids: Sequence[int], starts: Sequence[int] | None = None, context: Any = None, dummy: bool = False
    ) -> int:
        """Write the sources and prepare a step; by default one request without tokens before it (filler 7)."""
        import torch

        starts = [0, len(ids)] if starts is None else starts
        self.ids[: len(ids)] = torch.as_tensor(ids)
        self.starts[: len(starts)] = torch.as_tensor(starts)
        self.context[: len(starts) - 1] = 7 if context is None else torch.as_tensor(context)
        self.tokens = len(ids)
        return self.connector.prepare_forward(len(starts) - 1, len(ids), dummy)

    def take(self, layer: int = 0, num_rows: int | None = None) -> np.ndarray:
        """The layer's rows by the two ops, as a compiled forward takes them: never raises for rows that do not come."""
        import torch

        from ple_offload.layer import finish, start

        module = self.layers[layer]
        hidden = torch.zeros(self.tokens if num_rows is None else num_rows, 8)
        out = finish(start(self.ids, None, None, module.number), hidden, module.number, module.embed_dim, module.dtype)
        return out.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    def forward(self, layer: int = 0, num_rows: int | None = None) -> np.ndarray:
        """The layer's rows in eager mode, where it raises."""
        import torch

        hidden = torch.zeros(self.tokens if num_rows is None else num_rows, 8)
        return self.layers[layer](hidden, self.ids).view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    def check(self, step: int | None = None) -> None:
        self.connector.check(step)

    def signal_dummy_outputs(self, num_tokens: int) -> None:
        self.connector.signal_dummy_outputs(num_tokens)

    def release(self) -> None:
        self.connector.release_outputs()

    def reconnect(self, address: str | None = None) -> None:
        self.connector.reconnect(address)

    def disconnect(self) -> None:
        self.connector.close()

    def serve(self, path: str, address: str, **options: Any) -> None:
        """Be a worker instead, until SIGTERM; see `faulty.serve`. Send it with `begin`."""
        import faulty

        faulty.serve(path, address, **options)

    def run(self, source: str, **names: Any) -> Any:
        """Execute Python with `engine`, the connector as `connector` and `names`; returns what it leaves in `result`."""
        space: dict[str, Any] = {"engine": self, "connector": getattr(self, "connector", None), "result": None, **names}
        exec(source, space)
        return space["result"]


def _serve(pipe: Connection) -> None:
    """Do what is told until the other end has gone."""
    commands = Commands()
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, args, options = pipe.recv()
            try:
                answer = ("", getattr(commands, name)(*args, **options), "")
            except BaseException as error:
                answer = (type(error).__name__, str(error), traceback.format_exc())
            pipe.send(answer)


def _load_kernels() -> None:
    """Load the compiled code of the step path once, for all engines."""
    from ple_offload.formats import RowFormat
    from ple_offload.formats.gather import Gather
    from ple_offload.ipc import words

    word, other = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
    at, waiters = np.uint64(word.ctypes.data), np.uint64(other.ctypes.data)
    words.wait_flag(at, np.uint64(0), waiters, 1, 0)
    words.publish_flag(at, np.uint64(0), waiters)
    words.store_word(at, np.uint64(words.load_word(at)))
    gather = Gather(RowFormat("bf16", 16), np.zeros(1, np.uint64), np.zeros(2, np.int64), 1, "bf16")
    gather.run(np.empty(0, np.int64), np.empty((0, 16), ml_dtypes.bfloat16), 1)


def _main(control: socket.socket) -> None:
    """Fork an engine whenever asked; end, with all of them, when the test process has gone."""
    import torch

    import ple_offload.connector
    import ple_offload.layer
    import ple_offload.worker.server  # noqa: F401

    torch.set_num_threads(1)
    _load_kernels()
    children: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 100, 1)
            if not message:
                return
            if message == b"new":
                pid = os.fork()
                if pid == 0:
                    children.clear()
                    control.close()
                    _serve(Connection(descriptors[0]))
                    # what an interpreter does at its end, without the second that tearing torch down takes
                    atexit._run_exitfuncs()
                    os._exit(0)
                os.close(descriptors[0])
                children.add(pid)
                control.send(b"%d" % pid)
            else:
                pid, status = os.waitpid(int(message), os.WNOHANG)
                children.discard(pid)
                control.send(b"%d" % os.waitstatus_to_exitcode(status) if pid else b" ")
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
