"""Runs in an engine process: make a connector again and again, failing at the next resource it takes each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ple_offload.connector import ConnectorConfig, PleOffloadConnector, registry, remote
from ple_offload.connector.sources import Sources
from ple_offload.formats.gather import Gather
from ple_offload.ipc.channel import Channel
from ple_offload.layer import PleOffloadLayer
from ple_offload.memory import memfd
from ple_offload.memory.mapping import Mapping

# whatever the constructor takes or asks for, in any order
TAKES: list[tuple[Any, str]] = [
    (Channel, "connect"),
    (Channel, "send"),
    (Channel, "receive"),
    (memfd, "create"),
    (remote.os, "posix_fallocate"),
    (memfd, "seal_size"),
    (Mapping, "__init__"),
    (Mapping, "view"),
    (remote.os, "eventfd"),
    (Gather, "__init__"),
    (remote.words, "wait_flags"),
    (Sources, "check"),
    (Sources, "arrays"),
    (registry, "add"),
]


class InjectedError(Exception):
    pass


@contextlib.contextmanager
def failing_at(number: int) -> Iterator[list[str]]:
    """Raise at the `number`-th call of any of TAKES; yields the names of the calls so far."""
    calls: list[str] = []

    def wrap(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise InjectedError(name)
            return original(*args, **options)

        return wrapped

    saved = [(owner, name, owner.__dict__[name]) for owner, name in TAKES]
    try:
        for owner, name, original in saved:
            if isinstance(original, classmethod):
                setattr(owner, name, classmethod(wrap(original.__func__, name)))
            else:
                setattr(owner, name, wrap(original, name))
        yield calls
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


def held() -> tuple[int, int, int, int]:
    """Descriptors, maps of memfds, layers in the registry, transports a fork would have to leave."""
    maps = Path("/proc/self/maps").read_text().count("memfd:ple-offload")
    return len(list(Path("/proc/self/fd").iterdir())), maps, len(registry._served), len(remote._transports)


def run(address: str) -> list[str]:
    """Fail at every step; returns the steps. The connector that succeeds in the end serves."""
    layers = torch.nn.ModuleList([PleOffloadLayer(1, 64)])
    ids, starts, context = torch.arange(4), torch.tensor([0, 4]), torch.full((1, 2), 7)

    def make() -> PleOffloadConnector:
        config = ConnectorConfig(4, 1, session="constructor")
        return PleOffloadConnector(
            config,
            layers,
            "cpu",
            address,
            input_ids_source=ids,
            query_start_loc_source=starts,
            ngram_context_source=context,
        )

    make().close()  # whatever is made once for a process is there now
    before = held()
    for number in range(1, 1000):
        with failing_at(number) as calls:
            try:
                connector = make()
            except InjectedError:
                pass
            else:
                break
        after = held()
        assert after == before, f"{calls}: held {before} (descriptors, maps, layers, transports) before, {after} after"
    connector.prepare_forward(1, 4)
    found = layers[0](torch.zeros(4, 8), ids)
    assert np.isfinite(found.float().numpy()).all()
    connector.close()
    connector.close()
    del connector, found
    assert held() == before, f"held {before} before, {held()} after close"
    return calls
