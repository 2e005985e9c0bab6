"""Attention whose output is gated: the query matrix gives each head's query, then its gate.

rows of q        head 0: query | gate | head 1: query | gate | ...
take queries     these, keys and values  -> q | k | v, as rope_store takes them
gate heads       attended, rows of q     -> attended * sigmoid(gate)
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.linear import sigmoid
from backends.cpu.rope_store import copy_f32
from backends.cpu.simd import Emitter, Value, kernel
from backends.cpu.words import fill_zero, load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

# words of both operators' parameters; P_ROW_…: bytes of a row of each source
P_COUNT_AT, P_HEADS, P_DIM, P_KEYS, P_VALUES, P_ROW_Q, P_ROW_K, P_ROW_V, P_FUSED = range(9)
NUM_PARAMS = 9


@kernel
def gate_row(x: Emitter, out: Value, source: Value, gate: Value, vectors: Value) -> None:
    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        x.store(x.fmul(x.load(source, at), sigmoid(x, x.load(gate, at))), out, at)
        return []

    x.loop(vectors, [], body)


@njit(nogil=True, cache=True)
def source_of(tensor, index):
    """Address of a node's source."""
    return load_i64((load_i64((tensor + 8 * (WORD_SRC + index),)) + 8 * WORD_DATA,))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def take_queries_operator(tensor, ith, nth, params):
    """ggml custom operator: q with gates, k, v, or all side by side in one tensor -> q | k | v."""
    heads, dim = load_i64((params + 8 * P_HEADS,)), load_i64((params + 8 * P_DIM,))
    keys, values = load_i64((params + 8 * P_KEYS,)), load_i64((params + 8 * P_VALUES,))
    query = source_of(tensor, 0)
    key, value = query + 8 * heads * dim, query + 8 * heads * dim + 4 * keys
    if load_i64((params + 8 * P_FUSED,)) == 0:
        key, value = source_of(tensor, 1), source_of(tensor, 2)
    count, out = load_i64((load_i64((params + 8 * P_COUNT_AT,)),)), load_i64((tensor + 8 * WORD_DATA,))
    for row in range(count * ith // nth, count * (ith + 1) // nth):
        target = out + 4 * row * (heads * dim + keys + values)
        source = query + row * load_i64((params + 8 * P_ROW_Q,))
        for h in range(heads):
            copy_f32((target, source + 8 * dim * h, dim))
            target += 4 * dim
        copy_f32((target, key + row * load_i64((params + 8 * P_ROW_K,)), keys))
        copy_f32((target + 4 * keys, value + row * load_i64((params + 8 * P_ROW_V,)), values))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def gate_heads_operator(tensor, ith, nth, params):
    """ggml custom operator: attended [heads * dim, T], q with gates -> gated, zero in padding rows."""
    heads, dim = load_i64((params + 8 * P_HEADS,)), load_i64((params + 8 * P_DIM,))
    attended, query = source_of(tensor, 0), source_of(tensor, 1)
    count, out = load_i64((load_i64((params + 8 * P_COUNT_AT,)),)), load_i64((tensor + 8 * WORD_DATA,))
    for i in range(count * heads * ith // nth, count * heads * (ith + 1) // nth):
        gate = query + i // heads * load_i64((params + 8 * P_ROW_Q,)) + 4 * dim * (2 * (i % heads) + 1)
        at = 4 * dim * np.int64(i)
        gate_row((out + at, attended + at, gate, dim // 16))
    if ith == nth - 1:
        padding = load_i64((tensor + 8 * 3,)) - count  # ne[1]
        fill_zero((out + 4 * dim * heads * count, padding * heads * dim // 16))


__all__ = ["NUM_PARAMS", "gate_heads_operator", "take_queries_operator"]
