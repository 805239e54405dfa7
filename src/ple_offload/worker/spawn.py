"""A worker as a child of this process: started, waited for, and gone when this process goes.

Started with `subprocess`, because an engine's own worker processes may be daemonic and forbid multiprocessing children. One
end of a socket pair stays here: its end of file is the parent's death, however it dies. Through the other direction the
child tells how far it is. Clients connect to an abstract address, which leaves nothing in the file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from ple_offload.errors import ConnectionLostError

MODULE = "ple_offload.worker"  # what the child runs: python -m MODULE OPTIONS

_alive: weakref.WeakSet[SpawnedWorker] = weakref.WeakSet()


class SpawnedWorker:
    """A worker process that serves the tables of `paths`; `address` is for connectors of this host.

    no_progress_s: how long it may say nothing while it loads before it counts as hung.
    Returns once it listens. Raises what the worker reports when it cannot start, ConnectionLostError when it dies or hangs;
    both name its log.
    """

    def __init__(
        self,
        *paths: str | Path,
        tier: str = "auto",
        threads: int | None = None,
        skip_memory_check: bool | None = None,
        no_progress_s: float = 60.0,
        progress: bool = False,
    ) -> None:
        self.address = f"unix:@ple-offload-{os.getpid()}-{secrets.token_hex(8)}"
        self._parent_pid = os.getpid()
        try:
            self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _alive.add(self)
            with theirs:
                try:
                    self._start(theirs, paths, tier, threads, skip_memory_check)
                except BaseException:
                    self._lifeline.close()
                    raise
        except OSError as error:
            raise ConnectionLostError(f"a worker process could not be started: {error}.") from error
        try:
            self._wait_until_it_listens(no_progress_s, progress)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        theirs: socket.socket,
        paths: tuple[str | Path, ...],
        tier: str,
        threads: int | None,
        skip_memory_check: bool | None,
    ) -> None:
        log_fd, log_path = tempfile.mkstemp(prefix=f"ple-offload-worker-{os.getpid()}-", suffix=".log")
        self.log_path = Path(log_path)
        options = {
            "paths": [str(Path(path).absolute()) if Path(path).exists() else str(path) for path in paths],
            "tier": tier,
            "threads": threads,
            "skip_memory_check": skip_memory_check,
            "address": self.address,
            "lifeline": theirs.fileno(),
            "log": log_path,
        }
        # the package may be importable here only through sys.path, which a child does not inherit
        source = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the engine, which then stops its worker
                env=environment,
            )
        except BaseException:
            self.log_path.unlink()
            raise
        finally:
            os.close(log_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_until_it_listens(self, no_progress_s: float, progress: bool) -> None:
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        while True:
            if not poll.poll(round(no_progress_s * 1000)):
                raise ConnectionLostError(
                    f"worker {self.pid}: no progress while loading for {no_progress_s:g} s. Its log: {self.log_path}"
                )
            packet = self._lifeline.recv(1 << 16)
            if not packet:
                code = self._process.wait(10)
                raise ConnectionLostError(
                    f"worker {self.pid}: died while starting (exit status {code}). "
                    f"Its log, {self.log_path}, ends: {self.log_tail()}"
                )
            news: dict[str, Any] = json.loads(packet)
            if "error" in news:
                self.log_path.unlink(missing_ok=True)
                kind = getattr(sys.modules["ple_offload.errors"], news["kind"], ConnectionLostError)
                raise kind(news["error"])
            if progress and "loaded_bytes" in news:
                sys.stderr.write(f"\rworker {self.pid}: loaded {news['loaded_bytes'] / 1e9:.1f} GB ")
                sys.stderr.flush()
            if news.get("listening"):
                if progress:
                    sys.stderr.write("\n")
                return

    def log_tail(self, num_bytes: int = 2000) -> str:
        """The end of its log, on one line."""
        with contextlib.suppress(OSError):
            return " | ".join(self.log_path.read_text(errors="replace")[-num_bytes:].splitlines())
        return ""

    def close(self, limit_s: float = 10.0) -> None:
        """Let it serve what is announced and end; killed if it takes longer than `limit_s`. Safe to call twice.

        Its log stays where it is if the worker did not end by itself with status 0. In a forked child this does nothing:
        the worker is the parent's.
        """
        self._lifeline.close()
        if os.getpid() != self._parent_pid:
            return
        try:
            code: int | None = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        if code == 0:
            self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> SpawnedWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # closing the lifeline is enough: the child sees the end of file and goes
        with contextlib.suppress(Exception):
            self._lifeline.close()


def _close_inherited() -> None:
    """A forked child must not hold the lifeline open after its parent's death."""
    for worker in list(_alive):
        worker._lifeline.close()


os.register_at_fork(after_in_child=_close_inherited)
