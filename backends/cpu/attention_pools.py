"""The inner loops of attention that read the pools: scores of keys, sums of values, by format.

A chunk is CHUNK tokens, some whole blocks. Addresses of blocks (of their parts: kv_codes.py), queries and
outputs stand in int64 arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import cfunc

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.attention_kernels import SCORE_ROW_BYTES
from backends.cpu.kv_codes import F16, FP8, Q8_0, Q8_BLOCK, SCALE_ROW_BYTES, load_codes, load_scales
from backends.cpu.simd import I64, Emitter, Value, kernel_family

FETCHING_ROWS = 4  # up to so many rows; with more, loads take the time, and keys are read for many queries
LINE_DIMS = 4  # of a block's keys that a cache line holds where a code is a byte
VALUE_ROWS = 4  # rows to which a pass over values adds
SPARE_BYTES = 2 * VALUE_ROWS * SCORE_ROW_BYTES  # what `compiled_values` needs besides
_KIND = 16  # more than a variant's count

SCORES_SIGNATURE = "void(" + ", ".join(["int64"] * 7) + ")"
VALUES_SIGNATURE = "void(" + ", ".join(["int64"] * 8) + ")"


def variant(kind: int, count: int) -> int:
    """A format, and how many blocks or vectors a kernel treats at a time, as one number."""
    return _KIND * kind + count


def emit_scores(
    x: Emitter, rows: int, variant: int, query_at: Value, keys: Value, ahead: Value, out: Value, dim: Value
) -> None:
    """out[row][16 * block + t] = sum over d of query[row][d] * key[block][d][t].

    Meanwhile the keys at `ahead`, as many addresses, are fetched.
    """
    kind, blocks = divmod(variant, _KIND)
    queries = [x.load(query_at, 8 * r, I64, 8) for r in range(rows)]
    key = [x.load(keys, 8 * b, I64, 8) for b in range(blocks)]
    fetched = [x.load(ahead, 8 * b, I64, 8) for b in range(blocks)] if rows <= FETCHING_ROWS else []
    dot = _dot_codes if kind == Q8_0 else _dot
    sums = dot(x, kind, queries, key, fetched, dim)
    for r in range(rows):
        for b in range(blocks):
            x.store(sums[r * blocks + b], out, SCORE_ROW_BYTES * r + 64 * b)


def _dot(
    x: Emitter, kind: int, queries: list[Value], key: list[Value], fetched: list[Value], dim: Value
) -> list[Value]:
    """Of each query and each block, with one scale if any."""
    dims = 1 if kind == F16 else LINE_DIMS
    count = x.b.lshr(dim, x.const(dims.bit_length() - 1)) if dims > 1 else dim
    zeros = [x.splat_f32(0.0)] * (len(queries) * len(key))
    sums = x.loop(count, zeros, _add_products(x, kind, queries, key, fetched, x.const(0)))
    if kind == F16:
        return sums
    end = x.mul(dim, S.BLOCK_SIZE)
    for address in fetched:
        x.prefetch(address, end, 3)
    scales = [load_scales(x, kind, address, end) for address in key]
    return [x.fmul(v, scales[i % len(key)]) for i, v in enumerate(sums)]


def _dot_codes(
    x: Emitter, kind: int, queries: list[Value], key: list[Value], fetched: list[Value], dim: Value
) -> list[Value]:
    """The same with a scale for every Q8_BLOCK dimensions."""
    zeros = [x.splat_f32(0.0)] * (len(queries) * len(key))
    end = x.mul(dim, S.BLOCK_SIZE)

    def group(g: Value, totals: list[Value]) -> list[Value]:
        first = x.mul(g, Q8_BLOCK)
        body = _add_products(x, kind, queries, key, fetched, first)
        sums = x.loop(Q8_BLOCK // LINE_DIMS, zeros, body)
        at = x.add(end, x.mul(g, SCALE_ROW_BYTES))
        for address in fetched:
            x.prefetch(address, at, 3)
        scales = [load_scales(x, kind, address, at) for address in key]
        return [x.fma(v, scales[i % len(key)], totals[i]) for i, v in enumerate(sums)]

    return x.loop(x.b.lshr(dim, x.const(Q8_BLOCK.bit_length() - 1)), zeros, group)


def _add_products(
    x: Emitter, kind: int, queries: list[Value], key: list[Value], fetched: list[Value], first: Value
) -> Callable[[Value, list[Value]], list[Value]]:
    """The body of a loop over dimensions from `first`: one of halfs, LINE_DIMS of codes at a time."""
    dims, step = (1, 2 * S.BLOCK_SIZE) if kind == F16 else (LINE_DIMS, S.BLOCK_SIZE)

    def body(i: Value, sums: list[Value]) -> list[Value]:
        d = x.add(first, x.mul(i, dims))
        at_key, at_query = x.mul(d, step), x.mul(d, 4)
        for address in fetched:
            x.prefetch(address, at_key, 3)
        for j in range(dims):
            k = [load_codes(x, kind, address, x.add(at_key, step * j)) for address in key]
            q = [x.broadcast_f32(address, x.add(at_query, 4 * j)) for address in queries]
            sums = [x.fma(q[i // len(k)], k[i % len(k)], v) for i, v in enumerate(sums)]
        return sums

    return body


@kernel_family
def scale_weights(
    x: Emitter,
    kind: int,
    variant: int,
    weights: Value,
    rows: Value,
    values: Value,
    ahead: Value,
    at: Value,
    out: Value,
) -> None:
    """out[row][t] = weights[row][t] * scale[t], of the scales that stand `at` bytes into each block's part.

    Meanwhile those at `ahead` are fetched. `variant` is unused.
    """
    scales = [load_scales(x, kind, x.load(values, 8 * b, I64, 8), at) for b in range(S.CHUNK_BLOCKS)]
    for b in range(S.CHUNK_BLOCKS):
        x.prefetch(x.load(ahead, 8 * b, I64, 8), at, 3)

    def row(r: Value, _: list[Value]) -> list[Value]:
        start = x.mul(r, SCORE_ROW_BYTES)
        for b, scale in enumerate(scales):
            place = x.add(start, 64 * b)
            x.store(x.fmul(x.load(weights, place), scale), out, place)
        return []

    x.loop(rows, [], row)


def emit_weighted_values(
    x: Emitter,
    rows: int,
    variant: int,
    weights: Value,
    values: Value,
    ahead: Value,
    out_at: Value,
    offset: Value,
    tokens: Value,
    row_bytes: Value,
) -> None:
    """out[row][offset ..] += sum over t of weights[row][t] * value[t][offset ..], `vectors` x 16 wide.

    Weights of q8_0 are VALUE_ROWS rows for the first 32 dimensions, then as many for the next.
    Meanwhile the values of the blocks at `ahead` are fetched.
    Stops at the last token: what lies behind it in the block was never written, or by another
    request, and 0 times a NaN would be a NaN.
    """
    kind, vectors = divmod(variant, _KIND)
    code_bytes = 2 if kind == F16 else 1
    per_weight = Q8_BLOCK // 16 if kind == Q8_0 else vectors  # vectors
    outs = [x.add(x.load(out_at, 8 * r, I64, 8), offset) for r in range(rows)]
    code_offset = x.b.lshr(offset, x.const(1 if kind == F16 else 2))
    sums = [x.load(outs[r], 64 * j) for r in range(rows) for j in range(vectors)]

    def block(index: Value, carried: list[Value]) -> list[Value]:
        base = x.add(x.load(values, x.mul(index, 8), I64, 8), code_offset)
        fetched = x.add(x.load(ahead, x.mul(index, 8), I64, 8), code_offset)
        weight_base = x.add(weights, x.mul(index, 64))

        def token(t: Value, sums: list[Value]) -> list[Value]:
            row = x.add(base, x.mul(t, row_bytes))
            v = [load_codes(x, kind, row, 16 * code_bytes * j) for j in range(vectors)]
            at = x.mul(t, 4)
            for j in range(0, vectors, 4 // code_bytes):
                x.prefetch(fetched, x.add(x.mul(t, row_bytes), 16 * code_bytes * j), 3)
            w = [
                [
                    x.broadcast_f32(weight_base, x.add(at, SCORE_ROW_BYTES * (r + VALUE_ROWS * g)))
                    for g in range(-(-vectors // per_weight))
                ]
                for r in range(rows)
            ]
            return [
                x.fma(w[r][j // per_weight], v[j], sums[r * vectors + j])
                for r in range(rows)
                for j in range(vectors)
            ]

        left = x.b.sub(tokens, x.mul(index, S.BLOCK_SIZE))
        full = x.const(S.BLOCK_SIZE)
        return x.loop(x.b.select(x.b.icmp_signed("<", left, full), left, full), carried, token)

    blocks = x.b.ashr(x.add(tokens, S.BLOCK_SIZE - 1), x.const(S.BLOCK_SIZE.bit_length() - 1))
    sums = x.loop(blocks, sums, block)
    for r in range(rows):
        for j in range(vectors):
            x.store(sums[r * vectors + j], outs[r], 64 * j)


scores, weighted_values = kernel_family(emit_scores), kernel_family(emit_weighted_values)


@functools.cache
def compiled_scores(kind: int):
    """The cfunc for keys of a format; compiled, or loaded from the cache, on first use.

    Called as `score_rows(query_at, keys, ahead, out, dim, rows, blocks)`, all int64: scores of `rows` rows
    against `blocks` blocks, by microkernels of falling height.
    """
    one, two, four = (variant(kind, blocks) for blocks in (1, 2, 4))

    @cfunc(SCORES_SIGNATURE, nopython=True, cache=True)
    def score_rows(query_at, keys, ahead, out, dim, rows, blocks):
        r = 0
        while r < rows:
            left = rows - r
            q, o = query_at + 8 * r, out + SCORE_ROW_BYTES * r
            if left >= 8:
                for b in range(blocks):
                    scores(8, one, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                r += 8
            elif left >= 4:
                b = 0
                while b + 2 <= blocks:
                    scores(4, two, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                    b += 2
                if b < blocks:
                    scores(4, one, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                r += 4
            elif left == 3:
                if blocks == 4:
                    scores(3, four, (q, keys, ahead, o, dim))
                else:
                    for b in range(blocks):
                        scores(3, one, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                r += 3
            else:
                if blocks == 4:
                    if left == 2:
                        scores(2, four, (q, keys, ahead, o, dim))
                    else:
                        scores(1, four, (q, keys, ahead, o, dim))
                else:
                    for b in range(blocks):
                        if left == 2:
                            scores(2, one, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                        else:
                            scores(1, one, (q, keys + 8 * b, ahead + 8 * b, o + 64 * b, dim))
                r += left

    return score_rows


@functools.cache
def compiled_values(kind: int):
    """The cfunc for values of a format; compiled, or loaded from the cache, on first use.

    Called as `value_rows(weights, values, ahead, out_at, dim, rows, tokens, spare)`, all int64: add the
    weighted values of `tokens` tokens to `rows` rows. The weights may be overwritten, as are SPARE_BYTES at
    `spare`.
    """
    narrow, wide = variant(kind, 1), variant(kind, 4)
    code_bytes = 2 if kind == F16 else 1

    @cfunc(VALUES_SIGNATURE, nopython=True, cache=True)
    def value_rows(weights, values, ahead, out_at, dim, rows, tokens, spare):
        row_bytes = code_bytes * dim
        scales = S.BLOCK_SIZE * dim
        if kind == FP8:
            scale_weights(kind, 0, (weights, rows, values, ahead, scales, weights))
        r = 0
        while r < rows:
            left = min(rows - r, VALUE_ROWS)
            w, o = weights + SCORE_ROW_BYTES * r, out_at + 8 * r
            offset = np.int64(0)
            while offset < 4 * dim:
                width = 256 if 4 * dim - offset >= 256 else 64
                if kind == Q8_0:
                    w = spare
                    source = weights + SCORE_ROW_BYTES * r
                    for g in range(offset // (4 * Q8_BLOCK), -(-(offset + width) // (4 * Q8_BLOCK))):
                        at = scales + SCALE_ROW_BYTES * g
                        to = spare + (g - offset // (4 * Q8_BLOCK)) * VALUE_ROWS * SCORE_ROW_BYTES
                        scale_weights(kind, 0, (source, left, values, ahead, at, to))
                if left == 4:
                    if width == 256:
                        weighted_values(4, wide, (w, values, ahead, o, offset, tokens, row_bytes))
                    else:
                        weighted_values(4, narrow, (w, values, ahead, o, offset, tokens, row_bytes))
                elif left == 3:
                    if width == 256:
                        weighted_values(3, wide, (w, values, ahead, o, offset, tokens, row_bytes))
                    else:
                        weighted_values(3, narrow, (w, values, ahead, o, offset, tokens, row_bytes))
                elif left == 2:
                    if width == 256:
                        weighted_values(2, wide, (w, values, ahead, o, offset, tokens, row_bytes))
                    else:
                        weighted_values(2, narrow, (w, values, ahead, o, offset, tokens, row_bytes))
                elif width == 256:
                    weighted_values(1, wide, (w, values, ahead, o, offset, tokens, row_bytes))
                else:
                    weighted_values(1, narrow, (w, values, ahead, o, offset, tokens, row_bytes))
                offset += width
            r += left

    return value_rows


__all__ = [
    "SPARE_BYTES",
    "VALUE_ROWS",
    "compiled_scores",
    "compiled_values",
    "emit_scores",
    "emit_weighted_values",
    "variant",
]
