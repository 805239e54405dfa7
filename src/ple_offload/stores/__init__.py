"""Where rows live: one file per tier."""

from ple_offload.stores.base import Part, RowMap, Segment, Store
from ple_offload.stores.file import FileStore
from ple_offload.stores.lent import LentStore
from ple_offload.stores.ram import RamStore

__all__ = ["FileStore", "LentStore", "Part", "RamStore", "RowMap", "Segment", "Store"]
