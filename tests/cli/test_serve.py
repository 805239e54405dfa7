"""`serve`: real daemons on a tiny checkpoint; what they print, whom they let in, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import ple_offload
from checkpoint.tiny import ROW_DIM, write_default
from ple_offload.cli import main, serve
from ple_offload.config import default_socket
from ple_offload.connector.client import lookup_once
from ple_offload.connector.config import Limits
from ple_offload.errors import ConnectionLostError, ProtocolError, StepError, UsageError

COMMAND = [sys.executable, "-c", "import sys; from ple_offload.cli import main; sys.exit(main())"]
LIMIT_S = 30
FAST = Limits(connect_s=0)


class Daemon:
    """`ple-offload serve` as a process of its own, ready; killed at the end if it is still there."""

    def __init__(self, *arguments: object, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self.lines: list[str] = []
        self._rest = b""

    def until(self, start: str) -> str:
        """The first line that begins so; fails when the process ends first, or takes too long."""
        deadline = time.monotonic() + LIMIT_S
        fd = self.process.stdout.fileno()
        while select.select([fd], [], [], max(0, deadline - time.monotonic()))[0] and (read := os.read(fd, 1 << 16)):
            *lines, self._rest = (self._rest + read).split(b"\n")
            self.lines += [line.decode() for line in lines]
            for line in self.lines:
                if line.startswith(start):
                    return line
        raise AssertionError(f"no line {start!r} in {self.lines}; {self.end()}")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit status, the rest of its output, its errors."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def serving(*arguments: object, ready: str = "ready: ", **options: Any) -> Iterator[tuple[Daemon, str]]:
    """(daemon, its ready line)"""
    daemon = Daemon(*arguments, **options)
    try:
        yield daemon, daemon.until(ready)
    finally:
        daemon.process.kill()
        daemon.process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_default(tmp_path_factory.mktemp("tiny"))


def lookup(address: str, path: Path, tokens: list[int]) -> np.ndarray:
    table = ple_offload.inspect(path).table()
    context = np.full((1, table.family.context_len), table.family.filler)
    values, facts = lookup_once(address, table, np.array(tokens), context, FAST)
    assert facts.tier == "ram"
    return values


def scrape(url: str) -> dict[tuple[str, str], float]:
    """(name, layer or "") -> value, summed over sessions; through the client library's own parser."""
    found: dict[tuple[str, str], float] = {}
    with urllib.request.urlopen(url, timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            assert family.documentation
            for sample in family.samples:
                key = (sample.name, sample.labels.get("layer", ""))
                found[key] = found.get(key, 0) + sample.value
    return found


def test_a_daemons_life(tiny: Path, tmp_path: Path) -> None:
    """Says what it serves; serves; counts; on SIGTERM tells what it did, ends with 0 and leaves no socket."""
    socket = tmp_path / "new" / "socket"
    with serving(tiny, "--tier", "ram", "--socket", socket, "--metrics", ":0") as (daemon, ready):
        text = "\n".join(daemon.lines)
        assert ready == f"ready: unix:{socket}"
        for part in (str(tiny), "layer 1", "120 rows x 16 bf16", "tier ram", "still available"):
            assert part in text
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        url = next(line.split()[1] for line in daemon.lines if "http://" in line)
        assert url.startswith("http://127.0.0.1:")

        with ple_offload.open_table(tiny, tier="file") as table:
            expected = table.lookup(np.array([5, 6, 5]))
        assert lookup(ready.removeprefix("ready: "), tiny, [5, 6, 5]).tobytes() == expected.tobytes()
        with pytest.raises(StepError, match=r"input_ids\[1\] = 1000"):
            lookup(ready.removeprefix("ready: "), tiny, [5, 1000])

        end_s = time.monotonic() + LIMIT_S
        while (found := scrape(url))["ple_offload_sessions", ""] and time.monotonic() < end_s:
            time.sleep(0.01)  # until it has seen that both clients are gone
        assert found["ple_offload_steps_total", "1"] == 1
        assert found["ple_offload_rows_total", "1"] == 12
        assert found["ple_offload_bytes_total", "1"] == 12 * ROW_DIM * 2
        assert found["ple_offload_errors_total", "1"] == 1
        assert found["ple_offload_connections_total", ""] == 2
        assert found["ple_offload_lost_ranks_total", ""] == 0
        assert found["ple_offload_sessions", ""] == 0
        assert found["ple_offload_wait_seconds_total", ""] > 0
        assert found["ple_offload_gather_seconds_total", "1"] > 0

        status, out, err = daemon.end()
        assert status == 0, err
        head, *sessions = out.strip().splitlines()
        assert head.split()[:4] == ["session", "layer", "steps", "rows"]
        assert [line.split()[1:4] for line in sessions] == [["1", "1", "12"], ["1", "0", "0"]]
        assert not socket.exists()


def test_json_and_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--tier", "ram", "--socket", tmp_path / "s", "--json", ready="{") as (daemon, ready):
        facts = json.loads(ready)
        assert facts["address"] == f"unix:{tmp_path / 's'}"
        assert facts["checkpoints"][0]["path"] == str(tiny)
        assert facts["checkpoints"][0]["tables"][0]["tier"] == "ram"
        lookup(facts["address"], tiny, [1, 2])
        status, out, err = daemon.end(signal.SIGINT)
        assert (status, err) == (0, "")
        (session,) = json.loads(out)["sessions"]
        assert session["layers"]["1"]["rows"] == 8
        assert session["connections"] == 1
        assert session["wait_s"] > 0


def test_two_checkpoints_are_told_apart_by_their_tables(tiny: Path, tmp_path: Path) -> None:
    """A client names the table it expects, not a path, which may be another one where it runs."""
    other = write_default(tmp_path / "other", dtype="F16")
    (tmp_path / "moved").symlink_to(other)
    third = write_default(tmp_path / "third", data=bytes(120 * ROW_DIM * 2))
    with serving(tiny, other, "--tier", "ram", "--socket", tmp_path / "s") as (_, ready):
        address = ready.removeprefix("ready: ")
        for path in (tiny, tmp_path / "moved"):
            with ple_offload.open_table(path, tier="file") as table:
                assert lookup(address, path, [3, 4]).tobytes() == table.lookup(np.array([3, 4])).tobytes()
        with pytest.raises(ProtocolError, match="expected one of the checkpoints"):
            lookup(address, third, [3, 4])


def test_a_second_daemon_at_the_same_socket(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--tier", "ram", "--socket", tmp_path / "s") as (_, ready):
        status, _, err = Daemon(tiny, "--socket", tmp_path / "s").end(0)
        assert status == 2
        assert "already serves this address" in err
        assert err.count("\n") == 1
        lookup(ready.removeprefix("ready: "), tiny, [1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_who_may_connect(tiny: Path) -> None:
    """A user who was let in connects; another is told no by the worker; without --allow-uid the file says no."""
    import tempfile

    ask = """
import os, sys
from ple_offload.errors import PleOffloadError
from ple_offload.connector.config import Limits
from ple_offload.ipc.channel import Channel
from ple_offload.ipc.messages import Ask, PROTOCOL_VERSION
for uid in map(int, sys.argv[2:]):
    os.setresuid(uid, uid, 0)
    try:
        channel = Channel.connect(sys.argv[1], 0)
        channel.send(Ask(PROTOCOL_VERSION, ""))
        print(uid, type(channel.receive(5)[0]).__name__)
    except PleOffloadError as error:
        print(uid, type(error.__cause__).__name__)
    os.setresuid(0, 0, 0)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        for options, answers in (
            (["--allow-uid", "1234"], ["1234 Facts", "1235 Refused"]),
            ([], ["1234 PermissionError", "1235 PermissionError"]),
        ):
            socket = Path(folder) / f"new{len(options)}" / "socket"
            with serving(tiny, "--tier", "ram", "--socket", socket, *options) as (_, ready):
                command = [sys.executable, "-c", ask, ready.removeprefix("ready: "), "1234", "1235"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
                assert done.stdout.splitlines() == answers, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--metrics", "9400"], "--metrics"),
        (["--metrics", ":99999"], "--metrics"),
        (["--metrics", "::1:9400"], "--metrics"),
        (["--socket", "/tmp/" + "x" * 120], "at most 107 bytes"),
        (["--socket", "tcp://localhost:1"], "expected the path of a socket"),
        (["--socket", "unix:@name"], "expected the path of a socket"),
        (["--group", "no-such-group"], "no-such-group"),
        (["--allow-uid", "5"], "need --socket"),
        (["--threads", "0"], "threads"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_given_twice(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "link"
    again.symlink_to(tiny)
    assert main(["serve", str(tiny), str(again), "--socket", str(tmp_path / "s")]) == 2
    assert "link: expected each checkpoint once" in capsys.readouterr().err


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="under nohup SIGHUP ends nothing")
def test_a_socket_given_as_an_address_and_a_terminal_that_is_closed(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--tier", "file", "--socket", f"unix:{tmp_path}/s") as (daemon, ready):
        assert ready == f"ready: unix:{tmp_path}/s"
        status, _, _ = daemon.end(signal.SIGHUP)
        assert status == 0
    assert not (tmp_path / "s").exists()


def test_a_taken_metrics_port(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--tier", "file", "--socket", str(tmp_path / "s"), "--metrics", f":{port}"]
        assert main(["serve", str(tiny), *arguments]) == 2
    assert f"--metrics :{port}" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_users_who_could_not_get_to_the_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match="cannot enter"):
        serve.require_way_to(tmp_path / "new" / "s", None, [os.getuid() + 1])
    serve.require_way_to(tmp_path / "new" / "s", None, [])


def test_default_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "ple-offload" / "socket"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert default_socket().parent.name == f"ple-offload-{os.getuid()}"
    folder = tmp_path / "folder"
    serve.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    serve.make_private(folder)
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="nobody else can write"):
        serve.make_private(folder)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="folder of this user"):
        serve.make_private(tmp_path / "link")


def test_a_lookup_when_nobody_listens(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLostError, match="ple-offload serve"):
        lookup(f"unix:{tmp_path}/nobody", tiny, [1])
