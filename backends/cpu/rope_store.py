"""What happens between the q/k/v projections and attention, in one pass over each token.

Per head of the query: RMS norm (families with norms of heads), RoPE, scale. Per head of the key: RMS norm,
RoPE, then into the key pool; the value goes into the value pool as it is, or normed too in families with
norms of values (layouts in kv_codes.py).
All tokens of a step are stored before the attention operator starts, because that operator's input
is this one's output.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.simd import F32, Emitter, Value, call_address, ir, kernel
from backends.cpu.words import fill_zero, load_i32, load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

# words of the operator's parameters; floats are stored as the bits of a float32, P_KEY_BYTES and
# P_VALUE_BYTES are kv_codes.part_bytes, P_STORE_… the addresses of kv_store.compiled_store's functions
(
    P_HEADER,
    P_GROUP,
    P_ROPE_WORD,
    P_HEADS,
    P_KV_HEADS,
    P_DIM_K,
    P_DIM_V,
    P_ROTATED,
    P_NEOX,
    P_SCALE,
    P_EPS,
    P_QUERY_NORM,
    P_KEY_NORM,
    P_KEY_POOL,
    P_VALUE_POOL,
    P_FUSED,
    P_KEY_BYTES,
    P_VALUE_BYTES,
    P_STORE_KEY,
    P_STORE_VALUE,
    P_VALUE_NORM,
) = range(21)
NUM_PARAMS = 21
_F64 = ir.DoubleType()


@kernel
def copy_f32(x: Emitter, target: Value, source: Value, count: Value) -> None:
    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 4)
        x.store(x.load(source, at, F32, 4), target, at, 4)
        return []

    x.loop_maybe(count, [], body)


@kernel
def rms_norm_head(x: Emitter, target: Value, source: Value, weight: Value, dim: Value, eps: Value) -> None:
    """target = source / sqrt(mean(source^2) + eps) * weight over `dim` values. eps: address of a float."""
    b = x.b

    def square(i: Value, carried: list[Value]) -> list[Value]:
        v = x.load(source, x.mul(i, 4), F32, 4)
        wide = b.fpext(v, _F64)
        return [b.fadd(carried[0], b.fmul(wide, wide))]

    (total,) = x.loop(dim, [ir.Constant(_F64, 0.0)], square)
    mean = b.fptrunc(b.fdiv(total, b.sitofp(dim, _F64)), F32)
    root = x.call("llvm.sqrt.f32", F32, b.fadd(mean, x.load(eps, 0, F32, 4)))
    factor = b.fdiv(x.f32(1.0), root)

    def scale(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 4)
        v = b.fmul(x.load(source, at, F32, 4), factor)
        x.store(b.fmul(v, x.load(weight, at, F32, 4)), target, at, 4)
        return []

    x.loop(dim, [], scale)


@kernel
def rotate(x: Emitter, head: Value, table: Value, pairs: Value, step: Value, reach: Value) -> None:
    """Rotate `pairs` pairs in place: pair i is (head[step * i], head[step * i + reach]), in floats."""

    def body(i: Value, _: list[Value]) -> list[Value]:
        first = x.mul(i, x.mul(step, 4))
        second = x.add(first, x.mul(reach, 4))
        turn = x.mul(i, 8)
        cosine, sine = x.load(table, turn, F32, 4), x.load(table, x.add(turn, 4), F32, 4)
        a, c = x.load(head, first, F32, 4), x.load(head, second, F32, 4)
        x.store(x.b.fsub(x.fmul(a, cosine), x.fmul(c, sine)), head, first, 4)
        x.store(x.fadd(x.fmul(a, sine), x.fmul(c, cosine)), head, second, 4)
        return []

    x.loop_maybe(pairs, [], body)


@kernel
def scale_head(x: Emitter, head: Value, dim: Value, scale: Value) -> None:
    factor = x.load(scale, 0, F32, 4)

    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 4)
        x.store(x.fmul(x.load(head, at, F32, 4), factor), head, at, 4)
        return []

    x.loop(dim, [], body)


@njit(nogil=True, cache=True)
def prepare_head(target, source, dim, norm, eps, table, rotated, neox):
    """Norm (if `norm` is an address) and rotate one head from source to target."""
    if norm != 0:
        rms_norm_head((target, source, norm, dim, eps))
    elif target != source:
        copy_f32((target, source, dim))
    if neox != 0:
        rotate((target, table, rotated // 2, np.int64(1), rotated // 2))
    else:
        rotate((target, table, rotated // 2, np.int64(2), np.int64(1)))


@njit(nogil=True, cache=True)
def store_token(params, header, token, query, key, value, out, scratch):
    """query, key, value: addresses of the token's rows."""
    heads, kv_heads = load_i64((params + 8 * P_HEADS,)), load_i64((params + 8 * P_KV_HEADS,))
    dim_k, dim_v = load_i64((params + 8 * P_DIM_K,)), load_i64((params + 8 * P_DIM_V,))
    rotated, neox = load_i64((params + 8 * P_ROTATED,)), load_i64((params + 8 * P_NEOX,))
    eps, scale = params + 8 * P_EPS, params + 8 * P_SCALE
    table = load_i64((header + 8 * load_i64((params + 8 * P_ROPE_WORD,)),)) + 4 * token * rotated
    query_norm, key_norm = load_i64((params + 8 * P_QUERY_NORM,)), load_i64((params + 8 * P_KEY_NORM,))
    growth, value_norm = load_i64((header + 8 * S.GROWTH,)), load_i64((params + 8 * P_VALUE_NORM,))
    for h in range(heads):
        at = 4 * dim_k * (token * heads + h)
        prepare_head(out + at, query + 4 * dim_k * h, dim_k, query_norm, eps, table, rotated, neox)
        scale_head((out + at, dim_k, scale))
        if growth != 0:
            scale_head((out + at, dim_k, growth + 4 * token))
    group = header + 8 * (S.GROUPS + S.WORDS_PER_GROUP * load_i64((params + 8 * P_GROUP,)))
    slot = load_i32((load_i64((group,)) + 4 * token,))
    block, lane = slot // S.BLOCK_SIZE, slot % S.BLOCK_SIZE
    key_part, key_bytes = load_i64((params + 8 * P_KEY_POOL,)), load_i64((params + 8 * P_KEY_BYTES,))
    value_part, value_bytes = load_i64((params + 8 * P_VALUE_POOL,)), load_i64((params + 8 * P_VALUE_BYTES,))
    store_key, store_value = load_i64((params + 8 * P_STORE_KEY,)), load_i64((params + 8 * P_STORE_VALUE,))
    key_part += block * kv_heads * key_bytes
    value_part += block * kv_heads * value_bytes
    for h in range(kv_heads):
        prepare_head(scratch, key + 4 * dim_k * h, dim_k, key_norm, eps, table, rotated, neox)
        call_address(store_key, (key_part + h * key_bytes, lane, scratch, dim_k // 16))
        source = value + 4 * dim_v * h
        if value_norm != 0:
            rms_norm_head((scratch, source, value_norm, dim_v, eps))
            source = scratch
        call_address(store_value, (value_part + h * value_bytes, lane, source, dim_v // 16))


@njit(nogil=True, cache=True)
def store_share(params, query, key, value, out, padded_rows, ith, nth):
    """One thread's tokens: a contiguous share. If fused, `query` holds rows of q | k | v."""
    header = load_i64((params + 8 * P_HEADER,))
    tokens = load_i64((header + 8 * S.TOKENS,))
    scratch = load_i64((header + 8 * S.SCRATCH,)) + ith * load_i64((header + 8 * S.SCRATCH_STRIDE,))
    kv_heads = load_i64((params + 8 * P_KV_HEADS,))
    query_row = 4 * load_i64((params + 8 * P_HEADS,)) * load_i64((params + 8 * P_DIM_K,))
    key_row = 4 * kv_heads * load_i64((params + 8 * P_DIM_K,))
    value_row = 4 * kv_heads * load_i64((params + 8 * P_DIM_V,))
    if load_i64((params + 8 * P_FUSED,)) != 0:
        key, value = query + query_row, query + query_row + key_row
        query_row = key_row = value_row = query_row + key_row + value_row
    for token in range(tokens * ith // nth, tokens * (ith + 1) // nth):
        store_token(
            params,
            header,
            token,
            query + token * query_row,
            key + token * key_row,
            value + token * value_row,
            out,
            scratch,
        )
    if ith == nth - 1:
        width = load_i64((params + 8 * P_HEADS,)) * load_i64((params + 8 * P_DIM_K,))
        fill_zero((out + 4 * tokens * width, (padded_rows - tokens) * width // 16))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def rope_store_operator(tensor, ith, nth, params):
    """ggml custom operator: q, k, v [dim * heads, T], or all in one tensor; out = queries for attention."""
    source = tensor + 8 * WORD_SRC
    query = load_i64((load_i64((source,)) + 8 * WORD_DATA,))
    key = value = query
    if load_i64((params + 8 * P_FUSED,)) == 0:
        key = load_i64((load_i64((source + 8,)) + 8 * WORD_DATA,))
        value = load_i64((load_i64((source + 16,)) + 8 * WORD_DATA,))
    rows = load_i64((tensor + 8 * 3,))  # ne[1]
    store_share(
        params, query, key, value, load_i64((tensor + 8 * WORD_DATA,)), rows, np.int64(ith), np.int64(nth)
    )


__all__ = ["NUM_PARAMS", "rope_store_operator"]
