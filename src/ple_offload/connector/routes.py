"""How rows reach a GPU: opens what the routes need, decides between them, and says why.

inline tables      `direct`
worker, "direct"   its tables are borrowed; it is not asked in a step
worker, "staged"   it gathers
worker, "ipc"      it gathers, and copies into the device's memory
worker, "auto"     both, by the size of a step (auto.py); where `direct` cannot work, `staged`
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ple_offload.connector.auto import AutoRoute
from ple_offload.connector.base import PortSpec, Route, Transport
from ple_offload.connector.borrow import Borrowed
from ple_offload.connector.choose import EVERY_SIZE, RouteReport, why_not_ipc
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.direct import DirectRoute, TablesOnDevice
from ple_offload.connector.inline import InlineTransport
from ple_offload.connector.ipc import IpcRoute
from ple_offload.connector.measure import border, measure
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.shared_memory import SharedMemory
from ple_offload.connector.sources import Sources
from ple_offload.connector.staged import StagedRoute
from ple_offload.cuda import Cuda
from ple_offload.errors import ConnectionLostError, CudaError, PleOffloadError, UsageError
from ple_offload.metrics import ConnectorCounters
from ple_offload.table import Table

log = logging.getLogger(__name__)


class LentTables:
    """A worker's tables on a device. Its end is logged once, and changes nothing. Raises as the two it is made of do."""

    def __init__(
        self, address: str, config: ConnectorConfig, layers: Sequence[int], cuda: Cuda, *, sources_on_cpu: bool
    ) -> None:
        self._borrowed = Borrowed(address, config, layers)
        self._said = False
        try:
            self.on_device = TablesOnDevice(cuda, config, self._borrowed.tables, sources_on_cpu=sources_on_cpu)
        except BaseException:
            self._borrowed.close()
            raise

    def gone(self) -> bool:
        """Whether the worker's end was seen; cheap."""
        reason = self._borrowed.lost()
        if reason is not None and not self._said:
            self._said = True
            log.warning("%s What it lent stays: steps go on by route 'direct'.", reason)
        return reason is not None

    def close(self) -> None:
        self.on_device.close()
        self._borrowed.close()


class GpuRoutes:
    """For one connection of a connector after the other: `open`, then `close` once its route and transport are closed."""

    def __init__(
        self, config: ConnectorConfig, ports: Sequence[PortSpec], sources: Sources, device: torch.device
    ) -> None:
        self._config, self._ports, self._sources, self._device = config, list(ports), sources, device
        self._tables: TablesOnDevice | LentTables | None = None
        self._measured: RouteReport | None = None  # once, and kept for every connection
        self.report = RouteReport("none", "nothing was opened yet")

    def open(
        self, address: str, tables: Mapping[int, Table], step: int, counters: ConnectorCounters
    ) -> tuple[Transport, Route]:
        """Connect by the route that is wanted, or that `auto` finds; leaves nothing behind when it raises."""
        try:
            if address == "inline":
                return self._open_inline(tables)
            if self._config.route == "direct":
                return self._open_direct(address)
            if self._config.route == "staged":
                self._say(RouteReport("staged", "as asked for"))
                return self._open_staged(address, step, counters, 0)
            if self._config.route == "ipc":
                self._say(RouteReport("ipc", "as asked for"))
                return self._open_ipc(address, step, counters)
            return self._open_auto(address, step, counters)
        except BaseException:
            self.close()
            raise

    def _open_inline(self, tables: Mapping[int, Table]) -> tuple[Transport, Route]:
        wanted = self._config.route
        if wanted not in ("auto", "direct"):
            raise UsageError(f"route {wanted!r}: expected 'direct' with worker address 'inline'.")
        transport = InlineTransport(self._config, self._ports, tables)
        try:
            on_device = TablesOnDevice(
                Cuda(self._device),
                self._config,
                {port.layer: tables[port.layer] for port in self._ports},
                sources_on_cpu=self._sources.on_cpu(),
            )
        except PleOffloadError as error:
            if wanted == "direct":
                raise
            raise UsageError(
                f"{error} Tables that are open in this process reach a GPU no other way: use a worker process (worker "
                "'spawn'), which has the route 'staged'."
            ) from error
        self._tables = on_device
        self._say(RouteReport("direct", "the tables are open in this process"))
        return transport, DirectRoute(self._config, self._ports, on_device, self._sources, self._device)

    def _open_direct(self, address: str) -> tuple[Transport, Route]:
        lent = self._borrow(address)
        transport = InlineTransport(self._config, self._ports, lent.on_device.tables)
        self._say(RouteReport("direct", "as asked for"))
        return transport, DirectRoute(
            self._config, self._ports, lent.on_device, self._sources, self._device, look=lent.gone
        )

    def _borrow(self, address: str) -> LentTables:
        layers = [port.layer for port in self._ports]
        self._tables = lent = LentTables(
            address, self._config, layers, Cuda(self._device), sources_on_cpu=self._sources.on_cpu()
        )
        return lent

    def _open_staged(
        self, address: str, step: int, counters: ConnectorCounters, direct_tokens: int
    ) -> tuple[RemoteTransport, StagedRoute]:
        transport = RemoteTransport(self._config, self._ports, address, step, counters, direct_tokens)
        try:
            return transport, StagedRoute(self._config, self._ports, transport, self._sources, self._device)
        except BaseException:
            transport.close()
            raise

    def _open_ipc(self, address: str, step: int, counters: ConnectorCounters) -> tuple[RemoteTransport, IpcRoute]:
        cuda = Cuda(self._device)
        reason = why_not_ipc(cuda)
        if reason is not None:
            raise CudaError(f"route 'ipc': {reason}")
        memory = SharedMemory(cuda)  # of this connection; the transport closes it
        transport = RemoteTransport(self._config, self._ports, address, step, counters, memory=memory)
        try:
            return transport, IpcRoute(self._config, self._ports, transport, self._sources, self._device)
        except BaseException:
            transport.close()
            raise

    def _open_auto(self, address: str, step: int, counters: ConnectorCounters) -> tuple[Transport, Route]:
        lent, report = self._try_direct(address)
        transport, staged = self._open_staged(address, step, counters, report.direct_tokens)
        agreed = transport.direct_tokens
        if lent is not None and not agreed:
            self.close()
            report = replace(report, route="staged", why="another TP rank does not go direct", direct_tokens=0)
        if lent is None or not agreed:
            self._say(report)
            return transport, staged
        try:
            direct = DirectRoute(self._config, self._ports, lent.on_device, self._sources, self._device)
        except BaseException:
            staged.close()
            transport.close()
            raise
        everything = agreed >= self._config.max_num_tokens
        why = (
            "every step goes direct" if everything else f"steps of up to {agreed} tokens go direct, larger ones staged"
        )
        self._say(replace(report, why=why, direct_tokens=agreed))
        return transport, AutoRoute(direct, staged, agreed, lambda: _gone(lent, transport))

    def _try_direct(self, address: str) -> tuple[LentTables | None, RouteReport]:
        """The worker's tables on the device, and for how large steps that is faster; or None, and why not.

        Raises only what `staged` could not do without either.
        """
        if self._sources.on_cpu():
            return None, RouteReport(
                "staged",
                "with sources on the CPU the forward need not bring what 'direct' reads; ask for it if it does",
            )
        try:
            lent = self._borrow(address)
            report = self._measured = self._measured or self._measure(address, lent.on_device)
        except PleOffloadError as error:
            if type(error) is ConnectionLostError:
                raise
            self.close()
            return None, RouteReport("staged", str(error))
        if not report.direct_tokens:
            self.close()
            return None, report
        return lent, report

    def _measure(self, address: str, on_device: TablesOnDevice) -> RouteReport:
        if self._config.tp_rank:  # the border is one for the group
            return RouteReport("auto", "as TP rank 0 measured", EVERY_SIZE)
        timings, seconds = measure(self._config, self._ports, address, on_device, self._device)
        tokens = border(timings)
        return RouteReport("auto" if tokens else "staged", "faster for every step", tokens, timings, seconds)

    def _say(self, report: RouteReport) -> None:
        if report != self.report:
            refused = self._config.route == "auto" and report.route == "staged" and not report.timings
            log.log(logging.WARNING if refused else logging.INFO, "%s", report)
        self.report = report

    def close(self) -> None:
        """Give the tables back; safe to call twice."""
        if self._tables is not None:
            self._tables.close()
            self._tables = None


def _gone(lent: LentTables, transport: RemoteTransport) -> bool:
    """Whether no step can be given to the worker any more; says so, and is asked no more then.

    This rank has decided for all of its group: should the worker wake up, it hears that this connection has ended, and ends
    the others'. A rank that still went `staged` would wait for steps that nobody publishes.
    """
    if not lent.gone():
        if transport.alive():
            return False
        log.warning("%s gives no sign of life: steps of every size go by route 'direct'.", transport.worker)
    transport.give_up("it has gone, or gave no sign of life")
    return True
