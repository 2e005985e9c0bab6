"""Numba kernels that run inside ggml graphs on the CPU device."""
