"""Between processes: messages over a unix socket, shared memory with a fixed layout, and flags in it.

docs/PROTOCOL.md is the specification; these files are one implementation of it.
"""
