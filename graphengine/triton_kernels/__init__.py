"""Triton kernels of the CUDA path, each with its launcher; triton is optional and imported here."""
