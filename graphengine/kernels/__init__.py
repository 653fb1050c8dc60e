"""The CPU kernels: C++ sources, their build, and the table of what they export.

Knows pointers and int64 only. Tensors, ops and recording belong to the callers.
"""
