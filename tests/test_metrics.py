"""Counters as Prometheus reads them, through prometheus_client's own parser."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ple_offload.errors import UsageError
from ple_offload.metrics import HELP, LayerCounters, Sample, SessionCounters, samples
from ple_offload.worker import exporter as exporter_module
from ple_offload.worker.exporter import Exporter, parse_listen_address

AWKWARD = 'a "quoted" \\ name\nof two lines, é'


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)  # samples of one name stand together
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_what_is_exported_is_what_was_counted() -> None:
    """Names, labels with any characters in them, large and fractional values; anew at each request."""
    session = SessionCounters(queue_s=0.1 + 0.2, faults=3)
    layers = {layer: LayerCounters(steps=layer, rows=2**53 - layer) for layer in (1, 2)}

    def every() -> Iterator[Sample]:
        yield "ple_offload_sessions", {}, 1.0
        yield from samples(session, session=AWKWARD)
        for layer, counters in layers.items():
            yield from samples(counters, session=AWKWARD, layer=str(layer))

    with Exporter(every, ":0") as exporter:
        for _ in range(2):
            found = scrape(exporter.url)
            assert found == {(name, frozenset(labels.items())): value for name, labels, value in every()}
            layers[1].steps += 41
            session.queue_s = 1e9 / 3


def test_a_connection_that_asks_for_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter_module, "REQUEST_S", 0.2)
    threads = threading.active_count()
    with Exporter(list, ":0") as exporter:
        place = urllib.parse.urlsplit(exporter.url)
        with socket.create_connection((place.hostname, place.port), timeout=10) as silent:
            scrape(exporter.url)
            assert silent.recv(1) == b""
    end_s = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert capsys.readouterr() == ("", "")


def test_every_counter_has_its_help() -> None:
    names = {name for counters in (LayerCounters(), SessionCounters()) for name, _, _ in samples(counters)}
    assert names | {"ple_offload_sessions", "ple_offload_ranks"} == set(HELP)
    assert len(names) == len(fields(LayerCounters)) + len(fields(SessionCounters))
    assert all(math.isfinite(value) for _, _, value in samples(LayerCounters()))


def test_closing_frees_the_port_and_the_interpreter() -> None:
    before_s = sys.getswitchinterval()
    first = Exporter(list, "127.0.0.1:0")
    address = first.url.removeprefix("http://").removesuffix("/metrics")
    assert sys.getswitchinterval() <= 0.001
    with pytest.raises(UsageError, match=address):
        Exporter(list, address)
    first.close()
    assert sys.getswitchinterval() == before_s
    Exporter(list, address).close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(":9400", ("127.0.0.1", 9400)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:80", ("::1", 80)), ("host:0", ("host", 0))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen_address(text) == expected


@pytest.mark.parametrize("text", ["", "9400", "host", "host:", "host:x", ":65536", "::1:80", ":-1", ":1.0", ":¹"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_listen_address(text)


def test_without_the_library() -> None:
    """--metrics says what to install."""
    import subprocess

    code = "import sys; sys.modules['prometheus_client'] = None; import ple_offload.worker.exporter"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "pip install 'ple-offload[metrics]'" in done.stderr
