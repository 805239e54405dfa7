"""Launch a Triton kernel again and again: its compiled form is kept, since Triton's own way to it costs 20 to 40 us a call.

That way looks at every argument to find the compiled kernel that fits. Kernels here are written so that few exist: the
types of their numbers are declared, and no value is specialised. What still differs, a caller says in `key`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any


class Launch:
    """One kernel on one device. Its compile-time arguments are its last parameters.

    options: of every launch, like num_warps.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self, key: Hashable, programs: int, *arguments: Any, constants: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Launch `programs` programs on the current stream of the current device.

        key: stands for the dtypes of the tensors that the caller may choose, and for what `constants` gives: the
        compile-time arguments, in their order. It is asked once for each key.
        """
        if key in self._compiled:
            compiled, last = self._compiled[key]
            compiled[(programs, 1, 1)](*arguments, *last)
            return
        chosen = constants()
        compiled = self._kernel[(programs,)](*arguments, **chosen, **self._options)
        if hasattr(compiled, "launch_metadata"):  # not under the interpreter
            self._compiled[key] = (compiled, tuple(chosen.values()))
