"""Every error this package raises on purpose.

    PleOffloadError
    ├── UsageError          a call or an option that cannot be meant (also a ValueError)
    │   └── TokenIdError    a token id outside the vocabulary, or a row number outside the table
    ├── CheckpointError     the checkpoint holds something that is not understood, damaged or incomplete
    ├── MemoryLimitError    the table does not fit the memory this process may use
    ├── StoreError          the rows of an open table cannot be delivered any more
    ├── ForkError           a table or a connector was used in a forked child
    ├── CudaError           the CUDA driver refused a call
    ├── StepError           the rows of one step were not delivered; its output is NaN
    └── ConnectionLostError the worker is gone, silent or was never there; every step in flight has failed
        └── ProtocolError   a peer sent something that is no message, or broke the order of messages

Messages name the place, what was expected, what was found, and what to do about it.
"""

from __future__ import annotations


class PleOffloadError(Exception):
    """Base class: catch this to catch everything the package raises on purpose."""


class UsageError(PleOffloadError, ValueError):
    """An argument or option that cannot be meant; nothing was changed."""


class TokenIdError(UsageError):
    """A token id outside the vocabulary, or a row number outside the table; no row was delivered."""


class CheckpointError(PleOffloadError):
    """The checkpoint is damaged, incomplete, or holds something that is not understood."""


class MemoryLimitError(PleOffloadError):
    """The table does not fit the memory this process may use; nothing was allocated."""


class StoreError(PleOffloadError):
    """An open table cannot deliver its rows any more (its file was cut, its memory is gone, it was closed)."""


class ForkError(PleOffloadError):
    """A table or connector was used in a child of the process that made it; make another in the child."""


class CudaError(PleOffloadError):
    """The CUDA driver refused a call; the message names the call, its reason and the remedy."""


class StepError(PleOffloadError):
    """The rows of one step were not delivered: its output is NaN and its tokens must not be used."""


class ConnectionLostError(PleOffloadError):
    """The worker is gone, silent or was never there; every step in flight has failed and its output is NaN."""


class ProtocolError(ConnectionLostError):
    """A peer sent something that is no message, or broke the order of messages; it was cut off."""
