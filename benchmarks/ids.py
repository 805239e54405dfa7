"""Token ids to look up: uniformly random ones, the worst case, and those of real text, which repeat themselves.

No text and no tokenizer is part of this project. Text is the Python source of the running interpreter unless a folder is
given. Tokens come from a `tokenizer.json`: the one given, else one the `litellm` package carries if it is installed, else
words numbered as they occur, which repeat much as tokens do. Every result says what was used.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
LITELLM_TOKENIZER = "litellm_core_utils/tokenizers/deepseek_tokenizer.json"


@dataclass
class Stream:
    """Ids handed out piece by piece, each once as long as they last, so that no piece finds its rows in a cache."""

    what: str
    ids: Ids
    at: int = 0

    def take(self, num_tokens: int) -> Ids:
        if self.at + num_tokens > self.ids.size:
            self.at = 0
        self.at += num_tokens
        return self.ids[self.at - num_tokens : self.at]


def random_stream(vocab_size: int, num_tokens: int) -> Stream:
    return Stream("uniformly random", np.random.default_rng(7).integers(0, vocab_size, num_tokens))


def text_stream(vocab_size: int, num_tokens: int, eos: int, tokenizer: Path | None, text: Path | None) -> Stream:
    """About `num_tokens` of the files below `text`, in a seeded random order, an EOS after each file."""
    folder = text or Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*" if text else "*.py") if path.is_file())
    np.random.default_rng(7).shuffle(files)  # type: ignore[arg-type]
    path = tokenizer or _installed_tokenizer()
    encode, name = (
        (_load_tokenizer(path), path.name) if path else (_Words(vocab_size).encode, "words, numbered as they occur")
    )
    pieces: list[Ids] = []
    total = 0
    for file in files:
        found = np.array(encode(file.read_text(errors="replace")), np.int64)
        pieces.append(np.append(found[found < vocab_size], eos))
        total += pieces[-1].size
        if total >= num_tokens:
            break
    source = f"{'files' if text else 'Python source'} ({len(pieces):,} files, {total:,} tokens)"
    return Stream(f"{source}; tokenizer: {name}", np.concatenate(pieces))


def _installed_tokenizer() -> Path | None:
    found = importlib.util.find_spec("litellm")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / LITELLM_TOKENIZER
    return path if path.exists() else None


def _load_tokenizer(path: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


class _Words:
    """Numbers words, blanks and marks in the order they first occur; beyond the vocabulary numbers are shared."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words = re.findall(r"\w+|\s+|[^\w\s]", text)
        return [self._numbers.setdefault(word, len(self._numbers) % self._vocab_size) for word in words]
