"""What `doctor` says of GPUs: what decides their routes, and how fast each route is here.

Nothing here raises: doctor runs where drivers are broken and packages are missing.
"""

from __future__ import annotations

import json
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

SHOWN = ("read_only_host_register", "uses_host_page_tables", "integrated", "kernel_time_limit")
ON_THE_CPU = "rows are delivered on the CPU"
# 16 heads of about 26,000 rows of 160 FP8 elements: 64 MiB, more than a processor's caches keep of random rows
HEAD_ROWS = 26_000
EMBED_DIM = 2560
MAX_TOKENS = 4096


def sections(advice: list[str]) -> dict[str, Facts]:
    """A section for each GPU that torch sees, and one of what was measured on the first; or one that says why not."""
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a driver that does not start; the answer says it
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except ImportError:
        return {"GPU": {"routes": f"none: torch is not installed; {ON_THE_CPU}"}}
    except Exception as error:  # whatever a broken installation raises
        advice.append(f"GPU: torch does not start ({error}); install torch again")
        return {"GPU": {"routes": f"none: torch does not start: {error}; {ON_THE_CPU}"}}
    if not count:
        return {"GPU": {"routes": f"none: torch sees no GPU; {ON_THE_CPU}"}}
    found = {f"GPU {index}": gpu_facts(index, advice) for index in range(count)}
    found["routes measured"] = measured(advice)
    return found


def gpu_facts(index: int, advice: list[str]) -> Facts:
    """Name, driver, deciding attributes, and which routes can work."""
    import torch

    from ple_offload.connector.choose import require_triton, why_not_ipc, why_not_registered
    from ple_offload.cuda import Cuda, kernel_driver_version

    facts: Facts = {}
    try:
        facts["name"] = torch.cuda.get_device_name(index)
        version = kernel_driver_version()
        facts["driver"] = None if version is None else f"{version[0]}.{version[1]}"
        require_triton()
        cuda = Cuda(torch.device("cuda", index))
        facts |= {name: cuda.attribute(name) for name in SHOWN}
        for tier in ("ram", "file"):
            reason = why_not_registered(cuda, tier)
            facts[f"direct, tier {tier}"] = "can work" if reason is None else f"no: {reason}"
        facts["staged"] = "can work"
        reason = why_not_ipc(cuda)
        facts["ipc"] = "can work, if the worker sees this GPU" if reason is None else f"no: {reason}"
    except Exception as error:  # a broken driver raises anything
        facts["routes"] = f"none: {error}"
        advice.append(f"GPU {index}: {error}")
    return facts


def measured(advice: list[str]) -> Facts:
    """What `auto` measures and chooses on the first GPU, for a table of 64 MiB in a worker's memory."""
    import torch

    from ple_offload.connector import ConnectorConfig, PleOffloadConnector
    from ple_offload.layer import PleOffloadLayer
    from ple_offload.worker.spawn import SpawnedWorker

    try:
        sources: dict[str, Any] = {
            "input_ids_source": torch.zeros(MAX_TOKENS, dtype=torch.int64, device="cuda:0"),
            "query_start_loc_source": torch.zeros(2, dtype=torch.int64, device="cuda:0"),
            "ngram_context_source": torch.zeros((1, 2), dtype=torch.int64, device="cuda:0"),
        }
        with tempfile.TemporaryDirectory(prefix="ple-offload-doctor-") as folder:
            write_checkpoint(Path(folder))
            with (
                SpawnedWorker(folder, tier="ram") as worker,
                PleOffloadConnector(
                    ConnectorConfig(MAX_TOKENS, 1, session="doctor"),
                    PleOffloadLayer(0, EMBED_DIM),
                    "cuda:0",
                    worker.address,
                    **sources,
                ) as connector,
            ):
                report = connector.route_report
    except Exception as error:
        advice.append(f"GPU: measuring its routes failed: {error}")
        return {"auto": f"not measured: {error}"}
    facts: Facts = {"auto": f"{report.route}: {report.why}"}
    for timing in report.timings:
        facts[f"{timing.num_tokens} token{'s'[: timing.num_tokens > 1]}"] = (
            f"direct {timing.direct_us:.0f} us, staged {timing.staged_us:.0f} us"
        )
    return facts


def write_checkpoint(folder: Path, head_rows: int = HEAD_ROWS) -> None:
    """A checkpoint that is nothing but a table of random rows, on decoder layer 0."""
    import ml_dtypes
    import numpy as np

    from ple_offload.families.qwen_ple import QwenPle

    config = {
        "model_type": "qwen4_exp_text",
        "ple_layer_ids": [1],
        "ple_embed_dim": EMBED_DIM,
        "eos_token_id": 0,
        "ngram_vocab_size_base": head_rows,
    }
    rule = QwenPle.from_text_config(config, 0)
    rows, row_dim = rule.num_rows, EMBED_DIM // rule.rows_per_token
    name = "model.layers.0.ple.ple_embedding.ngram_embedding"
    header = json.dumps(
        {
            f"{name}.weight": {"dtype": "F8_E4M3", "shape": [rows, row_dim], "data_offsets": [0, rows * row_dim]},
            f"{name}.weight_scale": {
                "dtype": "BF16",
                "shape": [1],
                "data_offsets": [rows * row_dim, rows * row_dim + 2],
            },
        }
    ).encode()
    header += b" " * (-len(header) % 8)  # the rows start at a multiple of 8
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(np.random.default_rng(0).integers(0, 0x7F, rows * row_dim, np.uint8).tobytes())
        file.write(np.array([1], ml_dtypes.bfloat16).tobytes())
