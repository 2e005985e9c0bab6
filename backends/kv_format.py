"""The formats in which keys and values are kept: how many bytes a token takes.

f16    2 bytes a value
fp8    E4M3, 1 byte a value, and a scale of 2 bytes per token and KV head
q8_0   blocks of 32 values: 1 byte each, and a scale of 2 bytes (ggml's format)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.base import ModelSizes

KV_TYPES = ("f16", "fp8", "q8_0")
Q8_BLOCK = 32  # values
SCALE_BYTES = 2


def row_bytes(kv_type: str, dim: int) -> int:
    """Bytes of a token's key or value of `dim` values, of one KV head. ValueError where it has none."""
    if kv_type == "f16":
        return 2 * dim
    if kv_type == "fp8":
        return dim + SCALE_BYTES
    if kv_type != "q8_0":
        raise ValueError(f"{kv_type!r} is not one of {', '.join(KV_TYPES)}")
    if dim % Q8_BLOCK:
        raise ValueError(f"q8_0 needs heads of a multiple of {Q8_BLOCK} values, not {dim}")
    return dim // Q8_BLOCK * (Q8_BLOCK + SCALE_BYTES)


def kept_as(kv_type: str, dim: int, own_kernels: bool) -> str:
    """The format that a device really keeps heads of `dim` values in, asked for `kv_type`.

    ggml's operators know no fp8: a device without kernels of our own keeps q8_0 in its place, or f16 where
    the heads are no multiple of q8_0's blocks.
    """
    if kv_type != "fp8" or own_kernels:
        return kv_type
    return "f16" if dim % Q8_BLOCK else "q8_0"


def kv_homes(config: ModelSizes, layers: Iterable[int]) -> dict[int, int]:
    """By each of a stage's layers, the one of them that has the pools of its keys and values.

    That is the first which attends those. Where layers that share them are apart from the one that makes
    them, as when a few are timed by themselves, nobody writes there.
    """
    first: dict[int, int] = {}
    return {layer: first.setdefault(config.kv_layer(layer), layer) for layer in sorted(layers)}


__all__ = ["KV_TYPES", "Q8_BLOCK", "SCALE_BYTES", "kept_as", "kv_homes", "row_bytes"]
