"""Tables lent by a worker: the same rows, read-only, in both tiers; they outlive it; what does not fit is refused."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.rig import Made, make
from ple_offload import open_table
from ple_offload.connector.borrow import Borrowed
from ple_offload.connector.config import ConnectorConfig, Limits
from ple_offload.errors import PleOffloadError, ProtocolError
from ple_offload.ipc.channel import Channel
from ple_offload.ipc.messages import PROTOCOL_VERSION, Borrow, Goodbye, Lent
from ple_offload.memory import memfd
from ple_offload.spec import fingerprint
from ple_offload.worker import lending
from ple_offload.worker.main import open_tables
from ple_offload.worker.server import PleOffloadWorker
from ple_offload.worker.spawn import SpawnedWorker


def config(**options: Any) -> ConnectorConfig:
    return ConnectorConfig(8, 1, limits=Limits(connect_s=5, answer_s=5), **options)


def every_row(table: Any) -> np.ndarray:
    return table.gather(np.arange(table.num_rows), dtype="stored")


@pytest.mark.parametrize("tier", ["ram", "file"])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_what_is_lent_is_the_table(tmp_path: Path, tier: str, dtype: str) -> None:
    checkpoint = make(tmp_path / "it", dtype, num_layers=2)
    identities = {table.layer: fingerprint(table) for table in checkpoint.spec.tables}
    with SpawnedWorker(checkpoint.path, tier=tier, threads=1) as worker:
        borrowed = Borrowed(worker.address, config(fingerprints=identities), [1, 3])
        for layer in (1, 3):
            with open_table(checkpoint.path, layer, "file", threads=1) as own:
                lent = borrowed.tables[layer]
                assert lent.tier == tier
                assert lent.spec.family == own.spec.family
                assert lent.facts() == own.facts() or tier == "ram"
                assert np.array_equal(every_row(lent), every_row(own))
                ids = np.arange(40)
                assert np.array_equal(lent.lookup(ids, dtype="bf16"), own.lookup(ids, dtype="bf16"))
        assert borrowed.lost() is None
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while borrowed.lost() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "closed the connection" in str(borrowed.lost())
        assert every_row(borrowed.tables[1]).any()  # the rows stay
        borrowed.close()
        borrowed.close()


def test_a_table_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Callable[..., Local]) -> None:
    monkeypatch.setattr(lending, "MAX_SEGMENTS", 1)
    checkpoint = make(tmp_path / "it")  # two shards in one file
    worker = local(checkpoint.path, tier="file")
    borrowed = Borrowed(worker.address, config(), [1])
    with open_table(checkpoint.path, tier="file", threads=1) as own:
        assert np.array_equal(every_row(borrowed.tables[1]), every_row(own))
    borrowed.close()


def test_descriptors_are_read_only_and_sealed(tmp_path: Path, local: Callable[..., Local]) -> None:
    checkpoint = make(tmp_path / "it")
    for tier in ("ram", "file"):
        channel = Channel.connect(local(checkpoint.path, tier=tier).address, 5)
        channel.send(Borrow(PROTOCOL_VERSION, "", 1, "", 0))
        message, (fd,) = channel.receive(5) or (None, (-1,))
        assert isinstance(message, Lent)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert memfd.is_sealed(fd) == (tier == "ram")
        os.close(fd)
        channel.send(Goodbye())
        channel.close()


def test_a_changed_file_is_not_lent(tmp_path: Path, local: Callable[..., Local]) -> None:
    checkpoint = make(tmp_path / "it")
    worker = local(checkpoint.path, tier="file")
    file = next(checkpoint.path.glob("*.safetensors"))
    os.utime(file, (1, 1))
    with pytest.raises(ProtocolError, match=r"changed while its table layers\.1 was open"):
        Borrowed(worker.address, config(), [1])


def test_another_table_than_the_expected_one_is_refused(tmp_path: Path, local: Callable[..., Local]) -> None:
    worker = local(make(tmp_path / "it").path, tier="ram")
    with pytest.raises(ProtocolError, match=r"refused: .*expected the table with fingerprint 0000"):
        Borrowed(worker.address, config(fingerprints={1: "0000"}), [1])
    with pytest.raises(ProtocolError, match=r"expected a layer of \[1\], found 2"):
        Borrowed(worker.address, config(), [2])


def test_a_borrower_needs_no_hello_and_harms_nobody(tmp_path: Path, local: Callable[..., Local]) -> None:
    """Wrong parts, wrong messages and early ends: each ends its own connection."""
    worker = local(make(tmp_path / "it").path, tier="file")
    keeps = Borrowed(worker.address, config(), [1])
    for message, reason in [
        (Borrow(1, "", 1, "", 0), "protocol version"),
        (Borrow(PROTOCOL_VERSION, "", 1, "", -1), "part: expected 0 to 0, found -1"),
        (Borrow(PROTOCOL_VERSION, "", 1, "", 1 << 40), "part: expected 0 to 0"),
        (Lent(1, keeps.tables[1].facts(), {}, []), "descriptors"),
    ]:
        for first in (False, True):
            channel = Channel.connect(worker.address, 5)
            if first:
                channel.send(Borrow(PROTOCOL_VERSION, "", 1, "", 0))
                answer, (fd,) = channel.receive(5) or (None, (-1,))
                assert isinstance(answer, Lent)
                os.close(fd)
            channel.send(message)
            refused, _ = channel.receive(5) or (None, ())
            assert reason in str(refused)
            channel.close()
    assert keeps.lost() is None
    keeps.close()


def test_the_worker_says_that_it_stops(tmp_path: Path, local: Callable[..., Local]) -> None:
    worker = local(make(tmp_path / "it").path, tier="ram")
    borrowed = Borrowed(worker.address, config(), [1])
    worker.end()
    assert "the test is done" in str(borrowed.lost())
    borrowed.close()


# ---- a worker that lies ------------------------------------------------------------------------------------------------


def lies(made: Made) -> dict[str, tuple[Callable[[dict[str, Any]], None], str]]:
    def fact(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda lent: lent["facts"].update({name: value})

    def rule(name: str, value: int) -> Callable[[dict[str, Any]], None]:
        return lambda lent: lent["rule"].update({name: value})

    return {
        "family": (fact("family", "x"), "expected family"),
        "format": (fact("format", "nvfp4"), "expected dtype"),
        "scale": (fact("scale", 2.0), "has no scale"),
        "row_dim": (fact("row_dim", 0), "row_dim"),
        "wide rows": (fact("row_dim", 1 << 15), "rows of table layers.1 end at byte"),
        "num_rows": (fact("num_rows", 128), "of its rule"),
        "tier": (fact("tier", "disk"), "in tier 'disk'"),
        "not sealed": (fact("tier", "ram"), "expected memory that is sealed"),
        "rule": (rule("seed", 5), "expected the table with fingerprint"),
        "vocab": (rule("vocab_size", 5), "eos_token_id"),
        "a huge rule": (rule("layer_index", 1 << 30), "layer_index"),
        "rule with more": (rule("more", 1), "expected the numbers"),
        "no segment": (lambda lent: lent.update(segments=[]), "expected rows in each"),
        "no part": (lambda lent: lent.update(parts=0), "of 0"),
        "many parts": (lambda lent: lent.update(parts=1 << 20), "of 1048576"),
        "a gap": (lambda lent: lent["segments"].pop(0), "expected row 0"),
        "before the file": (lambda lent: lent.update(segments=[(-1, 0, 120)]), "expected row 0"),
        "behind the file": (lambda lent: lent.update(segments=[(1 << 50, 0, 120)]), "end at byte"),
        "no rows": (lambda lent: lent.update(segments=[(0, 0, 0)]), "expected row 0"),
        "few rows": (lambda lent: lent.update(segments=[(0, 0, 100)]), "expected 120 rows, found 100"),
        "other rows": (lambda lent: lent.update(segments=[(0, 0, 120)]), "expected the table with fingerprint"),
    }


NAMES = list(lies(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*NAMES, "can write", "a pipe", "says nothing", "gone"])
def test_lies_are_found_and_leave_nothing_open(tmp_path: Path, name: str) -> None:
    checkpoint = make(tmp_path / "it")
    identity = fingerprint(checkpoint.spec.tables[0])
    path = tmp_path / "socket"
    gc.collect()  # what earlier tests left
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    reasons = {"can write": "found one that can write", "a pipe": "expected a file", "gone": "closed"}
    reasons["says nothing"] = "waited 0.2 s"
    with (
        open_table(checkpoint.path, tier="file", threads=1) as table,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ExitStack() as opened,
    ):
        listener.bind(str(path))
        listener.listen()
        lent, fd = lending.lend("peer", table, 0)

        def serve() -> None:
            channel = Channel(listener.accept()[0], "client")
            opened.callback(channel.close)
            assert channel.receive(5)
            import msgspec

            told: dict[str, Any] = msgspec.to_builtins(lent)
            given = fd
            if name in NAMES:
                lies(checkpoint)[name][0](told)
            if name == "can write":
                given = os.open(next(checkpoint.path.glob("*.safetensors")), os.O_RDWR)
                opened.callback(os.close, given)
            if name == "a pipe":
                given, other = os.pipe()
                opened.callback(os.close, given)
                opened.callback(os.close, other)
            if name == "gone":
                channel.close()
            elif name != "says nothing":
                channel.send(msgspec.convert(told, Lent), (given,))

        thread = threading.Thread(target=serve)
        thread.start()
        limits = Limits(connect_s=5, answer_s=0.2)
        wanted = ConnectorConfig(8, 1, fingerprints={1: identity}, limits=limits)
        with pytest.raises(PleOffloadError, match=reasons.get(name) or lies(checkpoint)[name][1]):
            Borrowed(f"unix:{path}", wanted, [1])
        thread.join(5)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


class Local:
    """A worker in a thread of this process."""

    def __init__(self, path: Path, address: str, tier: str) -> None:
        self.address = address
        self.worker = PleOffloadWorker(open_tables([path], tier=tier))
        self.worker.listen(address)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def end(self) -> None:
        self.worker.stop("the test is done")
        self.thread.join(10)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    made: list[Local] = []

    def start(path: Path, tier: str) -> Local:
        made.append(Local(path, f"unix:{tmp_path}/socket-{len(made)}", tier))
        return made[-1]

    yield start
    for one in made:
        one.end()
