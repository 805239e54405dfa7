"""A result that is written down and said at once."""

from __future__ import annotations

import json
from typing import Any

from record import Record


def tell(record: Record, value: Any, *keys: str) -> None:
    """Put a value into the record, and print it as one line."""
    record.put(value, *keys)
    print(f"{' / '.join(keys)}: {json.dumps(value)}", flush=True)
