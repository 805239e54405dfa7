"""A worker's counters in the Prometheus text format over HTTP. Needs prometheus_client (extra `metrics`).

A scrape runs in a thread of its own and takes the interpreter's lock from the thread that serves steps. What it does is
small (about 13 numbers a session), and while an exporter is open a thread that wants the lock back gets it within
SWITCH_S instead of Python's 5 ms.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from ple_offload.errors import UsageError
from ple_offload.metrics import HELP, Sample

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise UsageError(
        "--metrics needs prometheus_client, not installed here: pip install 'ple-offload[metrics]'"
    ) from error

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
REQUEST_S = 10.0  # for a request to come
LOOPBACK = "127.0.0.1"


def parse_listen_address(text: str) -> tuple[str, int]:
    """(host, port) of host:port, [ipv6]:port or :port, which listens on this host only; port 0 takes a free one."""
    host, colon, port = text.rpartition(":")
    if (
        not colon
        or not (port.isascii() and port.isdigit() and int(port) < 1 << 16)
        or (":" in host) != (host[:1] == "[")
    ):
        raise UsageError(f"--metrics: expected HOST:PORT or :PORT, as in 127.0.0.1:9400; found {text!r}.")
    return host.strip("[]") or LOOPBACK, int(port)


class Exporter:
    """Serves what `samples` yields, anew at each request, until `close`; `url` says where.

    Raises UsageError when the address cannot be used.
    """

    def __init__(self, samples: Callable[[], Iterable[Sample]], address: str) -> None:
        host, port = parse_listen_address(address)
        registry = CollectorRegistry()
        registry.register(_Collector(samples))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise UsageError(f"--metrics {address}: cannot listen there: {error}. Choose another address.") from error
        # A connection that asks for nothing would keep a descriptor and a thread of the worker.
        handler = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_S})  # type: ignore[arg-type]
        self._server.handle_error = _tell  # type: ignore[assignment]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/metrics"
        self._before_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._before_s, SWITCH_S))

    def close(self) -> None:
        sys.setswitchinterval(self._before_s)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tell(request: object, peer: object) -> None:
    """Of an error that a request ended with, as when it did not come in time."""
    log.info("metrics for %s: not answered", peer, exc_info=True)


class _Collector(Collector):
    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Samples of one name together, as the format wants them."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, labels, value in self._samples():
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(name, HELP[name], labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
