"""Transport `inline`: the tables are open in this process, and the lookup runs in the call that waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ple_offload.connector.base import Inputs, PortSpec
from ple_offload.connector.config import ConnectorConfig
from ple_offload.errors import PleOffloadError, StepError, StoreError, UsageError
from ple_offload.table import Table


class InlineTransport:
    """See connector/base.py. The caller opened the tables and closes them."""

    def __init__(self, config: ConnectorConfig, ports: list[PortSpec], tables: Mapping[int, Table]) -> None:
        missing = [port.layer for port in ports if port.layer not in tables]
        if missing:
            raise UsageError(f"worker 'inline': expected open tables for layers {missing}, found {sorted(tables)}.")
        self._tables = [tables[port.layer] for port in ports]
        for table in self._tables:
            expected = config.fingerprints.get(table.spec.layer, "")
            if expected and expected != (found := table.fingerprint()):
                raise UsageError(
                    f"layer {table.spec.layer}: expected the table with fingerprint {expected}, found {found}. "
                    "The engine and the table were given different checkpoints."
                )
        self._ports = ports
        self._config = config
        self.facts = [table.facts() for table in self._tables]
        for table, port in zip(self._tables, ports, strict=True):
            table.prepare(port.dtype)
        context_len = self.facts[0].context_len
        rows = [fact.rows_per_token for fact in self.facts] if config.request == "rows" else []
        self._slots = [
            Inputs(
                np.zeros(config.max_num_tokens, np.int64),
                np.zeros(config.max_num_reqs + 1, np.int64),
                np.zeros((config.max_num_reqs, context_len), np.int64),
                [np.zeros((config.max_num_tokens, count), np.int64) for count in rows],
            )
            for _ in range(config.max_concurrent_batches)
        ]
        self._num_reqs: dict[int, int] = {}

    def inputs(self, step: int) -> Inputs:
        return self._slots[step % len(self._slots)]

    def publish(self, step: int, num_reqs: int, num_tokens: int) -> None:
        self._num_reqs[step] = num_reqs

    def deliver(self, layer: int, step: int, num_tokens: int, out: npt.NDArray[Any]) -> None:
        slot, table, port = self.inputs(step), self._tables[layer], self._ports[layer]
        num_reqs = self._num_reqs[step]
        try:
            if self._config.request == "rows":
                rows = slot.row_numbers[layer][:num_tokens]
                table.gather(rows, dtype=port.dtype, out=out.reshape(num_tokens, table.rows_per_token, table.row_dim))
            else:
                table.lookup(
                    slot.input_ids[:num_tokens],
                    slot.query_start_loc[: num_reqs + 1],
                    slot.ngram_context[:num_reqs],
                    dtype=port.dtype,
                    out=out,
                )
        except StoreError:
            raise
        except PleOffloadError as error:
            raise StepError(f"step {step} layer {port.layer}: {error}") from error

    def release(self, step: int) -> None:
        self._num_reqs = {s: n for s, n in self._num_reqs.items() if s > step}

    def close(self) -> None:
        self._num_reqs = {}
