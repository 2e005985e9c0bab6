"""Quantized matrix multiplication on the CPU: y[token][m] = W[m][k] . x[token][k].

Weights are repacked once (`pack`), a layer's input is quantized once (`quantize_activations`) for all
matrices of one `activation_kind` that read it, and `compiled_matmul(type_id)` gives the function that
multiplies. All work on addresses and take (ith, nth), so that the threads of a ggml graph share the work. The
result for a token has the same bits whatever else is in the batch and however the work is split.
"""

from __future__ import annotations

from backends.cpu.features import cpu_level
from backends.cpu.matmul.activations import activation_nbytes, quantize_activations
from backends.cpu.matmul.drive import SCRATCH_BYTES, compiled_matmul
from backends.cpu.matmul.layout import FORMATS, packed_nbytes
from backends.cpu.matmul.pack import pack_panels

__all__ = [
    "FORMATS",
    "SCRATCH_BYTES",
    "activation_kind",
    "activation_nbytes",
    "compiled_matmul",
    "pack",
    "packed_nbytes",
    "quantize_activations",
    "supported",
]


def supported(type_id: int, m: int, k: int) -> bool:
    """Whether this CPU multiplies m x k matrices of a ggml type with our kernels."""
    fmt = FORMATS.get(type_id)
    whole = fmt is not None and m > 0 and k > 0 and k % fmt.elements == 0
    return whole and cpu_level() in ("avx512_vnni", "avx_vnni", "avx2")


def activation_kind(type_id: int) -> int:
    """Which quantized activations a weight format multiplies; matrices of one kind share a buffer."""
    return FORMATS[type_id].activation_kind


def pack(type_id: int, source: int, m: int, k: int, out: int, ith: int = 0, nth: int = 1) -> None:
    """Repack the GGUF rows at address `source` to `packed_nbytes(type_id, m, k)` bytes at `out` (64-aligned).

    Runs without the GIL. Threads may share the work: each calls with its `ith` of `nth`.
    """
    fmt = FORMATS[type_id]
    pack_panels(type_id, fmt.raw_bytes, fmt.packed_bytes, k // fmt.elements, source, m, out, ith, nth)
