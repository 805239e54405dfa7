"""Host memory: how much there is, mappings with huge pages, sealed memory that can be shared."""
