"""Row formats: what values a row's bytes stand for."""

from ple_offload.formats.base import STORED_DTYPES, VALUE_DTYPES, RowFormat, detect

__all__ = ["STORED_DTYPES", "VALUE_DTYPES", "RowFormat", "detect"]
