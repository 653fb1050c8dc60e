"""The CPU kernels: C++ sources, their build, and the table of what they export.

The library knows pointers and int64 only; `ops.py` is where tensors meet it.
"""
