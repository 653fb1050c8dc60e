"""Paged KV cache: who holds which block, which prefix is findable, and where the rows live."""
