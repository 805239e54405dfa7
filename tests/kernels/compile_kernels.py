"""Compile every kernel as its own launcher launches it, for an H100 or H200, on a machine without a GPU.

The interpreter in which the other tests run the kernels knows no types: what it runs may not compile. Prints one line
for each launch; ends with an error where one does not compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ple_offload.connector.drain_triton import CONTROL_WORDS, Drain
from ple_offload.connector.stage_triton import Beginning, Source
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.families.qwen_ple_triton import QwenPleOnDevice
from ple_offload.formats.base import RowFormat
from ple_offload.formats.gather_triton import GatherOnDevice, Given

TARGET = GPUTarget("cuda", 90, 32)
CPU = torch.device("cpu")
POINTERS = {
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ADDRESS = 1 << 46
launches = 0


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Takes the place of JITFunction.run."""
    global launches
    values = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in options.items() if k in self.arg_names}
    settings = {k: v for k, v in options.items() if k not in self.arg_names}
    signature, constants = {}, {}
    for parameter in self.params:
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            assert parameter.annotation_type == "i64", (
                f"{self.__name__}: {parameter.name} has a type that its value decides"
            )
            assert parameter.do_not_specialize, f"{self.__name__}: {parameter.name} is compiled anew for some values"
            signature[parameter.name] = "i64"
    kernel = triton.compile(ASTSource(self, signature, constants, {}), target=TARGET, options=settings)
    launches += 1
    print(self.__name__, len(kernel.asm["cubin"]), "bytes", flush=True)


def main() -> None:
    JITFunction.run = compile_launch
    family = QwenPle.from_text_config({"vocab_size": 1000, "eos_token_id": 0, "ngram_vocab_size_base": 100}, 0)
    on_device = QwenPleOnDevice(family, CPU)
    for dtype in (torch.int32, torch.int64):
        rows, bad = torch.zeros((3, 16), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        ids, starts, context = (torch.zeros(shape, dtype=dtype) for shape in (3, 3, (2, 2)))
        on_device.row_numbers(ids, starts, context, rows, bad, bad)
        fp8, base = RowFormat("fp8_e4m3", 160, 0.5), np.array([ADDRESS], np.uint64)
        GatherOnDevice(fp8, base, np.array([0, 9]), 9, CPU).run(
            torch.zeros(32, dtype=dtype), torch.zeros((32, 160), dtype=torch.bfloat16), Given(bad, bad, 16, 56)
        )
        beginning = Beginning((16, 16), ADDRESS, 1, CPU)
        beginning.tell(0, 0, 0)
        beginning.stage([Source(ids, ADDRESS, 3)] * 4, head=ADDRESS, step=1, num_reqs=1, num_tokens=3, flag=5, slot=0)
    for name in ("bf16", "fp16", "fp32", "fp8_e4m3"):
        row_format = RowFormat(name, 160, 0.5 if name == "fp8_e4m3" else None)
        for dtype in DTYPES:
            out = torch.zeros((5, 160), dtype=dtype)
            for starts, step in ((np.array([0, 9, 12]), 9), (np.array([0, 3, 12]), 0)):
                bases = np.array([ADDRESS, ADDRESS + 4096], np.uint64)
                GatherOnDevice(row_format, bases, starts, step, CPU).run(torch.zeros(5, dtype=torch.int64), out)
            drain = Drain(
                row_format,
                stage=ADDRESS,
                flags=ADDRESS,
                poison=ADDRESS,
                errors=ADDRESS,
                slot_bytes=0,
                blocks_per_slot=1,
            )
            drain.run(torch.zeros(CONTROL_WORDS, dtype=torch.int64), out)
    print(f"{launches} launches compiled")


if __name__ == "__main__":
    main()
