"""Sockets: who may listen where, who may connect, what is left behind; a daemon killed, restarted and told to stop."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.minimal_client import Client, RefusedError
from ple_offload.errors import UsageError
from ple_offload.worker import listener as listener_module
from ple_offload.worker.listener import Listener
from ple_offload.worker.spawn import SpawnedWorker
from worker.peers import GoodSession, announcing_for_ever, expected_rows

NOBODY = 65534


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def raw_socket(path: Path, kind: int = socket.SOCK_SEQPACKET, *, listen: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    if listen:
        sock.listen(0)
    return sock


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can enter; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="ple-offload-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# ---- listening ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ple" / "socket"
    listener = Listener(f"unix:{path}")
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    listener.close()
    listener.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("others", "folder_mode", "socket_mode"), [(False, 0o2770, 0o660), (True, 0o2771, 0o666)], ids=["group", "others"]
)
def test_a_folder_is_made_for_a_group(tmp_path: Path, others: bool, folder_mode: int, socket_mode: int) -> None:
    path = tmp_path / "run" / "socket"
    group = os.getgroups()[-1] if os.getuid() else NOBODY
    listener = Listener(f"unix:{path}", group, others=others)
    assert (mode(path.parent), mode(path)) == (folder_mode, socket_mode)
    assert path.parent.stat().st_gid == path.stat().st_gid == group
    listener.close()


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    listener = Listener(f"unix:{tmp_path}/socket", os.getgid())
    assert mode(tmp_path) == 0o755
    listener.close()


@pytest.mark.parametrize("place", ["path", "abstract"])
def test_the_second_worker_at_an_address_is_refused(tmp_path: Path, place: str) -> None:
    address = f"unix:{tmp_path}/socket" if place == "path" else f"unix:@ple-offload-test-{os.getpid()}"
    first = Listener(address)
    with pytest.raises(UsageError, match=r"another process already serves this address\. Choose another"):
        Listener(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:  # the first is not harmed
        client.connect("\0" + address[6:] if place == "abstract" else address[5:])
    first.close()
    Listener(address).close()


def test_of_many_that_start_at_once_one_listens(tmp_path: Path) -> None:
    raw_socket(tmp_path / "socket", listen=False).close()  # a dead one, which each of them wants to replace

    def try_it(_: int) -> Listener | None:
        try:
            return Listener(f"unix:{tmp_path}/socket")
        except UsageError:
            return None

    with ThreadPoolExecutor(16) as pool:
        listening = [found for found in pool.map(try_it, range(64)) if found is not None]
    assert len(listening) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(tmp_path / "socket"))
    listening[0].close()


def test_a_dead_workers_socket_is_replaced(tmp_path: Path) -> None:
    raw_socket(tmp_path / "socket").close()
    assert (tmp_path / "socket").exists()
    Listener(f"unix:{tmp_path}/socket").close()


def test_a_living_socket_is_never_replaced(tmp_path: Path) -> None:
    """Also one whose queue is full, where connecting would wait for ever, and one of another program."""
    path = tmp_path / "socket"
    busy = raw_socket(path)
    clients = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(10):
            clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            clients[-1].setblocking(False)
            clients[-1].connect(str(path))
    with pytest.raises(UsageError, match="another process already serves"):
        Listener(f"unix:{path}")
    for sock in (*clients, busy):
        sock.close()
    path.unlink()
    other = raw_socket(path, socket.SOCK_STREAM)
    with pytest.raises(UsageError, match="another process already serves"):
        Listener(f"unix:{path}")
    other.close()


@pytest.mark.parametrize(
    "make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/tmp/x")], ids=["file", "folder", "link"]
)
def test_something_else_in_the_way_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "socket"
    make(path)
    with pytest.raises(UsageError, match=r"expected a socket or nothing there, found a (file|folder)\. Choose"):
        Listener(f"unix:{path}")
    assert os.path.lexists(path)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/nowhere")):
        with pytest.raises(UsageError, match=r"cannot listen: .*Choose a folder this user can write"):
            Listener(f"unix:{folder}/socket")
    with pytest.raises(UsageError, match="at most 107 bytes"):
        Listener(f"unix:{tmp_path}/{'x' * 100}")


def test_a_socket_that_is_anothers_by_now_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = Listener(f"unix:{path}")
    path.unlink()
    second = Listener(f"unix:{path}")
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_folder_that_somebody_locks_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "LOCK_LIMIT_S", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match=r"held its lock for 0\.1 s"):
        Listener(f"unix:{tmp_path}/socket")
    os.close(fd)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_what_another_user_may_not_do(public_folder: Path) -> None:
    """nobody finds a folder closed to it, and may not give a socket to root's group; it leaves nothing behind."""
    (public_folder / "closed").mkdir(0o700)
    (public_folder / "open").mkdir()
    (public_folder / "open").chmod(0o777)
    said = as_nobody(
        f"""
        for folder, group in (("closed/x", None), ("", None), ("open", 0), ("open/new", 0)):
            try:
                Listener(f"unix:{public_folder}/{{folder}}/socket", group)
            except Exception as error:
                print(type(error).__name__, error)
        """
    ).splitlines()
    assert [line.split()[0] for line in said] == ["UsageError"] * 4
    assert all("Permission denied. Choose a folder this user can write" in line for line in said[:2])
    assert all("may not give it to group 0. Name a group this user belongs to" in line for line in said[2:])
    assert not list((public_folder / "open").iterdir())


def as_nobody(program: str) -> str:
    """Run Python that becomes the user nobody once it has imported what it needs; returns what it prints."""
    import ple_offload

    become = f"""
        import os, socket, sys
        from ple_offload.worker.listener import Listener
        os.setgroups([])
        os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
        os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(become) + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(Path(ple_offload.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- a daemon -----------------------------------------------------------------------------------------------------------

MAIN = """
import json, sys
from ple_offload.worker.main import open_tables
from ple_offload.worker.server import PleOffloadWorker
options = json.loads(sys.argv[1])
worker = PleOffloadWorker(open_tables([options["path"]], tier="file", threads=1), allow_uids=options["allow_uids"])
worker.listen(options["address"], group=options["group"])
worker.run(lambda: print("ready", flush=True))
"""


@contextlib.contextmanager
def daemon(
    checkpoint: Path, address: str, *, allow_uids: Any = (), group: int | None = None
) -> Iterator[subprocess.Popen]:
    """A worker process of no parent's, killed at the end if it still runs."""
    options = {"path": str(checkpoint), "address": address, "allow_uids": allow_uids, "group": group}
    import ple_offload

    environment = {**os.environ, "PYTHONPATH": str(Path(ple_offload.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, json.dumps(options)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


ASK_AS_NOBODY = """
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
s.connect({path!r})
try:
    s.send(bytes.fromhex("83a474797065a341736ba776657273696f6e02aa636865636b706f696e74a0"))
except OSError:
    pass
print(s.recv(32768))
"""


def test_the_life_of_a_daemon(tiny_checkpoint: Path, public_folder: Path) -> None:
    """Another user is turned away with the remedy; SIGKILL leaves a socket that the next one replaces; SIGTERM nothing."""
    path = public_folder / "run" / "socket"
    address = f"unix:{path}"
    with daemon(tiny_checkpoint, address) as first:
        assert (mode(path.parent), mode(path)) == (0o700, 0o600)
        good = GoodSession(address)
        good.step()
        with pytest.raises(UsageError, match="another process already serves"):
            Listener(address)
        if os.getuid() == 0:
            path.parent.chmod(0o777)
            path.chmod(0o666)
            said = as_nobody(ASK_AS_NOBODY.format(path=str(path)))
            assert "uid 65534 (65534 is how a user of another user namespace reads) may not connect" in said
            assert "Start the worker with --allow-uid 65534" in said
            path.parent.chmod(0o700)
        good.step()
        first.send_signal(signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL
        with pytest.raises(RefusedError, match="end of file"):
            good.client.receive(5)
        good.client.sock.close()
        os.close(good.client.doorbell)
        assert path.exists()
    group = os.getgid() if os.getuid() else NOBODY
    with daemon(tiny_checkpoint, address, allow_uids=None, group=group) as second:
        assert (mode(path.parent), mode(path)) == (0o700, 0o660)  # the folder was there
        path.parent.chmod(0o755)
        if os.getuid() == 0:
            assert "Facts" in as_nobody(ASK_AS_NOBODY.format(path=str(path)))
        good = GoodSession(address)
        good.step()
        good.close()
        client = Client(address, layer=1, max_num_tokens=64)
        second.send_signal(signal.SIGSTOP)
        steps = {client.publish([1, 2]): [1, 2], client.publish([3]): [3]}
        second.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGCONT)
        assert second.wait(10) == 0
        for step, ids in steps.items():  # what was announced has been served
            slot = step % 2
            assert client.word(client.flags_at + slot * client.blocks * 8) == client.epoch << 48 | step
            at = client.outputs_at + slot * client.output_bytes
            rows = np.frombuffer(client.memory[at : at + len(ids) * 128], np.uint8).reshape(-1, 128)
            np.testing.assert_array_equal(rows, expected_rows(ids))
        with pytest.raises(RefusedError, match=r"Closing.*it got SIGTERM"):
            client.receive(5)
        client.sock.close()
        os.close(client.doorbell)
    assert list(path.parent.iterdir()) == []


def test_a_client_that_never_stops_announcing_does_not_keep_a_worker(tiny_checkpoint: Path) -> None:
    worker = SpawnedWorker(tiny_checkpoint, tier="file", threads=1)
    client = Client(worker.address, layer=1, max_num_tokens=20_000, slots=8)
    with announcing_for_ever(client, 20_000), contextlib.closing(worker):
        time.sleep(0.2)
        began = time.monotonic()
        worker.close()
        assert worker._process.returncode == 0
        assert time.monotonic() - began < 5
    client.sock.close()
    os.close(client.doorbell)
