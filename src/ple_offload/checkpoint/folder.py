"""A folder of safetensors files with a config.json, as model hubs lay it out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from ple_offload.checkpoint import strict_json
from ple_offload.checkpoint.reader import open_file, read_bytes
from ple_offload.checkpoint.safetensors import MAX_HEADER_BYTES, StoredTensor, read_header
from ple_offload.checkpoint.strict_json import shown
from ple_offload.errors import CheckpointError, UsageError

MAX_CONFIG_BYTES = 16 << 20
MAX_READ_BYTES = 1 << 20

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, by its headers. No file stays open.

    With an index, the files are those the index names, and it decides where a tensor is; without one, every
    *.safetensors file of the folder counts.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    # Tensors the index places in a file that does not hold them. An error for whoever needs one of them.
    absent: Mapping[str, Path]
    # Files of the folder that the index leaves out.
    unlisted: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config.json, the index if there is one, and the header of every file.

        `path` is a folder, or a model id ("owner/name") in the local hub cache; nothing is downloaded.
        Raises UsageError when there is neither, CheckpointError for a folder that cannot be understood.
        """
        folder = _find_folder(path)
        config = _read_json(folder / "config.json", MAX_CONFIG_BYTES)
        places = _read_index(folder)
        present = tuple(sorted(folder.glob("*.safetensors")))
        files = present if places is None else tuple(sorted(set(places.values())))
        if not files:
            raise CheckpointError(
                f"{folder}: expected *.safetensors files, found none. Other formats must be converted first."
            )
        places = places or {}
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                if places.get(name, file) != file:
                    continue  # the index says that another file's copy counts
                if name in tensors:
                    raise CheckpointError(
                        f"{file}: tensor {shown(name)}: expected it in one file, found it in "
                        f"{tensors[name].path.name} "
                        "as well. Remove the file that does not belong, or add an index that names one of "
                        "them."
                    )
                tensors[name] = tensor
        return cls(
            folder=folder,
            config=config,
            tensors=MappingProxyType(tensors),
            files=files,
            absent=MappingProxyType({name: file for name, file in places.items() if name not in tensors}),
            unlisted=tuple(file for file in present if file not in files),
        )

    def read(self, tensor: StoredTensor) -> bytes:
        """The bytes of a small tensor, at most 1 MiB. Raises CheckpointError when they cannot be read."""
        if tensor.num_bytes > MAX_READ_BYTES:
            raise CheckpointError(
                f"{tensor.path}: tensor {shown(tensor.name)}: expected at most {MAX_READ_BYTES:,} bytes, "
                f"found {tensor.num_bytes:,}."
            )
        with open_file(tensor.path) as fd:
            return read_bytes(fd, tensor.path, tensor.offset, tensor.num_bytes)


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    with open_file(path) as fd:
        num_bytes = os.fstat(fd).st_size
        if num_bytes > limit:
            raise CheckpointError(f"{path}: expected at most {limit:,} bytes of JSON, found {num_bytes:,}.")
        raw = read_bytes(fd, path, 0, num_bytes)
    return strict_json.parse_object(raw, str(path))


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Tensor name -> file, or None when the folder has no index."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    path = folder / _INDEX if folder / _INDEX in found or len(found) != 1 else found[0]
    if path not in found:
        if found:
            raise CheckpointError(
                f"{folder}: expected one index ({_INDEX}), found {', '.join(file.name for file in found)}. "
                "Remove those that do not belong."
            )
        return None
    places = _read_json(path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(
            f"{path}: 'weight_map': expected an object that gives each tensor its file, found "
            f"{shown(places)}. "
            "Download the index again, or remove it if the files are complete."
        )
    for name, file in places.items():
        if not _is_inside(file):
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: expected the name of a .safetensors file inside the folder, "
                f"found {shown(file)}. Download the index again."
            )
    missing = sorted({file for file in places.values() if not (folder / file).exists()})
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: expected the file {shown(missing[0])}{more}, which the index names; found no such "
            "file. "
            "The download is not complete: fetch what is missing."
        )
    return {name: folder / file for name, file in places.items()}


def _is_inside(file: Any) -> bool:
    """Whether an index may name this file: "../x" is refused; a link that leaves the folder is fine."""
    if not isinstance(file, str) or "\0" in file or not file.endswith(".safetensors") or len(file) > 4096:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _find_folder(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise UsageError(f"checkpoint: expected a path or a model id, found {path!r}.")
    folder = Path(path)
    try:
        if folder.is_dir():
            return folder
        exists = folder.exists()
    except OSError as error:  # too long a name, or no permission on the way there
        raise UsageError(f"{shown(str(path))}: cannot be looked up: {error.strerror}. Give another path.") from error
    if exists:
        raise UsageError(f"{path}: expected a checkpoint's folder, found a file. Give the folder that holds it.")
    cache = _hub_cache()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise UsageError(f"{path}: no such folder. Give the folder of a checkpoint, or a model id such as owner/name.")
    repo = cache / ("models--" + str(path).replace("/", "--"))
    try:
        commit = (repo / "refs" / "main").read_text().strip()
    except OSError:
        commit = ""
    snapshot = repo / "snapshots" / commit
    if not re.fullmatch(r"\w+", commit) or not snapshot.is_dir():
        raise UsageError(
            f"{path}: no such folder, and no such model in the local cache {cache}. "
            f"Download it first: hf download {path}"
        )
    return snapshot


def _hub_cache() -> Path:
    """Where Hugging Face's tools keep models, by the same variables in the same order, without them."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or base).expanduser() / "hub"
