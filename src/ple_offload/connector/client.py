"""One lookup through a worker without a model, and without torch: for tools."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from ple_offload.connector.base import PortSpec
from ple_offload.connector.config import ConnectorConfig, Limits
from ple_offload.connector.remote import RemoteTransport
from ple_offload.formats import VALUE_DTYPES
from ple_offload.ipc.messages import LayerFacts
from ple_offload.spec import TableSpec, fingerprint


def lookup_once(
    address: str,
    table: TableSpec,
    input_ids: npt.NDArray[np.int64],
    ngram_context: npt.NDArray[np.int64],
    limits: Limits | None = None,
) -> tuple[npt.NDArray[Any], LayerFacts]:
    """Values [num_tokens, embed_dim] in the table's value dtype of one request: [num_tokens] ids behind [1, context_len].

    Also what the worker says of the table.

    Connects, takes one step, and leaves. Raises StepError for ids that cannot be looked up, ConnectionLostError when the
    worker cannot be reached or is lost, ProtocolError when it serves other tables.
    """
    dtype = table.format.value_dtype
    identity = fingerprint(table)
    config = ConnectorConfig(
        max_num_tokens=len(input_ids),
        max_num_reqs=1,
        session=f"lookup-{uuid.uuid4().hex[:12]}",
        max_concurrent_batches=1,
        checkpoint=identity,
        fingerprints={table.layer: identity},
        limits=limits or Limits(),
    )
    transport = RemoteTransport(config, [PortSpec(table.layer, dtype, table.embed_dim)], address)
    try:
        step = transport.counted + 1
        inputs = transport.inputs(step)
        inputs.input_ids[:] = input_ids
        inputs.query_start_loc[:] = (0, len(input_ids))
        inputs.ngram_context[:] = ngram_context
        transport.publish(step, 1, len(input_ids))
        values = np.empty((len(input_ids), table.embed_dim), VALUE_DTYPES[dtype])
        transport.deliver(0, step, len(input_ids), values)
        transport.release(step)
        return values, transport.facts[0]
    finally:
        transport.close()
