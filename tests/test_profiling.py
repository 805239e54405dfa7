"""Ranges on a profiler's time line: which a step has, and that they cost nothing unless asked for."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from ple_offload import profiling
from ple_offload.errors import UsageError


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    profiling.reset()
    yield
    profiling.reset()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a fake `nvtx` was told; `-` ends a range."""
    told: list[str] = []

    @contextlib.contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        told.append(f"{domain}: {message}")
        yield
        told.append("-")

    package = types.ModuleType("nvtx")
    package.annotate = annotate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", package)
    monkeypatch.setenv("PLE_OFFLOAD_NVTX", "1")
    return told


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLE_OFFLOAD_NVTX", raising=False)
    assert profiling.span("copy") is profiling.span("wait")


def test_neither_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLE_OFFLOAD_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="PLE_OFFLOAD_NVTX=1: expected the package nvtx"):
        profiling.span("copy")


def test_a_step_has_its_ranges(seen: list[str], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the connector's sources are torch tensors")
    import ple_offload
    from checkpoint import tiny
    from ple_offload.connector import ConnectorConfig, PleOffloadConnector
    from ple_offload.layer import PleOffloadLayer

    with ple_offload.open_table(tiny.write_default(tmp_path), tier="ram") as table:
        layer = PleOffloadLayer(table.spec.layer, table.embed_dim)
        ids, starts = torch.tensor([1, 2, 3]), torch.tensor([0, 3])
        context = torch.full((1, table.context_len), table.spec.family.filler)
        with PleOffloadConnector(
            ConnectorConfig(3, 1),
            torch.nn.ModuleList([layer]),
            "cpu",
            "inline",
            input_ids_source=ids,
            query_start_loc_source=starts,
            ngram_context_source=context,
            tables={table.spec.layer: table},
        ) as connector:
            connector.prepare_forward(1, 3)
            layer(torch.empty((3, 1)), ids)
    assert seen == [part for name in ("copy", "publish", "wait") for part in (f"ple_offload: {name}", "-")]
