"""The inner loops of attention: scores of keys, the running softmax, sums of values.

A chunk is CHUNK tokens, some whole blocks. Addresses of blocks, queries and outputs stand in int64 arrays.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.simd import F32, I32, I64, Emitter, Value, kernel, kernel_family
from backends.cpu.vecmath import exp

CHUNK = S.CHUNK_BLOCKS * S.BLOCK_SIZE  # tokens
SCORE_ROW_BYTES = 4 * CHUNK
FETCHING_ROWS = 4  # up to so many rows; with more, loads take the time, and keys are read for many queries


@kernel_family
def scores(
    x: Emitter, rows: int, blocks: int, query_at: Value, keys: Value, ahead: Value, out: Value, dim: Value
) -> None:
    """out[row][16 * block + t] = sum over d of query[row][d] * key[block][d][t].

    Meanwhile the keys at `ahead`, as many addresses, are fetched.
    """
    queries = [x.load(query_at, 8 * r, I64, 8) for r in range(rows)]
    key = [x.load(keys, 8 * b, I64, 8) for b in range(blocks)]
    fetched = [x.load(ahead, 8 * b, I64, 8) for b in range(blocks)]

    def body(d: Value, sums: list[Value]) -> list[Value]:
        at_key, at_query = x.mul(d, 2 * S.BLOCK_SIZE), x.mul(d, 4)
        k = [x.load_f16(address, at_key) for address in key]
        q = [x.broadcast_f32(address, at_query) for address in queries]
        if rows <= FETCHING_ROWS:
            for address in fetched:
                x.prefetch(address, at_key, 3)
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
    ahead: Value,
    out_at: Value,
    offset: Value,
    tokens: Value,
    row_bytes: Value,
) -> None:
    """out[row][offset ..] += sum over t of weights[row][t] * value[t][offset ..], `vectors` x 16 wide.

    Meanwhile the values of the blocks at `ahead` are fetched.
    Stops at the last token: what lies behind it in the block was never written, or by another
    request, and 0 times a NaN would be a NaN.
    """
    outs = [x.add(x.load(out_at, 8 * r, I64, 8), offset) for r in range(rows)]
    half_offset = x.b.lshr(offset, x.const(1))
    sums = [x.load(outs[r], 64 * j) for r in range(rows) for j in range(vectors)]

    def block(index: Value, carried: list[Value]) -> list[Value]:
        base = x.add(x.load(values, x.mul(index, 8), I64, 8), half_offset)
        fetched = x.add(x.load(ahead, x.mul(index, 8), I64, 8), half_offset)
        weight_base = x.add(weights, x.mul(index, 64))

        def token(t: Value, sums: list[Value]) -> list[Value]:
            row = x.add(base, x.mul(t, row_bytes))
            v = [x.load_f16(row, 32 * j) for j in range(vectors)]
            at = x.mul(t, 4)
            for j in range(0, vectors, 2):
                x.prefetch(fetched, x.add(x.mul(t, row_bytes), 32 * j), 3)
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
def score_rows(query_at, keys, ahead, out, dim, rows, blocks):
    """Scores of `rows` rows against `blocks` blocks, by microkernels of falling height."""
    r = 0
    while r < rows:
        left = rows - r
        q, o = query_at + 8 * r, out + SCORE_ROW_BYTES * r
        if left >= 8:
            for b in range(blocks):
                scores(8, 1, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
            r += 8
        elif left >= 4:
            b = 0
            while b + 2 <= blocks:
                scores(4, 2, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                b += 2
            if b < blocks:
                scores(4, 1, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
            r += 4
        elif left == 3:
            if blocks == 4:
                scores(3, 4, (q, keys, ahead, o, dim))
            else:
                for b in range(blocks):
                    scores(3, 1, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
            r += 3
        else:
            if blocks == 4:
                if left == 2:
                    scores(2, 4, (q, keys, ahead, o, dim))
                else:
                    scores(1, 4, (q, keys, ahead, o, dim))
            else:
                for b in range(blocks):
                    if left == 2:
                        scores(2, 1, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                    else:
                        scores(1, 1, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
            r += left


@njit(nogil=True, cache=True)
def value_rows(weights, values, ahead, out_at, dim, rows, tokens):
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
                    weighted_values(4, 4, (w, values, ahead, o, offset, tokens, row_bytes))
                else:
                    weighted_values(4, 1, (w, values, ahead, o, offset, tokens, row_bytes))
            elif left == 3:
                if wide:
                    weighted_values(3, 4, (w, values, ahead, o, offset, tokens, row_bytes))
                else:
                    weighted_values(3, 1, (w, values, ahead, o, offset, tokens, row_bytes))
            elif left == 2:
                if wide:
                    weighted_values(2, 4, (w, values, ahead, o, offset, tokens, row_bytes))
                else:
                    weighted_values(2, 1, (w, values, ahead, o, offset, tokens, row_bytes))
            elif wide:
                weighted_values(1, 4, (w, values, ahead, o, offset, tokens, row_bytes))
            else:
                weighted_values(1, 1, (w, values, ahead, o, offset, tokens, row_bytes))
            offset += 256 if wide else 64
        r += min(left, 4)


__all__ = [
    "CHUNK",
    "SCORE_ROW_BYTES",
    "divide_by_sum",
    "reset_state",
    "score_rows",
    "softmax_update",
    "value_rows",
]
