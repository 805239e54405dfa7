"""Load a Qwen4Exp model with transformers and keep its n-gram tables out of it.

    model = ple_offload.engines.transformers.from_pretrained("path/to/checkpoint", tier="file")
    model.generate(...)
    model.ple_offload.close()

How: transformers builds every model on the meta device, where a table costs nothing. The two model classes
below are transformers' own, except that right after construction each PLE layer's `ple_embedding` is replaced
by a `TableLookup`, which has the hash constants and no table. transformers' loader only reads tensors that
the model has a place for, so it never touches the table's bytes. Nothing of transformers is patched: ordinary
models stay ordinary beside offloaded ones.

What differs from an ordinary model, on purpose:

* The table is no parameter: `state_dict()`, `parameters()`, `.to(device)` and optimisers do not see it.
* Values come in the model's dtype, decoded from the *stored* bytes at each call: after `.to(torch.float32)` a
  BF16 table gives the same values as an ordinary model's, an FP32 table gives them unrounded.
* Where the ids are on an NVIDIA GPU, so are the rows: by a connector's route `direct` (the GPU reads host memory: inline
  tables, or those that a worker lends) or `staged` (a worker gathers, the GPU drains), see docs/ARCHITECTURE.md.
  `route="auto"` takes what works and is faster. Where neither works it falls back to a lookup on the CPU and a copy, route
  `host`, and logs once why. In every lookup the host waits for the stream (some 10 us): rows that did not come are NaN,
  and the error has to be raised before anything builds on them.
* A CUDA graph cannot be captured of a whole forward: the lookup refuses.
* The table is frozen. Everything else can be trained; a forward in training mode warns.
* `save_pretrained` refuses unless told `without_table=True`, see there.
* `copy.deepcopy` shares the open tables or the connection to their worker, and closing closes them for all
  copies; `pickle` and `torch.save` of the whole model refuse (a `state_dict()` is fine).
* With worker="spawn" or "unix:/path" another process has the tables, and each forward asks it. When it is lost,
  the forward raises `ConnectionLostError`; `model.ple_offload.reconnect()` starts over.
* `torch.compile` breaks the graph at the lookup, so `fullgraph=True` cannot be used; what is compiled before and behind it
  may use CUDA graphs (`mode="reduce-overhead"`).
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ple_offload.config import worker_kind
from ple_offload.connector.config import Limits
from ple_offload.errors import CheckpointError, StoreError, UsageError
from ple_offload.families.qwen_ple import QwenPle
from ple_offload.spec import CheckpointSpec, TableSpec
from ple_offload.spec import inspect as inspect_checkpoint
from ple_offload.table import Table, open_table

TESTED_VERSIONS = "5.16 to 5.25"

try:
    import torch
    import transformers
except ImportError as error:
    raise UsageError(
        f"the transformers adapter needs torch and transformers, but {error.name} is not installed: "
        "pip install 'ple-offload[transformers]'"
    ) from error

try:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
except ImportError as error:
    # transformers' lazy import wraps the reason, which may be another package that is missing
    reason: BaseException = error
    while reason.__cause__ is not None:
        reason = reason.__cause__
    raise UsageError(
        f"transformers {transformers.__version__} has no Qwen4Exp model that can be used ({reason}); tested versions: "
        f"{TESTED_VERSIONS}: pip install --upgrade 'ple-offload[transformers]'"
    ) from error

from ple_offload.engines.remote import RemoteTables  # noqa: E402  they need torch, which may have been missing
from ple_offload.engines.tables import ModelTables, check_route  # noqa: E402

# Options of transformers' from_pretrained that would read the table, or that are not supported.
_REFUSED_OPTIONS = {
    "state_dict": "the weights are read from the checkpoint",
    "gguf_file": "only safetensors checkpoints hold a table that is understood",
    "subfolder": "give the folder itself as the path",
    "revision": "give the folder of that revision as the path",
    "variant": "the table is read from the checkpoint's ordinary files",
    "disable_mmap": "transformers would read whole files, the table with them",
    "distributed_config": "tensor parallel models are not supported",
    "device_mesh": "tensor parallel models are not supported",
    "tp_plan": "tensor parallel models are not supported",
    "tp_size": "tensor parallel models are not supported",
}


class PleOffload:
    """The open tables of one model, or its connection to their worker, as `model.ple_offload`. Copies share it.

    `tables` maps the zero-based decoder layer to its open `Table`; empty once closed, and where a worker has them.
    `remote` is the connection to the worker: its `address`, its `process` if it was spawned; None for worker "inline".
    `source` is what the rows are asked from: `remote`, or what stands before `tables`; with its `connectors`, one for each
    dtype and device that a worker or a GPU takes part for.
    """

    def __init__(
        self, path: Path, layers: Sequence[int], tables: Mapping[int, Table], source: RemoteTables | ModelTables
    ) -> None:
        self.path = path
        self.layers = tuple(layers)
        self.tables: Mapping[int, Table] = MappingProxyType(dict(tables))
        self.source = source
        self.remote = source if isinstance(source, RemoteTables) else None
        self._closed = False

    def lookup(self, layer: int, ids: torch.Tensor, context: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values (batch, seq, embed_dim) of (batch, seq) ids behind a (batch, context_len) context, on their device."""
        if self._closed:
            raise StoreError(
                f"the table of PLE layer {layer} of {self.path} was closed; load the model again to use it"
            )
        return self.source.lookup(layer, ids, context, dtype)

    def reconnect(self) -> None:
        """Start over after the worker was lost; a spawned one is started anew. Without a worker there is nothing to do."""
        if self.remote is not None:
            self.remote.reconnect()

    def close(self) -> None:
        """Close the tables, or leave the worker and end it if it was spawned; may be called twice.

        Every later forward of the model raises `StoreError`.
        """
        self._closed = True
        self.source.close()  # first: a GPU may be reading the tables
        tables, self.tables = self.tables, MappingProxyType({})
        for table in tables.values():
            table.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> PleOffload:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a model whose table is outside of it cannot be pickled (table: {self.path}): save its state_dict, "
            "or load it again in the other process with ple_offload.engines.transformers.from_pretrained"
        )

    def __repr__(self) -> str:
        worker = "inline" if self.remote is None else self.remote.address
        return f"PleOffload({str(self.path)!r}, worker={worker!r}, layers={'closed' if self._closed else self.layers})"


class TableLookup(modeling.Qwen4ExpTextNGramEmbedding):
    """Takes the place of transformers' n-gram embedding: same constants, same use of the cache, no table."""

    table_shape: tuple[int, ...]  # rows and row width that the model's config asks for

    def __init__(self, original: modeling.Qwen4ExpTextNGramEmbedding) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(original.__dict__)
        self.table_shape = tuple(original.ngram_embedding.weight.shape)
        dtype = original.ngram_embedding.weight.dtype
        del self.ngram_embedding
        # An empty tensor that `.to(dtype)` converts with the model: it remembers the dtype to deliver.
        self.register_buffer("activation", torch.empty(0, dtype=dtype), persistent=False)
        self.offload: PleOffload | None = None  # set by from_pretrained once the weights are loaded

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
        """The embeddings of `input_ids`.

        `input_ids` is `(batch, seq)`, any integer dtype and device; the result is `(batch, seq, embed_dim)`
        on the same device in the model's dtype. With a cache, the ids before this chunk come from it and the
        last ones of this chunk are left in it, in the place and form in which transformers keeps them. `options` are
        those of the whole model's forward, which transformers hands on since 5.25: none concerns the rows.
        Raises `StoreError` once the tables are closed; for an id outside the vocabulary `TokenIdError`, or `StepError`
        where a worker or a GPU takes part; `ConnectionLostError` when that worker is lost; `UsageError` while a CUDA
        graph is captured.
        """
        input_ids = input_ids.long()
        context = self._exchange_context(input_ids, cache)
        if self.training and torch.is_grad_enabled():
            warnings.warn("the n-gram table is not in the model, so training leaves it as it is", stacklevel=2)
        values: torch.Tensor = self._lookup(input_ids, context)
        return values

    def extra_repr(self) -> str:
        return "{:,} x {}, outside the model".format(*self.table_shape)

    def require_same_rows(self, table: TableSpec) -> None:
        """Raise `CheckpointError` unless the rule of the loaded module is that of the checkpoint's table."""
        family = table.family
        assert isinstance(family, QwenPle)
        pairs = {
            "shape": (self.table_shape, (table.num_rows, table.row_dim)),
            "eos_token_id": (self.eos_token_id, family.eos_token_id),
            "layer_multipliers": (self.layer_multipliers.tolist(), family.multipliers.tolist()),
            "ngram_heads_vocab_sizes": (self.ngram_heads_vocab_sizes.tolist(), family.head_sizes.tolist()),
            "ngram_heads_offsets": (self.ngram_heads_offsets.tolist(), family.head_offsets.tolist()),
        }
        for name, (found, expected) in pairs.items():
            if found != expected:
                raise CheckpointError(
                    f"decoder layer {self.layer_idx}: the model's {name} of the n-gram table is {found}, "
                    f"the checkpoint's is {expected}; was a config= given that is not the checkpoint's?"
                )

    def _exchange_context(self, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Read the `(batch, context_len)` ids before this chunk from the cache, leave its last ones there."""
        batch, seq = input_ids.shape
        start = input_ids.new_full((batch, self.context_len), self.eos_token_id)
        if cache is None:
            return start
        state = cache.layers[self.layer_idx]
        cached = state.conv_states[2] if state.has_previous_state[2] else None
        # The cache may hold more than the window (while it records for a rollback), and is updated in place.
        context = start if cached is None else cached[:, -self.context_len :].clone()
        to_cache = input_ids
        if cached is None and seq < self.context_len:  # the cache itself would fill up with zeros
            to_cache = torch.cat([start[:, seq:], input_ids], dim=1)
        cache.update_conv_state(to_cache, self.layer_idx, state_idx=2, conv_kernel_size=self.context_len)
        return context

    @torch.compiler.disable
    def _lookup(self, input_ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """`(batch, seq, embed_dim)` on the device of the ids in the model's dtype."""
        if self.offload is None:
            raise StoreError(
                f"the PLE layer {self.layer_idx} has no table: load this model with "
                "ple_offload.engines.transformers.from_pretrained, not with the class's own method"
            )
        return self.offload.lookup(self.layer_idx, input_ids, context, self.activation.dtype)


class _TableOutside:
    """What makes a transformers model an offloaded one; stands before the original class among the bases."""

    _no_placement_params = None  # transformers' exception for the table in device maps
    _keys_to_ignore_on_load_unexpected: set[str]  # of this model; transformers makes it
    ple_offload: PleOffload  # set by from_pretrained

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if torch.empty(0).device.type != "meta":  # or the table would be allocated after all
            raise UsageError(
                f"{type(self).__name__} with its table outside can only be built by "
                "ple_offload.engines.transformers.from_pretrained, and not under DeepSpeed ZeRO-3"
            )
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for layer in self.modules():  # type: ignore[attr-defined]
            if isinstance(layer, modeling.Qwen4ExpTextPLELayer):
                layer.ple_embedding = TableLookup(layer.ple_embedding)
        self._keys_to_ignore_on_load_unexpected.add(r"\.ple_embedding\.ngram_embedding\.")

    @classmethod
    def is_custom_code(cls) -> bool:
        """transformers asks this to choose its renaming rules: those of its own class apply."""
        return False

    def save_pretrained(self, save_directory: Any, *args: Any, without_table: bool = False, **kwargs: Any) -> Any:
        """Refuse, or with `without_table=True` save all but the table under the variant "without_table".

        A checkpoint that lacks the table loads into an ordinary model with a *random* table and no error. So
        the weights are written as `model.without_table.safetensors`, which transformers does not look for.
        """
        if not without_table:
            raise UsageError(
                f"the n-gram table is not in this model but in {self.ple_offload.path}: what would be saved "
                "is not a whole checkpoint. To save the rest: save_pretrained(folder, without_table=True), or "
                "torch.save(model.state_dict(), file) to load it again with load_state_dict"
            )
        kwargs.setdefault("variant", "without_table")
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


# The originals' names: transformers writes them into saved configurations and picks the loss by them.
class Qwen4ExpForCausalLM(_TableOutside, modeling.Qwen4ExpForCausalLM):
    """transformers' text model with its tables outside."""


class Qwen4ExpForConditionalGeneration(_TableOutside, modeling.Qwen4ExpForConditionalGeneration):
    """transformers' multimodal model with its tables outside; only its text path is tested."""


# transformers sets torch's default dtype, which all threads share, while it builds a model.
_LOADING = threading.Lock()

# Why an option does not go with a kind of worker.
_NOT_OF = {"inline": "it is for a worker process", "unix": "the daemon was told when it was started"}

# What to build for a checkpoint whose config names no architecture.
_MODEL_TYPES = {"qwen4_exp": "Qwen4ExpForConditionalGeneration", "qwen4_exp_text": "Qwen4ExpForCausalLM"}
_MODEL_CLASSES = {cls.__name__: cls for cls in (Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration)}


def from_pretrained(
    path: str | Path,
    *,
    tier: str = "auto",
    worker: str = "inline",
    route: str = "auto",
    architecture: str | None = None,
    threads: int | None = None,
    progress: bool = False,
    skip_memory_check: bool | None = None,
    max_num_tokens: int | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Any:
    """Load a Qwen4Exp checkpoint with its n-gram tables outside the model.

    Args:
        path: a folder of safetensors, or a model id that the local model cache holds.
        tier: where the rows live: "ram", "file" (read in place from the checkpoint), or "auto".
        architecture: "Qwen4ExpForCausalLM" or "Qwen4ExpForConditionalGeneration"; default: what the
            checkpoint names. The first also loads the text model of a multimodal checkpoint.
        worker: who has the tables. "inline": this process. "spawn": a process that is started here and ends with
            this one. "unix:/path": a daemon that was started with `ple-offload serve`, on this host; it has
            chosen tier and threads.
        route: how rows reach a model on an NVIDIA GPU. "direct": the GPU reads the tables itself.
            "staged": the worker gathers, the GPU drains. "ipc": the worker copies into the GPU's memory. "host": a lookup
            on the CPU and a copy. "auto": the first two as `worker` allows, else "host", and the log says once why. A
            model on the CPU has no choice.
        threads, progress, skip_memory_check: as for `ple_offload.open_table`. Route "direct" makes the page cache of a
            table in tier "file" stay in memory; so it has to fit, which is checked as well.
        max_num_tokens: with a worker: the most tokens of one lookup (default 8192), for which buffers are shared
            with it; longer inputs take several.
        limits: with a worker: how long things may take, a `ple_offload.connector.config.Limits`.
        options: passed on to transformers' own `from_pretrained` (dtype, attn_implementation, ...).

    Returns:
        The model, in evaluation mode, with its open tables as `model.ple_offload` (a `PleOffload`); with
        `output_loading_info=True` a pair of it and transformers' report. Several models may be open, each
        with tables of its own.

    Raises:
        UsageError: an option or a model that is not supported, or a transformers that looks different.
        CheckpointError: the checkpoint is damaged, or its table is not the one that the model would use.
        MemoryLimitError: the table does not fit.
        CudaError: the driver refuses what the route that was asked for needs.
        ConnectionLostError: the worker cannot be reached, or (ProtocolError) serves other tables.
    """
    for name in options:
        if name in _REFUSED_OPTIONS and options[name] not in (None, False, ""):
            raise UsageError(f"from_pretrained cannot take {name}={options[name]!r}: {_REFUSED_OPTIONS[name]}")
    kind = worker_kind(worker)
    loading: dict[str, Any] = {
        "tier": tier,
        "threads": threads,
        "progress": progress,
        "skip_memory_check": skip_memory_check,
    }
    remote: dict[str, Any] = {"max_num_tokens": max_num_tokens, "limits": limits}
    for name, value in {"inline": remote, "spawn": {}, "unix": loading}[kind].items():
        if value not in (None, False, "auto"):
            raise UsageError(f"from_pretrained cannot take {name}={value!r} with worker={worker!r}: {_NOT_OF[kind]}")
    check_route(route)
    _require_seam()
    spec = inspect_checkpoint(path)
    if not _is_utf8(spec.path):
        raise UsageError(f"{spec.path}: expected a path in UTF-8, which safetensors needs; rename it or link to it")
    model_class = _choose_class(spec, architecture)
    with _LOADING:
        try:
            result = model_class.from_pretrained(spec.path, use_safetensors=True, **options)
        except KeyError as error:
            if error.args != ("metadata",):
                raise
            raise CheckpointError(
                f"{spec.path}: its index of safetensors files has no 'metadata', which transformers asks for. "
                'Add "metadata": {} to it.'
            ) from error
    model = result[0] if isinstance(result, tuple) else result
    lookups = _table_lookups(model, spec)
    if kind == "inline":
        with ExitStack() as opened:
            tables = {layer: opened.enter_context(open_table(spec.path, layer, **loading)) for layer in lookups}
            source = ModelTables(spec, "inline", tables=tables, route=route, skip_memory_check=skip_memory_check)
            opened.pop_all()
    else:
        given = {name: value for name, value in remote.items() if value is not None}
        tables = {}
        source = RemoteTables(spec, worker, route=route, **given, **(loading if kind == "spawn" else {}))
    model.ple_offload = PleOffload(spec.path, list(lookups), tables, source)
    for lookup in lookups.values():
        lookup.offload = model.ple_offload
    try:
        activation = next(iter(lookups.values())).activation
        source.connect(activation.dtype, activation.device)
    except BaseException:
        model.ple_offload.close()
        raise
    return result


def _is_utf8(path: Path) -> bool:
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _require_seam() -> None:
    """Refuse a transformers in which what this adapter replaces or calls is not as it was when tested."""
    expected = {
        (modeling, "Qwen4ExpTextNGramEmbedding", "forward"): ("self", "input_ids", "cache|past_key_values"),
        (modeling, "Qwen4ExpTextPLELayer", "__init__"): ("self", "config", "layer_idx", "ple_layer_index"),
        (transformers, "Cache", "update_conv_state"): ("self", "conv_states", "layer_idx", "state_idx"),
    }
    for (module, class_name, method), names in expected.items():
        function = getattr(getattr(module, class_name, None), method, None)
        found = tuple(inspect.signature(function).parameters)[: len(names)] if function else ()
        if len(found) != len(names) or any(f not in n.split("|") for f, n in zip(found, names, strict=True)):
            raise UsageError(_unknown_transformers(f"{class_name}.{method}{names}", str(found or "nothing")))


def _unknown_transformers(expected: str, found: str) -> str:
    return (
        f"transformers {transformers.__version__} differs from the versions tested ({TESTED_VERSIONS}): "
        f"expected {expected}, found {found}. Install one of those versions"
    )


def _choose_class(spec: CheckpointSpec, architecture: str | None) -> Any:
    """The model class for a checkpoint: the one asked for, else the one that its config names."""
    if spec.model_type not in _MODEL_TYPES:
        raise UsageError(f"{spec.path} is a {spec.model_type!r} model; supported here: {', '.join(_MODEL_TYPES)}")
    if architecture is None:
        config, _ = transformers.PreTrainedConfig.get_config_dict(spec.path)
        architecture = (config.get("architectures") or [_MODEL_TYPES[spec.model_type]])[0]
    if architecture not in _MODEL_CLASSES:
        raise UsageError(
            f"{spec.path}: the architecture {architecture!r} is not supported; "
            f"pass architecture= one of {', '.join(_MODEL_CLASSES)}"
        )
    return _MODEL_CLASSES[architecture]


def _table_lookups(model: Any, spec: CheckpointSpec) -> dict[int, TableLookup]:
    """The model's lookups by decoder layer; checks that they need just the checkpoint's tables."""
    lookups = {m.layer_idx: m for m in model.modules() if isinstance(m, TableLookup)}
    expected = sorted(layer - 1 for layer in model.config.get_text_config().ple_layer_ids)  # the config counts from 1
    if sorted(lookups) != expected:
        raise UsageError(_unknown_transformers(f"PLE in decoder layers {expected}", str(sorted(lookups))))
    if sorted(table.layer for table in spec.tables) != expected:
        raise CheckpointError(
            f"{spec.path} has tables for decoder layers {[table.layer for table in spec.tables]}, but the "
            f"model needs them for {expected}; was a config= given that is not the checkpoint's?"
        )
    for table in spec.tables:
        lookups[table.layer].require_same_rows(table)
    return lookups
