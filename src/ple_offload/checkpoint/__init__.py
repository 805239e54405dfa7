"""Tensors in safetensors files: where their bytes are, and how to read them. Knows nothing of tables."""
