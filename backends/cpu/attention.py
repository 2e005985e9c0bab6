"""Paged attention on the CPU: one kernel for decode and for prefill chunks.

Keys are stored so that a vector holds 16 tokens, values so that it holds 16 dimensions:

    key pool    [block][kv head][dimension][16 tokens]   half
    value pool  [block][kv head][16 tokens][dimension]   half

An item is up to `QUERY_ROWS` rows (a few query tokens, times the query heads that share a KV head);
each block is read once per item. Threads take items from a shared counter.

Batch invariance: a row's arithmetic depends on its own position only. Scores are summed over the
dimension in ascending order, the running softmax (Milakov and Gimelshein, arXiv 1805.02867) is
updated at chunks of 64 tokens that start at multiples of 64, values are added in token order. How
many rows or blocks a microkernel treats at a time changes which registers are used, not the bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.simd import F32, I32, I64, Emitter, Value, kernel, kernel_family
from backends.cpu.vecmath import exp
from backends.cpu.words import fill_zero, load_i32, load_i64, store_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

CHUNK = S.CHUNK_BLOCKS * S.BLOCK_SIZE  # tokens
SCORE_ROW_BYTES = 4 * CHUNK
ROW_TILE = 8  # rows of the largest score microkernel
VALUE_ROWS = 4  # rows of the largest value microkernel

# scratch of one thread: scores, then int64 arrays of QUERY_ROWS or CHUNK_BLOCKS entries
_SCORES = 0
_QUERY_AT = _SCORES + S.QUERY_ROWS * SCORE_ROW_BYTES
_OUT_AT = _QUERY_AT + 8 * S.QUERY_ROWS
_STATE = _OUT_AT + 8 * S.QUERY_ROWS  # float32 pairs: running maximum, running sum
_KEYS = _STATE + 8 * S.QUERY_ROWS
_VALUES = _KEYS + 8 * S.CHUNK_BLOCKS
SCRATCH_BYTES = -(-(_VALUES + 8 * S.CHUNK_BLOCKS) // 64) * 64

# words of an attention operator's parameters
(P_HEADER, P_GROUP, P_HEADS, P_KV_HEADS, P_DIM_K, P_DIM_V, P_WINDOW, P_KEY_POOL, P_VALUE_POOL, P_COUNTER) = (
    range(10)
)
NUM_PARAMS = 10


@intrinsic
def fetch_add(typing_context, address, amount):
    """Atomically add to the int64 at an address and return what was there."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


@kernel_family
def scores(x: Emitter, rows: int, blocks: int, query_at: Value, keys: Value, out: Value, dim: Value) -> None:
    """out[row][16 * block + t] = sum over d of query[row][d] * key[block][d][t]."""
    queries = [x.load(query_at, 8 * r, I64, 8) for r in range(rows)]
    key = [x.load(keys, 8 * b, I64, 8) for b in range(blocks)]

    def body(d: Value, sums: list[Value]) -> list[Value]:
        at_key, at_query = x.mul(d, 2 * S.BLOCK_SIZE), x.mul(d, 4)
        k = [x.load_f16(address, at_key) for address in key]
        q = [x.broadcast_f32(address, at_query) for address in queries]
        return [x.fma(q[r], k[b], sums[r * blocks + b]) for r in range(rows) for b in range(blocks)]

    sums = x.loop(dim, [x.splat_f32(0.0)] * (rows * blocks), body)
    for r in range(rows):
        for b in range(blocks):
            x.store(sums[r * blocks + b], out, SCORE_ROW_BYTES * r + 64 * b)


@kernel
def softmax_update(
    x: Emitter, row: Value, first: Value, last: Value, state: Value, out: Value, out_vectors: Value
) -> None:
    """Turn a row's scores of one chunk into weights, and rescale what the row has summed so far.

    Only tokens [first, last) of the chunk count, at least one; the others get weight 0.
    """
    b = x.b
    low, high = (x.splat(b.trunc(v, I32)) for v in (first, last))
    minus_infinity = x.splat_f32(float("-inf"))
    masked = []
    for i in range(S.CHUNK_BLOCKS):
        lanes = ir.Constant(low.type, [16 * i + lane for lane in range(16)])
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        masked.append(b.select(inside, x.load(row, 64 * i), minus_infinity))
    top = x.reduce_max(x.fmax(x.fmax(masked[0], masked[1]), x.fmax(masked[2], masked[3])))
    old = x.load(state, 0, F32, 4)
    new = x.fmax(old, top)
    weights = [exp(x, x.fsub(v, x.splat(new))) for v in masked]
    for i, weight in enumerate(weights):
        x.store(weight, row, 64 * i)
    shrink = exp(x, x.splat(b.fsub(old, new)))
    total = x.reduce_add(x.fadd(x.fadd(weights[0], weights[1]), x.fadd(weights[2], weights[3])))
    factor = b.extract_element(shrink, x.const(0, I32))
    x.store(new, state, 0, 4)
    x.store(x.fma(x.load(state, 4, F32, 4), factor, total), state, 4, 4)

    def rescale(_: Value, carried: list[Value]) -> list[Value]:
        x.store(x.fmul(x.load(carried[0]), shrink), carried[0])
        return [x.add(carried[0], 64)]

    x.loop(out_vectors, [out], rescale)


@kernel_family
def weighted_values(
    x: Emitter,
    rows: int,
    vectors: int,
    weights: Value,
    values: Value,
    out_at: Value,
    offset: Value,
    tokens: Value,
    row_bytes: Value,
) -> None:
    """out[row][offset ..] += sum over t of weights[row][t] * value[t][offset ..], `vectors` x 16 wide.

    Stops at the last token: what lies behind it in the block was never written, or by another
    request, and 0 times a NaN would be a NaN.
    """
    outs = [x.add(x.load(out_at, 8 * r, I64, 8), offset) for r in range(rows)]
    half_offset = x.b.lshr(offset, x.const(1))
    sums = [x.load(outs[r], 64 * j) for r in range(rows) for j in range(vectors)]

    def block(index: Value, carried: list[Value]) -> list[Value]:
        base = x.add(x.load(values, x.mul(index, 8), I64, 8), half_offset)
        weight_base = x.add(weights, x.mul(index, 64))

        def token(t: Value, sums: list[Value]) -> list[Value]:
            row = x.add(base, x.mul(t, row_bytes))
            v = [x.load_f16(row, 32 * j) for j in range(vectors)]
            at = x.mul(t, 4)
            w = [x.broadcast_f32(weight_base, x.add(at, SCORE_ROW_BYTES * r)) for r in range(rows)]
            return [x.fma(w[r], v[j], sums[r * vectors + j]) for r in range(rows) for j in range(vectors)]

        left = x.b.sub(tokens, x.mul(index, S.BLOCK_SIZE))
        full = x.const(S.BLOCK_SIZE)
        return x.loop(x.b.select(x.b.icmp_signed("<", left, full), left, full), carried, token)

    blocks = x.b.ashr(x.add(tokens, S.BLOCK_SIZE - 1), x.const(S.BLOCK_SIZE.bit_length() - 1))
    sums = x.loop(blocks, sums, block)
    for r in range(rows):
        for j in range(vectors):
            x.store(sums[r * vectors + j], outs[r], 64 * j)


@kernel
def reset_state(x: Emitter, state: Value) -> None:
    x.store(x.f32(float("-inf")), state, 0, 4)
    x.store(x.f32(0.0), state, 4, 4)


@kernel
def divide_by_sum(x: Emitter, out: Value, state: Value, vectors: Value) -> None:
    total = x.broadcast_f32(state, 4)

    def body(_: Value, carried: list[Value]) -> list[Value]:
        x.store(x.b.fdiv(x.load(carried[0]), total), carried[0])
        return [x.add(carried[0], 64)]

    x.loop(vectors, [out], body)


@njit(nogil=True, cache=True)
def score_rows(query_at, keys, out, dim, rows, blocks):
    """Scores of `rows` rows against `blocks` blocks, by microkernels of falling height."""
    r = 0
    while r < rows:
        left = rows - r
        q, o = query_at + 8 * r, out + SCORE_ROW_BYTES * r
        if left >= 8:
            for b in range(blocks):
                scores(8, 1, (q, keys + 8 * b, o + 64 * b, dim))
            r += 8
        elif left >= 4:
            b = 0
            while b + 2 <= blocks:
                scores(4, 2, (q, keys + 8 * b, o + 64 * b, dim))
                b += 2
            if b < blocks:
                scores(4, 1, (q, keys + 8 * b, o + 64 * b, dim))
            r += 4
        elif left == 3:
            if blocks == 4:
                scores(3, 4, (q, keys, o, dim))
            else:
                for b in range(blocks):
                    scores(3, 1, (q, keys + 8 * b, o + 64 * b, dim))
            r += 3
        else:
            if blocks == 4:
                if left == 2:
                    scores(2, 4, (q, keys, o, dim))
                else:
                    scores(1, 4, (q, keys, o, dim))
            else:
                for b in range(blocks):
                    if left == 2:
                        scores(2, 1, (q, keys + 8 * b, o + 64 * b, dim))
                    else:
                        scores(1, 1, (q, keys + 8 * b, o + 64 * b, dim))
            r += left


@njit(nogil=True, cache=True)
def value_rows(weights, values, out_at, dim, rows, tokens):
    """Add the weighted values of `tokens` tokens to `rows` rows."""
    row_bytes = 2 * dim
    r = 0
    while r < rows:
        left = rows - r
        w, o = weights + SCORE_ROW_BYTES * r, out_at + 8 * r
        offset = np.int64(0)
        while offset < 4 * dim:
            wide = 4 * dim - offset >= 256
            if left >= 4:
                if wide:
                    weighted_values(4, 4, (w, values, o, offset, tokens, row_bytes))
                else:
                    weighted_values(4, 1, (w, values, o, offset, tokens, row_bytes))
            elif left == 3:
                if wide:
                    weighted_values(3, 4, (w, values, o, offset, tokens, row_bytes))
                else:
                    weighted_values(3, 1, (w, values, o, offset, tokens, row_bytes))
            elif left == 2:
                if wide:
                    weighted_values(2, 4, (w, values, o, offset, tokens, row_bytes))
                else:
                    weighted_values(2, 1, (w, values, o, offset, tokens, row_bytes))
            elif wide:
                weighted_values(1, 4, (w, values, o, offset, tokens, row_bytes))
            else:
                weighted_values(1, 1, (w, values, o, offset, tokens, row_bytes))
            offset += 256 if wide else 64
        r += min(left, 4)


@njit(nogil=True, cache=True)
def attend_item(params, header, scratch, query, out, sequence, row0, count, kv_head):
    """Attention of the query tokens [row0, row0 + count) of one sequence, for one KV head."""
    heads, kv_heads = load_i64((params + 8 * P_HEADS,)), load_i64((params + 8 * P_KV_HEADS,))
    dim_k, dim_v = load_i64((params + 8 * P_DIM_K,)), load_i64((params + 8 * P_DIM_V,))
    window = load_i64((params + 8 * P_WINDOW,))
    key_pool, value_pool = load_i64((params + 8 * P_KEY_POOL,)), load_i64((params + 8 * P_VALUE_POOL,))
    group = header + 8 * (S.GROUPS + S.WORDS_PER_GROUP * load_i64((params + 8 * P_GROUP,)))
    table = load_i64((group + 8,)) + 4 * sequence * load_i64((group + 16,))
    positions = load_i64((header + 8 * S.POSITIONS,))
    share = heads // kv_heads
    rows = count * share
    query_at, out_at, states = scratch + _QUERY_AT, scratch + _OUT_AT, scratch + _STATE
    vectors = dim_v // 16
    for r in range(rows):
        head_row = (row0 + r // share) * heads + kv_head * share + r % share
        store_i64((query_at + 8 * r, query + 4 * head_row * dim_k))
        store_i64((out_at + 8 * r, out + 4 * head_row * dim_v))
        fill_zero((out + 4 * head_row * dim_v, vectors))
        reset_state((states + 8 * r,))
    first = load_i32((positions + 4 * row0,))  # a sequence's rows are at consecutive positions
    end = first + count
    begin = max(0, first - window + 1) if window > 0 else 0
    for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
        base = chunk * CHUNK
        # queries whose window reaches into this chunk: positions [base, base + CHUNK + window - 1)
        q0 = max(0, base - first)
        q1 = min(count, base + CHUNK + window - 1 - first) if window > 0 else count
        if q0 >= q1:
            continue
        tokens = min(CHUNK, first + q1 - base)
        blocks = (tokens + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
        for b in range(blocks):
            block = load_i32((table + 4 * (chunk * S.CHUNK_BLOCKS + b),)) * kv_heads + kv_head
            store_i64((scratch + _KEYS + 8 * b, key_pool + block * dim_k * 2 * S.BLOCK_SIZE))
            store_i64((scratch + _VALUES + 8 * b, value_pool + block * dim_v * 2 * S.BLOCK_SIZE))
        r0, n = q0 * share, (q1 - q0) * share
        rows_at = scratch + _SCORES + SCORE_ROW_BYTES * r0
        score_rows(query_at + 8 * r0, scratch + _KEYS, rows_at, dim_k, n, blocks)
        for r in range(r0, r0 + n):
            position = first + r // share
            low = max(0, position - window + 1 - base) if window > 0 else 0
            high = min(CHUNK, position + 1 - base)
            softmax_update(
                (
                    scratch + _SCORES + SCORE_ROW_BYTES * r,
                    low,
                    high,
                    states + 8 * r,
                    load_i64((out_at + 8 * r,)),
                    vectors,
                )
            )
        value_rows(rows_at, scratch + _VALUES, out_at + 8 * r0, dim_v, n, tokens)
    for r in range(rows):
        divide_by_sum((load_i64((out_at + 8 * r,)), states + 8 * r, vectors))


@njit(nogil=True, cache=True)
def attend_share(params, query, out, padded_rows, ith):
    """One thread's part: items from the shared counter until there are none left."""
    header = load_i64((params + 8 * P_HEADER,))
    scratch = load_i64((header + 8 * S.SCRATCH,)) + ith * load_i64((header + 8 * S.SCRATCH_STRIDE,))
    items = load_i64((header + 8 * S.ITEMS,))
    kv_heads = load_i64((params + 8 * P_KV_HEADS,))
    total = load_i64((header + 8 * S.NUM_ITEMS,)) * kv_heads
    counter = load_i64((params + 8 * P_COUNTER,))
    if ith == 0:  # padding rows must hold numbers, whatever they are
        width = load_i64((params + 8 * P_HEADS,)) * load_i64((params + 8 * P_DIM_V,))
        tokens = load_i64((header + 8 * S.TOKENS,))
        fill_zero((out + 4 * tokens * width, (padded_rows - tokens) * width // 16))
    while True:
        index = fetch_add(counter, 1)
        if index >= total:
            return
        item = items + 12 * (index // kv_heads)
        attend_item(
            params,
            header,
            scratch,
            query,
            out,
            load_i32((item,)),
            load_i32((item + 4,)),
            load_i32((item + 8,)),
            index % kv_heads,
        )


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def attention_operator(tensor, ith, nth, params):
    """ggml custom operator: out [dim_v * heads, T] from rotated, scaled queries [dim_k * heads, T]."""
    query = load_i64((load_i64((tensor + 8 * WORD_SRC,)) + 8 * WORD_DATA,))
    rows = load_i64((tensor + 8 * 3,))  # ne[1]
    attend_share(params, query, load_i64((tensor + 8 * WORD_DATA,)), rows, np.int64(ith))


__all__ = ["NUM_PARAMS", "SCRATCH_BYTES", "attention_operator"]
