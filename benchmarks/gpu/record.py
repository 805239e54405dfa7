"""What a run has found, in a JSON file, as it is found: a run that ends early loses nothing, the next one goes on."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Record:
    """A dictionary in a file; every `put` writes the file anew."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = {} if again or not path.exists() else json.loads(path.read_text())

    def put(self, value: Any, *keys: str) -> None:
        place = self.found
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self._write()

    def _write(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.found, indent=1) + "\n")
        draft.replace(self.path)

    def forget(self, *keys: str) -> None:
        """Take out what is at these keys, if anything is, with places that are left empty."""
        places = [self.found]
        for key in keys[:-1]:
            if not isinstance(places[-1].get(key), dict):
                return
            places.append(places[-1][key])
        if places[-1].pop(keys[-1], None) is None:
            return
        for place, key in reversed(list(zip(places, keys[:-1], strict=False))):
            if not place[key]:
                del place[key]
        self._write()

    def has(self, *keys: str) -> bool:
        place = self.found
        for key in keys:
            if key not in place:
                return False
            place = place[key]
        return True

    @contextlib.contextmanager
    def failing(self, *keys: str) -> Iterator[None]:
        """Record an exception of the block at failed/<keys> and go on; an earlier run's is forgotten once all goes well."""
        try:
            yield
            self.forget("failed", *keys)
        except Exception as error:
            trace = traceback.format_exc()
            print(f"failed: {'/'.join(keys)}: {trace}", file=sys.stderr, flush=True)
            self.put({"error": f"{type(error).__name__}: {error}"[:2000], "trace": trace[-3000:]}, "failed", *keys)
