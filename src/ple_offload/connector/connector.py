"""The connector: one per GPU worker, between a model's PLE layers and the process that finds their rows.

The life of a step, on every rank:

    step = prepare_forward(num_reqs, num_tokens)     copy the sources into a slot and publish it (TP rank 0)
    model forward: each layer takes its rows         `deliver`, called by the layer's op, waits within the limits
    check(step)                                      raises if any of its rows did not come; before its tokens leave
    release_outputs()                                the slot may be written again

Steps are counted from 1; every rank counts every `prepare_forward`, dummy and failed ones too, so that the ranks of an
engine agree on the number of a step without talking about it. A dummy step asks nobody: its rows are zeros.

A step whose rows do not come delivers NaN, never zeros: zeros read as fluent text and stay in the KV cache. The error is
raised by `check`, by the layer in eager mode, and by the next call of the connector, whichever is first.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from msgspec import structs

from ple_offload import native
from ple_offload.connector import registry
from ple_offload.connector.base import Inputs, PortSpec, Route, Transport, check_width
from ple_offload.connector.choose import RouteReport, require_triton
from ple_offload.connector.config import ConnectorConfig
from ple_offload.connector.inline import InlineTransport
from ple_offload.connector.outputs import OutputPool
from ple_offload.connector.remote import RemoteTransport
from ple_offload.connector.sources import Sources
from ple_offload.errors import ConnectionLostError, PleOffloadError, StepError, UsageError
from ple_offload.formats import VALUE_DTYPES
from ple_offload.ipc.messages import LayerFacts
from ple_offload.metrics import ConnectorCounters
from ple_offload.profiling import span
from ple_offload.table import Table

if TYPE_CHECKING:
    from ple_offload.connector.routes import GpuRoutes

log = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_CARRIERS = {"bf16": np.int16, "fp16": np.float16, "fp32": np.float32}  # torch knows no NumPy bfloat16


@runtime_checkable
class OffloadLayer(Protocol):
    """What the connector asks of a module to serve it; `ple_offload.layer.PleOffloadLayer` is one."""

    layer: int  # decoder layer, from 0
    number: int  # of this module in this process

    def get_offload_output_dtype(self) -> torch.dtype: ...

    def get_offload_output_dim(self) -> int: ...


@dataclass
class Step:
    """One step in flight."""

    number: int
    num_tokens: int
    dummy: bool
    error: PleOffloadError | None = None
    taken: set[int] = field(default_factory=set)  # layers that have had their rows


class PleOffloadConnector:
    """See the module.

    model: any module that contains `PleOffloadLayer`s. device: where their outputs are wanted, the CPU or an NVIDIA GPU.
    address: "unix:/path" or "unix:@name" of a worker, or "inline" with `tables` open in this process, by decoder layer.
    The sources are read by every `prepare_forward` and must stay the same tensors. Shapes and dtypes: see `Sources`.

    Raises UsageError for a model, source or option that cannot be meant, ConnectionLostError and ProtocolError when the
    worker cannot be reached or refuses. Whatever it raises, it leaves nothing behind.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        model: torch.nn.Module,
        device: torch.device | str,
        address: str,
        *,
        input_ids_source: torch.Tensor | None = None,
        query_start_loc_source: torch.Tensor | None = None,
        ngram_context_source: torch.Tensor | None = None,
        row_numbers_source: Mapping[int, torch.Tensor] | None = None,
        tables: Mapping[int, Table] | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"device: expected 'cpu' or 'cuda', found {str(self.device)!r}.")
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UsageError(f"device: expected 'cpu', found {str(self.device)!r}: torch sees no GPU here.")
            self.device = torch.device(
                "cuda", torch.cuda.current_device() if self.device.index is None else self.device.index
            )
        self._layers = [module for module in model.modules() if isinstance(module, OffloadLayer)]
        if not self._layers:
            raise UsageError(f"model: expected at least one PleOffloadLayer, found none in {type(model).__name__}.")
        ports = [_port(layer) for layer in self._layers]
        if len({port.layer for port in ports}) != len(ports):
            raise UsageError(
                f"model: expected one PleOffloadLayer for a decoder layer, found {[p.layer for p in ports]}."
            )
        self._ports, self._address, self._tables = ports, address, tables
        self.metrics = ConnectorCounters()
        self._outputs = OutputPool()
        self._step = 0
        self._flight: deque[Step] = deque()
        self._dummies: deque[Step] = deque()  # of `signal_dummy_outputs`, not yet taken by every layer
        self._released = 0
        self._unreported: PleOffloadError | None = None
        self._failures: dict[int, PleOffloadError] = {}
        self._closed = False
        self._pid = native.pid
        self._sources = Sources(input_ids_source, query_start_loc_source, ngram_context_source, row_numbers_source)
        self._route: Route | None = None
        self._gpu: GpuRoutes | None = None
        if self.device.type == "cuda":
            require_triton()
            from ple_offload.connector.routes import GpuRoutes

            self._gpu = GpuRoutes(config, ports, self._sources, self.device)
        elif config.route not in ("auto", "host"):
            raise UsageError(f"route {config.route!r}: expected device 'cuda', found 'cpu'.")
        self._transport = self._connect()
        try:
            self._first_facts = self._transport.facts
            facts = {port.layer: fact for port, fact in zip(ports, self._first_facts, strict=True)}
            for port in ports:
                check_width(port, facts[port.layer].rows_per_token * facts[port.layer].row_dim)
            context_len = next(iter(facts.values())).context_len
            self._sources.check(
                config, context_len, {layer: fact.rows_per_token for layer, fact in facts.items()}, self.device
            )
            self._on_cpu = on_cpu = self._sources.on_cpu()
            if on_cpu:
                self._arrays = self._sources.arrays([port.layer for port in ports])
            elif config.staging == "mirror":
                raise UsageError("staging 'mirror': expected CPU sources, found sources on a device.")
            self.staging = staging = ("mirror" if on_cpu else "async") if config.staging == "auto" else config.staging
            self._depth = 1 if staging == "mirror" else config.max_concurrent_batches
            for index, layer in enumerate(self._layers):
                registry.add(layer.number, self, index)
            _open.add(self)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> Transport:
        """Reach the tables; on a GPU, sets the route as well, which must be known when ranks agree on their steps."""
        if self._gpu is not None:
            transport, self._route = self._gpu.open(self._address, self._tables or {}, self._step, self.metrics)
        elif self._address == "inline":
            transport = InlineTransport(self.config, self._ports, self._tables or {})
        else:
            transport = RemoteTransport(self.config, self._ports, self._address, self._step, self.metrics)
        if isinstance(transport, RemoteTransport):
            self._step = transport.counted
        return transport

    @property
    def route_report(self) -> RouteReport:
        """Which route rows take to the device, why, and what was measured."""
        return RouteReport("host", "the device is the CPU") if self._gpu is None else self._gpu.report

    @property
    def facts(self) -> list[LayerFacts]:
        """What the worker says of each layer's table."""
        return self._transport.facts

    @property
    def device_bytes(self) -> int:
        """GPU memory that is held between steps; a step's outputs come on top, and belong to the forward."""
        return 0 if self._route is None else self._route.device_bytes

    # ---- steps ----------------------------------------------------------------------------------------------------

    def prepare_forward(self, num_reqs: int, num_tokens: int, dummy_run: bool = False) -> int:
        """Stage and publish one step from the sources; returns its number.

        num_tokens counts the rows of the model's input that belong to it; tokens from query_start_loc[num_reqs] on are
        padding and get zeros. A dummy run reads no source and is satisfied with zeros, on every rank.

        Raises UsageError when too many steps are in flight or a number does not fit the buffers (the step is counted, as
        the other ranks count it), and what an earlier step failed with, if nobody has been told yet.
        """
        self._step += 1
        self.metrics.steps += 1
        self.raise_unreported()
        # a failed `prepare_forward` leaves a gap in the numbers; slots follow the numbers, so the window does too
        window = self._step - self._flight[0].number if self._flight else 0
        if len(self._flight) >= self._depth or window >= self.config.max_concurrent_batches:
            raise UsageError(
                f"step {self._step}: expected at most {self._depth} steps in flight "
                f"({'one with sources on the CPU' if self.staging == 'mirror' else 'max_concurrent_batches'}), found one "
                "more. Call release_outputs first."
            )
        for name, value, most in (
            ("num_reqs", num_reqs, self.config.max_num_reqs),
            ("num_tokens", num_tokens, self.config.max_num_tokens),
        ):
            if not 0 <= value <= most:
                raise UsageError(f"step {self._step}: {name}: expected 0 to {most}, found {value}.")
        step = Step(self._step, num_tokens, dummy_run)
        self._dummies.clear()  # no forward came for them, and this step's must not get their zeros
        if not dummy_run:
            self._release_up_to(self._flight[0].number - 1 if self._flight else step.number - 1)
            self._publish(step, num_reqs)
        if self._route is not None:
            self._route.begin(step.number, num_reqs, step.num_tokens, dummy_run)
        self._flight.append(step)
        return step.number

    def _publish(self, step: Step, num_reqs: int) -> None:
        if self._route is not None and not self._route.asks_worker(step.number, step.num_tokens):
            return
        if self._route is not None and not self._on_cpu:
            if self.config.tp_rank == 0:
                with span("copy"):  # and publish: one kernel does both
                    self._route.stage(step.number, num_reqs, step.num_tokens, self._sources)
            return
        if self._route is not None and self.config.tp_rank == 0:
            self._route.make_room(step.number)
        if self.config.tp_rank == 0:
            with span("copy"):
                step.num_tokens = min(step.num_tokens, self._stage(self._transport.inputs(step.number), num_reqs, step))
        else:
            step.num_tokens = min(step.num_tokens, self._true_tokens(num_reqs, step.num_tokens))
        with span("publish"):
            self._transport.publish(step.number, num_reqs, step.num_tokens)

    def _stage(self, slot: Inputs, num_reqs: int, step: Step) -> int:
        """Copy the sources into a slot; returns how many tokens are real."""
        tokens, sources = step.num_tokens, self._arrays
        if self.config.request == "rows":
            for target, source in zip(slot.row_numbers, sources.row_numbers, strict=True):
                target[:tokens] = source[:tokens]
            return tokens
        slot.input_ids[:tokens] = sources.input_ids[:tokens]
        slot.query_start_loc[: num_reqs + 1] = sources.query_start_loc[: num_reqs + 1]
        slot.ngram_context[:num_reqs] = sources.ngram_context[:num_reqs]
        # a value beyond the buffer, or a negative one, is for the lookup to refuse; here it only must not be a size
        return max(0, int(slot.query_start_loc[num_reqs]))

    def _true_tokens(self, num_reqs: int, num_tokens: int) -> int:
        if self.config.request == "rows":
            return num_tokens
        return max(0, int(self._arrays.query_start_loc[num_reqs]))

    def signal_dummy_outputs(self, num_tokens: int) -> None:
        """Satisfy the next forward with zeros, for warm-up and graph capture; counts no step.

        A `prepare_forward` before that forward takes it back: a real step never gets a dummy's zeros. On a GPU, where the
        host does not see a forward, UsageError while a real step is in flight.
        """
        self.raise_unreported()
        real = next((step for step in self._flight if not step.dummy), None)
        if self._route is not None and real is not None:
            raise UsageError(
                f"signal_dummy_outputs: expected no step on a GPU, found that step {real.number} is in flight: its forward "
                "would get the zeros. Call release_outputs first."
            )
        if not 0 <= num_tokens <= self.config.max_num_tokens:
            raise UsageError(f"num_tokens: expected 0 to {self.config.max_num_tokens}, found {num_tokens}.")
        self._dummies.append(Step(0, num_tokens, dummy=True))
        if self._route is not None:
            self._route.begin(self._step, 0, num_tokens, dummy=True)

    def deliver(self, index: int, num_rows: int) -> torch.Tensor:
        """The rows of the `index`-th layer for its next step: a fresh tensor [num_rows, embed_dim].

        Called by the layer's op. Never raises for rows that do not come: the tensor is NaN then and the error is kept for
        `check`. Rows behind the step's tokens are zero.
        """
        if self._route is not None:
            with span("wait"):
                return self._route.finish(index, num_rows)
        port = self._ports[index]
        # NumPy allocates, since torch takes an array over in a third of the time of the other way round
        values = self._outputs.take((num_rows, port.embed_dim), VALUE_DTYPES[port.dtype])
        out = torch.from_numpy(values.view(_CARRIERS[port.dtype])).view(_TORCH_DTYPES[port.dtype])
        step = next((step for step in self._flight if index not in step.taken), None)
        if self._dummies and (step is None or not step.taken):
            self._take_dummy(index)
            return out.zero_()
        if step is None:
            error = StepError(
                f"layer {port.layer}: the forward wants rows, but no step was prepared. Call prepare_forward first."
            )
            self._unreported = self._unreported or error
            return out.fill_(float("nan"))
        step.taken.add(index)
        tokens = step.num_tokens
        if step.dummy:
            return out.zero_()
        if step.error is None and tokens > num_rows:
            self._fail(
                step,
                StepError(
                    f"step {step.number} layer {port.layer}: {tokens} tokens were prepared, the forward has {num_rows}."
                ),
            )
        if step.error is None:
            try:
                with span("wait"):
                    self._transport.deliver(index, step.number, tokens, values[:tokens])
            except PleOffloadError as error:
                self._fail(step, error)
        if step.error is not None:
            return out.fill_(float("nan"))
        if tokens < num_rows:
            values[tokens:] = 0
        return out

    def _take_dummy(self, index: int) -> None:
        """One `signal_dummy_outputs` satisfies every layer once, in any order."""
        dummy = next((dummy for dummy in self._dummies if index not in dummy.taken), self._dummies[-1])
        dummy.taken.add(index)
        if len(self._dummies[0].taken) == len(self._layers):
            self._dummies.popleft()

    def check(self, step: int | None = None) -> None:
        """Raise what made `step` (default: any step in flight) deliver NaN; must precede the use of its tokens.

        Raises StepError or ConnectionLostError; a second call for the same step raises again. Without a step it also raises
        what nobody has been told yet.
        """
        if self._route is not None:
            self._hear_device(step)
        wanted = {flying.number for flying in self._flight} if step is None else {step}
        failed = sorted(wanted & self._failures.keys())
        if failed:
            error = self._failures[failed[0]]
            if self._unreported is error:
                self._unreported = None
            raise _again(error)
        if step is None:
            self.raise_unreported()

    def release_outputs(self) -> None:
        """The oldest step's rows have been consumed: its slot may be written again. Without a step in flight: nothing."""
        if self._flight:
            step = self._flight.popleft()
            self._failures = {n: e for n, e in self._failures.items() if n > step.number - 1000}
            self._release_up_to(self._flight[0].number - 1 if self._flight else step.number)
        self.raise_unreported()

    def _release_up_to(self, number: int) -> None:
        """Tell the transport that every step up to `number` is consumed, or was never published."""
        if number > self._released:
            if self._route is not None:
                self._route.release(number)
            else:
                self._transport.release(number)
            self._released = number  # last: interrupted before, as by Ctrl-C, it is told again

    def start(
        self, index: int, ids: torch.Tensor, query_start_loc: torch.Tensor | None, ngram_context: torch.Tensor | None
    ) -> None:
        """Begin a layer's rows inside the forward, where the route does; called by the layer's op."""
        if self._route is not None:
            with span("gather"):
                self._route.start(index, ids, query_start_loc, ngram_context)

    def _hear_device(self, wanted: int | None) -> None:
        """Take up what steps that are done on the device failed with."""
        for step in self._flight:
            if wanted in (None, step.number) and step.error is None and self._route is not None:
                error = self._route.error(step.number)
                if error is not None:
                    self._fail(step, error)

    def _fail(self, step: Step, error: PleOffloadError) -> None:
        step.error = error
        self.metrics.failures += 1
        _drop_frames(error)
        self._failures[step.number] = error
        self._unreported = error
        log.error("step %d: %s", step.number, error)

    def raise_unreported(self) -> None:
        """Tell the caller what has gone wrong, once."""
        if self._closed:
            raise UsageError("the connector is closed.")
        error, self._unreported = self._unreported, None
        if error is not None:
            raise _again(error)

    # ---- ending ---------------------------------------------------------------------------------------------------

    def reconnect(self, address: str | None = None) -> None:
        """Give the connection up and make a new one, with new buffers; steps in flight have failed and are dropped.

        address: of another worker, such as a `SpawnedWorker` started for one that died; by default the same.
        Every rank of a session that lost its worker reconnects, and every rank of a DP group that lost one. Step numbers go
        on, from the highest that any rank of the group has counted. On a GPU, graphs captured before hold the old buffers'
        addresses: capture them again.

        Raises what the constructor raises, and UsageError for another table than before.
        """
        if self._closed:
            raise UsageError("the connector is closed.")
        self._address = self._address if address is None else address
        self._disconnect()
        self.metrics.reconnects += 1
        for step in self._flight:
            if step.error is None and not step.dummy and len(step.taken) < len(self._layers):
                self._failures[step.number] = ConnectionLostError(f"step {step.number}: given up by `reconnect`.")
        self._flight.clear()
        self._dummies.clear()
        self._unreported = None
        self._released = 0
        self._transport = self._connect()
        for port, old, new in zip(self._ports, self._first_facts, self._transport.facts, strict=True):
            if structs.replace(new, tier=old.tier) != old:
                self._disconnect()
                raise UsageError(
                    f"layer {port.layer}: expected the table of the first connection again, found another one:\n"
                    f"  {old}\n  {new}\nReconnect to a worker that serves the same checkpoint, or make a new connector."
                )

    def _disconnect(self) -> None:
        if native.pid != self._pid:  # in a forked child: what is on a device, and what waits there, is the parent's
            self._transport.close()
            return
        if self._route is not None:
            self._route.close()
            self._route = None
        self._transport.close()
        if self._gpu is not None:
            self._gpu.close()

    def close(self) -> None:
        """Stop the transport, then free its memory; safe to call twice, at exit, and after a constructor that failed."""
        if self._closed:
            return
        self._closed = True
        for layer in self._layers:
            registry.remove(layer.number, self)
        _open.discard(self)
        self._disconnect()
        self._flight.clear()

    def __enter__(self) -> PleOffloadConnector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_open: weakref.WeakSet[PleOffloadConnector] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for connector in list(_open):
        connector.close()


def _drop_frames(error: BaseException) -> None:
    """Take the tracebacks off an error that is kept: their frames hold a step's rows, and whatever the callers hold."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _again(error: PleOffloadError) -> PleOffloadError:
    """A copy to raise of an error that is kept, so that the callers' frames go with the copy."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _port(layer: OffloadLayer) -> PortSpec:
    dtype = layer.get_offload_output_dtype()
    if dtype not in _DTYPES:
        raise UsageError(f"layer {layer.layer}: output dtype: expected bfloat16, float16 or float32, found {dtype}.")
    return PortSpec(layer.layer, _DTYPES[dtype], layer.get_offload_output_dim())
