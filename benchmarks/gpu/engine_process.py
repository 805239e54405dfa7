"""An engine in a process of its own, over a world's memory and its worker; told what to do line by line.

The parent:  with EngineProcess(world, worker.address, batch, routes=["staged"], widths=[0]) as engine:
                 engine.hear()                           what it says once its steps are captured, and right
                 engine.ask("memory")                    what this process and its GPU hold
                 engine.tell("run", "staged", 0, begin_s, end_s)
                 engine.hear()                           the median time of a step between the two moments
                                                         (of the monotonic clock, which all processes share)

Every request is a JSON line, and so is every answer; the end of input ends the process. width: of the decoder; 0 for the
lookup alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import lookups
import numpy as np
import torch
from children import answer, end_child, read_answer, start_child
from decoder import Decoder
from loop import Batch, Engine, Inputs
from memory_facts import process
from step import check_rows
from world import World

BLOCK_S = 0.05


class EngineProcess:
    """See the module. Returns at once: several can start together, each is ready when its first answer is heard."""

    def __init__(
        self,
        world: World,
        address: str,
        batch: Batch,
        *,
        routes: Sequence[str],
        widths: Sequence[int],
        device: int = 0,
    ) -> None:
        options = {
            "fd": world.store.fd,
            "rows": world.wanted_rows,
            "huge": world.huge,
            "threads": world.table.threads,
            "address": address,
            "batch": [batch.kind, batch.num_tokens],
            "routes": list(routes),
            "widths": list(widths),
            "device": device,
        }
        self.name = f"engine {batch.name}"
        self._process = start_child(__file__, json.dumps(options), pass_fds=[world.store.fd])

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *request: Any) -> Any:
        self.tell(*request)
        return self.hear()

    def tell(self, *request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next answer; raises when the process has died, or says that it failed."""
        return read_answer(self._process, self.name)

    def close(self) -> None:
        end_child(self._process)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(options: dict[str, Any]) -> None:
    """What the process does."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", options["device"]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    in_flight = lookups.IN_FLIGHT if on_gpu else 1
    batch = Batch(*options["batch"])
    with (
        World.over(
            os.dup(options["fd"]), "fp8", options["rows"], huge=options["huge"], threads=options["threads"]
        ) as world,
        contextlib.ExitStack() as stack,
    ):
        inputs = Inputs(device)
        decoders = {width: Decoder(width, device) for width in options["widths"]}
        engines: dict[tuple[str, int], Engine] = {}
        once_s: dict[tuple[str, int], float] = {}
        failed: dict[str, str] = {}
        for route in options["routes"]:
            try:
                lookup = lookups.make(route, world, inputs, options["address"])
                stack.callback(lookup.close)
                for width, decoder in decoders.items():
                    engine = Engine(decoder, lookup, inputs)
                    check_rows(engine, batch, world)
                    once_s[route, width] = engine.steps(batch, 5, in_flight).step_s
                    engines[route, width] = engine
                    stack.callback(engine.close)
            except Exception as error:  # the other routes can still run
                failed[route] = f"{type(error).__name__}: {error}"[:1000]
        answer({"ready": [f"{route} {width}" for route, width in engines], "failed": failed})
        for line in sys.stdin:
            request, *rest = json.loads(line)
            if request == "memory":
                held = torch.cuda.memory_allocated(device) if on_gpu else 0
                answer({**process(), "gpu_allocated": held})
                continue
            route, width, begin_s, end_s = rest
            count = max(1, round(BLOCK_S / once_s[route, width]))
            time.sleep(max(0.0, begin_s - time.monotonic()))
            times = []
            while time.monotonic() < end_s:
                times.append(engines[route, width].steps(batch, count, in_flight).step_s * 1e3)
            answer({"step_ms": float(np.median(times)), "blocks": len(times)})


if __name__ == "__main__":
    try:
        serve(json.loads(sys.argv[1]))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"[:2000]})
        raise
