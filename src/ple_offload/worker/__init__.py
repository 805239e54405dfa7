"""The worker: one process owns a host's tables and serves every engine process on it."""
