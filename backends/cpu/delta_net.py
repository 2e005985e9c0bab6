"""The gated delta net on the CPU: three ggml nodes between the projections and the output matrix.

    convolve   projections           -> rows of q | k | v | decay, b of each value head
               threads split the heads, each of which has its own channels of the convolution
    advance    these                 -> y [dim * value heads, T]
               threads split the units: 16 rows of a value head's matrix, which no other rows depend on
    gate       y, projections        -> rms_norm(y) * silu(z)

A slot of a layer's state:   conv     [taps - 1][conv width]         the last inputs, oldest first
                             matrix   [value head][unit][dim][16]    lane j of unit u: row 16 u + j

so that in S k and S q nothing is added across lanes. A token's arithmetic depends on the state before it and
on itself alone: bits are the same whatever the chunks are and whoever is in the batch.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.linear import float_bits, norm_factor, sigmoid
from backends.cpu.simd import F32, I32, Emitter, Value, kernel
from backends.cpu.words import fill_zero, load_i64, store_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

TOKENS, NUM_SEGMENTS, SEGMENTS = range(3)  # words about the step; SEGMENTS: where they are
# words of a layer's parameters; floats are stored as the bits of a float32
(
    P_STEP,
    P_DIM,
    P_KEY_HEADS,
    P_VALUE_HEADS,
    P_TAPS,
    P_EPS,
    P_ONE,
    P_QUERY_SCALE,
    P_CONV_POOL,
    P_MATRIX_POOL,
    P_CONV_WEIGHT,
    P_DT,
    P_A,
    P_NORM,
    P_SCRATCH,
    P_PARTS,
) = range(16)
# for each of the projections, in the order of models/delta_net.py: its source, offset and row length in bytes
PART_WORDS = 3
QKV, GATE, ALPHA, BETA = range(4)
NUM_PARAMS = P_PARTS + 4 * PART_WORDS
SEGMENT_WORDS = 5  # as of ggml.recurrent.state_segments
LANES = 16
SPLIT = 4  # sums that run side by side: an addition takes four cycles


@kernel(returns=types.float32)
def load_f32(x: Emitter, address: Value) -> Value:
    return x.load(address, 0, F32, 4)


@kernel
def tap(x: Emitter, out: Value, source: Value, weight: Value, vectors: Value, more: Value) -> None:
    """out = source * weight, or with `more` out + that."""
    first = x.b.icmp_signed("==", more, x.const(0))

    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        before = x.b.select(first, x.splat_f32(0.0), x.load(out, at))
        x.store(x.fma(x.load(source, at), x.load(weight, at), before), out, at)
        return []

    x.loop(vectors, [], body)


@kernel
def silu_row(x: Emitter, row: Value, vectors: Value) -> None:
    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        v = x.load(row, at)
        x.store(x.fmul(v, sigmoid(x, v)), row, at)
        return []

    x.loop(vectors, [], body)


@kernel
def set_length(x: Emitter, row: Value, vectors: Value, eps: Value, length: Value) -> None:
    """row * length / sqrt(sum of squares + eps); `eps` and `length` are addresses of floats."""

    def square(i: Value, sums: list[Value]) -> list[Value]:
        v = x.load(row, x.mul(i, 64))
        return [x.fma(v, v, sums[0])]

    (total,) = x.loop(vectors, [x.splat_f32(0.0)], square)
    root = x.call("llvm.sqrt.f32", F32, x.fadd(x.reduce_add(total), x.load(eps, 0, F32, 4)))
    factor = x.splat(x.b.fdiv(x.load(length, 0, F32, 4), root))

    def scale(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        x.store(x.fmul(x.load(row, at), factor), row, at)
        return []

    x.loop(vectors, [], scale)


@kernel
def copy_vectors(x: Emitter, target: Value, source: Value, vectors: Value) -> None:
    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        x.store(x.load(source, at), target, at)
        return []

    x.loop(vectors, [], body)


@kernel
def advance_unit(
    x: Emitter,
    source: Value,
    target: Value,
    key: Value,
    query: Value,
    value: Value,
    gates: Value,
    out: Value,
    quarter: Value,
) -> None:
    """One token: 16 rows of a matrix from `source` to `target`, and their products with the query to `out`.

    `gates`: decay and b. `quarter`: dim / SPLIT.
    """
    zero = x.splat_f32(0.0)

    def project(i: Value, sums: list[Value]) -> list[Value]:
        out_sums = []
        for j in range(SPLIT):
            row = x.add(x.mul(i, SPLIT), j)
            s, k = x.load(source, x.mul(row, 64)), x.broadcast_f32(key, x.mul(row, 4))
            out_sums.append(x.fma(s, k, sums[j]))
        return out_sums

    def change(i: Value, sums: list[Value]) -> list[Value]:
        out_sums = []
        for j in range(SPLIT):
            row = x.add(x.mul(i, SPLIT), j)
            at, of = x.mul(row, 64), x.mul(row, 4)
            s = x.fma(x.broadcast_f32(key, of), delta, x.fmul(x.load(source, at), decay))
            x.store(s, target, at)
            out_sums.append(x.fma(s, x.broadcast_f32(query, of), sums[j]))
        return out_sums

    decay, beta = x.broadcast_f32(gates), x.broadcast_f32(gates, 4)
    a = x.loop(quarter, [zero] * SPLIT, project)
    projected = x.fadd(x.fadd(a[0], a[1]), x.fadd(a[2], a[3]))
    delta = x.fmul(x.fsub(x.load(value), x.fmul(projected, decay)), beta)
    o = x.loop(quarter, [zero] * SPLIT, change)
    x.store(x.fadd(x.fadd(o[0], o[1]), x.fadd(o[2], o[3])), out)


@kernel
def gate_head(
    x: Emitter, out: Value, y: Value, z: Value, weight: Value, factor: Value, vectors: Value
) -> None:
    """out = y * factor * weight * silu(z); `factor`: bits of a float."""
    scale = x.splat(x.b.bitcast(x.b.trunc(factor, I32), F32))

    def body(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        normed = x.fmul(x.fmul(x.load(y, at), scale), x.load(weight, at))
        gate = x.load(z, at)
        x.store(x.fmul(normed, x.fmul(gate, sigmoid(x, gate))), out, at)
        return []

    x.loop(vectors, [], body)


@njit(nogil=True, cache=True)
def part_of(params, tensor, part, first_source):
    """(address, bytes of a row) of a projection among a node's sources."""
    words = params + 8 * (P_PARTS + PART_WORDS * part)
    source = tensor + 8 * (WORD_SRC + first_source + load_i64((words,)))
    data = load_i64((load_i64((source,)) + 8 * WORD_DATA,))
    return data + load_i64((words + 8,)), load_i64((words + 16,))


@njit(nogil=True, cache=True)
def input_at(source, stride, state, width, i, taps):
    """Address of a segment's input i; before its first, of what the state has."""
    return source + i * stride if i >= 0 else state + (taps - 1 + i) * width


@njit(nogil=True, cache=True)
def convolve_head(params, source, stride, out, out_stride, head):
    """One head of q | k | v in all rows, and its part of the states."""
    dim, taps = load_i64((params + 8 * P_DIM,)), load_i64((params + 8 * P_TAPS,))
    key_heads = load_i64((params + 8 * P_KEY_HEADS,))
    width = 4 * dim * (2 * key_heads + load_i64((params + 8 * P_VALUE_HEADS,)))
    at, vectors = 4 * dim * head, dim // LANES
    weight, pool = load_i64((params + 8 * P_CONV_WEIGHT,)) + at, load_i64((params + 8 * P_CONV_POOL,)) + at
    step = load_i64((params + 8 * P_STEP,))
    segments = load_i64((step + 8 * SEGMENTS,))
    for _ in range(load_i64((step + 8 * NUM_SEGMENTS,))):
        first, rows = load_i64((segments + 8,)), load_i64((segments + 16,))
        state = pool + load_i64((segments + 24,)) * (taps - 1) * width
        target, inputs = load_i64((segments + 32,)), source + first * stride + at
        for r in range(rows):
            y = out + (first + r) * out_stride + at
            for t in range(taps):
                i = input_at(inputs, stride, state, width, r - taps + 1 + t, taps)
                tap((y, i, weight + t * width, vectors, t))
            silu_row((y, vectors))
            if head < 2 * key_heads:
                length = P_QUERY_SCALE if head < key_heads else P_ONE
                set_length((y, vectors, params + 8 * P_EPS, params + 8 * length))
        if target > 0:  # the target may be the source: what is read lies behind what is written
            for t in range(taps - 1):
                i = input_at(inputs, stride, state, width, rows - taps + 1 + t, taps)
                copy_vectors((pool + (target * (taps - 1) + t) * width, i, vectors))
        segments += 8 * SEGMENT_WORDS


@njit(nogil=True, cache=True)
def gates_of_row(params, alpha, beta, out):
    """Decay and b of each value head, side by side."""
    dt, a = load_i64((params + 8 * P_DT,)), load_i64((params + 8 * P_A,))
    for h in range(load_i64((params + 8 * P_VALUE_HEADS,))):
        raw = np.float64(load_f32((alpha + 4 * h,))) + np.float64(load_f32((dt + 4 * h,)))
        softplus = raw if raw > 20.0 else math.log1p(math.exp(raw))
        decay = np.float32(math.exp(softplus * np.float64(load_f32((a + 4 * h,)))))
        b = np.float32(1.0 / (1.0 + math.exp(-np.float64(load_f32((beta + 4 * h,))))))
        low, high = np.int64(float_bits(decay)), np.int64(float_bits(b))
        store_i64((out + 8 * h, (low & 0xFFFFFFFF) | (high << 32)))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def convolve_operator(tensor, ith, nth, params):
    """ggml custom operator: projections -> [conv width + 2 value heads, T]."""
    out, stride = load_i64((tensor + 8 * WORD_DATA,)), load_i64((tensor + 8 * 7,))  # nb[1]
    heads = 2 * load_i64((params + 8 * P_KEY_HEADS,)) + load_i64((params + 8 * P_VALUE_HEADS,))
    source, source_stride = part_of(params, tensor, QKV, 0)
    for head in range(heads * ith // nth, heads * (ith + 1) // nth):
        convolve_head(params, source, source_stride, out, stride, np.int64(head))
    rows = load_i64((load_i64((params + 8 * P_STEP,)) + 8 * TOKENS,))
    alpha, alpha_stride = part_of(params, tensor, ALPHA, 0)
    beta, beta_stride = part_of(params, tensor, BETA, 0)
    gates = out + 4 * heads * load_i64((params + 8 * P_DIM,))
    for row in range(rows * ith // nth, rows * (ith + 1) // nth):
        gates_of_row(params, alpha + row * alpha_stride, beta + row * beta_stride, gates + row * stride)


@njit(nogil=True, cache=True)
def advance_rows(params, rows, stride, out, out_stride, unit, work):
    """One unit of a head's matrix through all rows. `work`: dim vectors of this thread."""
    dim, key_heads = load_i64((params + 8 * P_DIM,)), load_i64((params + 8 * P_KEY_HEADS,))
    heads = load_i64((params + 8 * P_VALUE_HEADS,))
    units = dim // LANES
    head, slot_bytes = unit // units, 4 * heads * dim * dim
    query, key = 4 * dim * (head % key_heads), 4 * dim * (key_heads + head % key_heads)
    value = 4 * (dim * (2 * key_heads + head) + LANES * (unit % units))
    gates = 4 * dim * (2 * key_heads + heads) + 8 * head
    pool = load_i64((params + 8 * P_MATRIX_POOL,)) + 64 * dim * unit
    step = load_i64((params + 8 * P_STEP,))
    segments = load_i64((step + 8 * SEGMENTS,))
    for _ in range(load_i64((step + 8 * NUM_SEGMENTS,))):
        first, count = load_i64((segments + 8,)), load_i64((segments + 16,))
        source, target = pool + load_i64((segments + 24,)) * slot_bytes, load_i64((segments + 32,))
        for r in range(first, first + count):
            row = rows + r * stride
            there = pool + target * slot_bytes if target > 0 and r == first + count - 1 else work
            advance_unit(
                (
                    source,
                    there,
                    row + key,
                    row + query,
                    row + value,
                    row + gates,
                    out + r * out_stride + 64 * unit,
                    dim // SPLIT,
                )
            )
            source = there
        segments += 8 * SEGMENT_WORDS


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def advance_operator(tensor, ith, nth, params):
    """ggml custom operator: what convolve_operator gives -> y [dim * value heads, T]."""
    source = load_i64((tensor + 8 * WORD_SRC,))
    rows, stride = load_i64((source + 8 * WORD_DATA,)), load_i64((source + 8 * 7,))  # nb[1]
    dim = load_i64((params + 8 * P_DIM,))
    work = load_i64((params + 8 * P_SCRATCH,)) + ith * 64 * dim
    units = dim // LANES * load_i64((params + 8 * P_VALUE_HEADS,))
    out, out_stride = load_i64((tensor + 8 * WORD_DATA,)), load_i64((tensor + 8 * 7,))
    for unit in range(units * ith // nth, units * (ith + 1) // nth):
        advance_rows(params, rows, stride, out, out_stride, np.int64(unit), work)


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def gate_operator(tensor, ith, nth, params):
    """ggml custom operator: y, then the projections -> what the output matrix reads, zero in padding rows."""
    dim, heads = load_i64((params + 8 * P_DIM,)), load_i64((params + 8 * P_VALUE_HEADS,))
    y = load_i64((load_i64((tensor + 8 * WORD_SRC,)) + 8 * WORD_DATA,))
    z, stride = part_of(params, tensor, GATE, 1)
    out, weight = load_i64((tensor + 8 * WORD_DATA,)), load_i64((params + 8 * P_NORM,))
    tokens = load_i64((load_i64((params + 8 * P_STEP,)) + 8 * TOKENS,))
    for i in range(tokens * heads * ith // nth, tokens * heads * (ith + 1) // nth):
        row, head = i // heads, i % heads
        at = 4 * dim * np.int64(i)
        factor = np.int64(float_bits(norm_factor((y + at, dim // LANES, params + 8 * P_EPS))))
        gate_head((out + at, y + at, z + row * stride + 4 * dim * head, weight, factor, dim // LANES))
    if ith == nth - 1:
        padding = load_i64((tensor + 8 * 3,)) - tokens  # ne[1]
        fill_zero((out + 4 * dim * heads * tokens, padding * heads * dim // LANES))


__all__ = ["NUM_PARAMS", "advance_operator", "convolve_operator", "gate_operator"]
