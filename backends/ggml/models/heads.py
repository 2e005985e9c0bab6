"""Attention heads: how many, how wide, and how much of them RoPE turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backends.base import KVHeads
from backends.ggml.models.families import Family
from backends.ggml.models.metadata import Metadata, ModelError

Q8_BLOCK = 32  # dimensions; heads of both kinds must allow the same formats of the KV cache


class Heads(NamedTuple):
    """`kv` and `n_rot` are of layers that attend everything, `windowed` and `window_rot` of the others; None
    where they are the same."""

    n_embd: int
    n_head: int
    kv: KVHeads
    n_rot: int
    windowed: KVHeads | None
    window_rot: int


def read_heads(meta: Metadata, family: Family, windows: Sequence[int | None]) -> Heads:
    """From metadata. Raises ModelError."""
    n_embd, n_head = meta.size("embedding_length", 1, 1 << 20), meta.size("attention.head_count", 1, 4096)
    keys = "attention.key_length", "attention.value_length"
    counts = _kv_counts(meta, family, windows, n_head)
    kv = KVHeads(counts[0], *(meta.size(key, 1, 4096, n_embd // n_head) for key in keys))
    n_rot = meta.size("rope.dimension_count", 2, kv.dim_k, kv.dim_k)
    windowed, window_rot = None, n_rot
    if family.window_heads:
        dims = [meta.size(f"{key}_swa", 1, 4096, size) for key, size in zip(keys, kv[1:], strict=True)]
        windowed = KVHeads(counts[1], *dims)
        window_rot = meta.size("rope.dimension_count_swa", 2, windowed.dim_k, min(n_rot, windowed.dim_k))
    for heads, turned in ((kv, n_rot), (windowed or kv, window_rot)):
        if n_head % heads.n or turned % 2:
            raise ModelError(
                f"{meta.file}: {n_head} heads over {heads.n} KV heads, {turned} rotated dimensions"
            )
    if windowed is not None and any(
        (a % Q8_BLOCK == 0) != (b % Q8_BLOCK == 0) for a, b in zip(kv[1:], windowed[1:], strict=True)
    ):
        raise ModelError(f"{meta.file}: {meta.prefix}.attention.key_length_swa: no multiple of {Q8_BLOCK}")
    return Heads(n_embd, n_head, kv, n_rot, windowed, window_rot)


def _kv_counts(meta: Metadata, family: Family, windows: Sequence[int | None], n_head: int) -> tuple[int, int]:
    """KV heads of layers that attend everything, and of those with a window: all of a kind have as many."""
    key = "attention.head_count_kv"
    value = meta.get(key)
    if not family.window_heads or not isinstance(value, list):
        count = meta.size(key, 1, 4096, n_head)
        return count, count
    if len(value) < len(windows) or not all(type(n) is int and 1 <= n <= 4096 for n in value):
        raise meta.error(key, value, f"{len(windows)} integers between 1 and 4096")
    kinds = [
        {n for n, w in zip(value, windows, strict=False) if (w is None) == full} for full in (True, False)
    ]
    if any(len(kind) > 1 for kind in kinds):
        raise meta.error(key, value, "one number for all layers with a window, and one for the others")
    full, windowed = (kind.pop() if kind else None for kind in kinds)
    return full or windowed or n_head, windowed or full or n_head


__all__ = ["Heads", "read_heads"]
