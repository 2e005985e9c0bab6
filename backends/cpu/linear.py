"""Matmuls by our own kernels as ggml nodes.

A layer's input passes through one node that quantizes it, norm or activation function included, then
through one node that multiplies it by every matrix that shares it:

    quantize   source [k, T]                    -> activations (bytes in a float tensor)
               plain, RMS norm times a weight, act(gate) * up from a source [2 k, T] = gate | up, or act(up)
    multiply   activations, perhaps a residual  -> [m_0 + m_1 + ..., T], biases added

Threads split the blocks of the quantizer and the rows of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.matmul.activations import (
    BLOCK_ELEMENTS,
    BLOCKWISE,
    FLOATS,
    REGION_BYTES,
    SUPERBLOCKWISE,
    emit_token,
    region_addresses,
    thread_share,
    tile_size,
)
from backends.cpu.simd import F32, I32, Emitter, Value, call_address, kernel, kernel_family
from backends.cpu.vecmath import exp
from backends.cpu.words import load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC
from backends.ggml.models.mixture import OAI_ALPHA, OAI_LIMIT

# What happens to the source before it is quantized. OAI is for experts alone, which quantize by themselves.
PLAIN, NORM, SILU, GELU, GELU_ALONE, OAI = range(6)

# words of the quantize operator's parameters; kinds are bits: 1 << BLOCKWISE, …
Q_COUNT_AT, Q_MODE, Q_K, Q_KINDS, Q_WEIGHT, Q_EPS = range(6)
NUM_QUANTIZE = 6
# words of the multiply operator's parameters, then MATRIX_WORDS words for each matrix
M_COUNT_AT, M_MATRICES, M_WIDTH, M_SCRATCH, M_RESIDUAL, M_FIRST = range(6)
MATRIX_WORDS = 7
# offset: bytes per token; bias: address of float32 [rows], or 0
W_FUNCTION, W_PACKED, W_ROWS, W_K, W_OFFSET, W_COLUMN, W_BIAS = range(MATRIX_WORDS)

NUM_KINDS = len(REGION_BYTES)
BLOCK_BYTES = tuple(sum(regions) for regions in REGION_BYTES)  # of one block of one token, by kind


def kind_bits(kinds: Iterable[int]) -> int:
    """Kinds of activations as the operators' parameters have them."""
    return sum(1 << kind for kind in set(kinds))


@intrinsic
def float_bits(typing_context, value):
    """The 32 bits of a float32, as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@kernel(returns=types.float32)
def norm_factor(x: Emitter, source: Value, vectors: Value, eps: Value) -> Value:
    """1 / sqrt(mean of squares + eps) of a row; the sum runs in 16 lanes, then over the lanes."""

    def square(i: Value, sums: list[Value]) -> list[Value]:
        v = x.load(source, x.mul(i, 64))
        return [x.fma(v, v, sums[0])]

    (total,) = x.loop(vectors, [x.splat_f32(0.0)], square)
    count = x.b.sitofp(x.mul(vectors, 16), F32)
    mean = x.b.fdiv(x.reduce_add(total), count)
    root = x.call("llvm.sqrt.f32", F32, x.fadd(mean, x.load(eps, 0, F32, 4)))
    return x.b.fdiv(x.f32(1.0), root)


def sigmoid(x: Emitter, v: Value) -> Value:
    """1 / (1 + e^-v)."""
    minus = x.b.fneg(v)
    high = x.splat_f32(88.0)
    minus = x.b.select(x.b.fcmp_ordered(">", minus, high), high, minus)
    one = x.splat_f32(1.0)
    return x.b.fdiv(one, x.fadd(one, exp(x, minus)))


def _gelu(x: Emitter, v: Value) -> Value:
    """v * Phi(v) by the tanh form (arXiv 1606.08415): v * sigmoid(2 sqrt(2 / pi) (v + 0.044715 v^3))."""
    cubic = x.fma(x.fmul(v, v), x.splat_f32(_GELU_CUBIC), x.splat_f32(1.0))
    return x.fmul(v, sigmoid(x, x.fmul(x.fmul(v, cubic), x.splat_f32(_GELU_SCALE))))


_GELU_CUBIC = float(np.float32(0.044715))
_GELU_SCALE = float(np.float32(2.0 * np.sqrt(2.0 / np.pi)))


def _oai(x: Emitter, gate: Value, up: Value) -> Value:
    """g * sigmoid(1.702 g) * (u + 1), g and u limited to 7, u to -7 too, as gpt-oss does; ggml_swiglu_oai."""
    high, low = x.splat_f32(OAI_LIMIT), x.splat_f32(-OAI_LIMIT)
    gate = x.b.select(x.b.fcmp_ordered(">", gate, high), high, gate)
    up = x.b.select(x.b.fcmp_ordered(">", up, high), high, up)
    up = x.b.select(x.b.fcmp_ordered("<", up, low), low, up)
    active = x.fmul(gate, sigmoid(x, x.fmul(gate, x.splat_f32(_OAI_ALPHA))))
    return x.fmul(active, x.fadd(up, x.splat_f32(1.0)))


_OAI_ALPHA = float(np.float32(OAI_ALPHA))


@kernel_family
def quantize_token(
    x: Emitter,
    kind: int,
    mode: int,
    source: Value,
    other: Value,
    factor: Value,
    tile: Value,
    first: Value,
    count: Value,
    *out: Value,
) -> None:
    """Blocks [first, first + count) of one token.

    `other` is the norm's weight or the up half, `factor` the bits of a float.
    """

    def load(i: Value) -> Value:
        at = x.mul(i, 64)
        v = x.load(source, at)
        if mode == PLAIN:
            return v
        if mode == NORM:
            return x.fmul(x.fmul(v, scale), x.load(other, at))
        if mode == GELU_ALONE:
            return _gelu(x, v)
        if mode == OAI:
            return _oai(x, v, x.load(other, at))
        activated = x.fmul(v, sigmoid(x, v)) if mode == SILU else _gelu(x, v)
        return x.fmul(activated, x.load(other, at))

    scale = x.splat(x.b.bitcast(x.b.trunc(factor, I32), F32))
    emit_token(x, kind, load, list(out), tile, first, count)


@njit(nogil=True, cache=True)
def quantize_mode(kind, mode, arguments):
    """The call with literals that `kernel_family` wants."""
    if kind == BLOCKWISE:
        if mode == PLAIN:
            quantize_token(BLOCKWISE, PLAIN, arguments)
        elif mode == NORM:
            quantize_token(BLOCKWISE, NORM, arguments)
        elif mode == SILU:
            quantize_token(BLOCKWISE, SILU, arguments)
        elif mode == GELU:
            quantize_token(BLOCKWISE, GELU, arguments)
        else:
            quantize_token(BLOCKWISE, GELU_ALONE, arguments)
    elif kind == FLOATS:
        if mode == PLAIN:
            quantize_token(FLOATS, PLAIN, arguments)
        elif mode == NORM:
            quantize_token(FLOATS, NORM, arguments)
        elif mode == SILU:
            quantize_token(FLOATS, SILU, arguments)
        elif mode == GELU:
            quantize_token(FLOATS, GELU, arguments)
        else:
            quantize_token(FLOATS, GELU_ALONE, arguments)
    elif mode == PLAIN:
        quantize_token(SUPERBLOCKWISE, PLAIN, arguments)
    elif mode == NORM:
        quantize_token(SUPERBLOCKWISE, NORM, arguments)
    elif mode == SILU:
        quantize_token(SUPERBLOCKWISE, SILU, arguments)
    elif mode == GELU:
        quantize_token(SUPERBLOCKWISE, GELU, arguments)
    else:
        quantize_token(SUPERBLOCKWISE, GELU_ALONE, arguments)


@njit(nogil=True, cache=True)
def quantize_share(params, source, out, ith, nth):
    """One thread's blocks, for each kind of activations that the node's readers want."""
    count = load_i64((load_i64((params + 8 * Q_COUNT_AT,)),))
    mode, k = load_i64((params + 8 * Q_MODE,)), load_i64((params + 8 * Q_K,))
    kinds, weight = load_i64((params + 8 * Q_KINDS,)), load_i64((params + 8 * Q_WEIGHT,))
    row_bytes = 8 * k if mode in (SILU, GELU) else 4 * k
    for kind in range(NUM_KINDS):
        if (kinds >> kind) & 1 == 0:
            continue
        blocks = k // BLOCK_ELEMENTS[kind]
        start = 0
        while start < count:
            size = tile_size(start, count)
            for token in range(start, start + size):
                first, n = thread_share(count, blocks, token, ith, nth)
                if n > 0:
                    row = source + token * row_bytes
                    factor, other = np.int64(0), weight
                    if mode == NORM:
                        factor = np.int64(float_bits(norm_factor((row, k // 16, params + 8 * Q_EPS))))
                    elif mode in (SILU, GELU):
                        other = row + 4 * k
                    one, two, three, four = region_addresses(kind, out, token, start, count, k)
                    quantize_mode(
                        kind, mode, (row, other, factor, np.int64(size), first, n, one, two, three, four)
                    )
            start += size
        out += count * blocks * BLOCK_BYTES[kind]


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def quantize_operator(tensor, ith, nth, params):
    """ggml custom operator: source 0 as the mode says, out the activation buffers one after the other."""
    source = load_i64((load_i64((tensor + 8 * WORD_SRC,)) + 8 * WORD_DATA,))
    quantize_share(params, source, load_i64((tensor + 8 * WORD_DATA,)), np.int64(ith), np.int64(nth))


@kernel
def add_floats(x: Emitter, target: Value, source: Value, count: Value) -> None:
    """target[i] += source[i] for `count` floats."""

    def vector(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        x.store(x.fadd(x.load(target, at), x.load(source, at)), target, at)
        return []

    def single(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(x.add(i, x.mul(whole, 16)), 4)
        total = x.b.fadd(x.load(target, at, F32, 4), x.load(source, at, F32, 4))
        x.store(total, target, at, 4)
        return []

    whole = x.b.ashr(count, x.const(4))
    x.loop_maybe(whole, [], vector)
    x.loop_maybe(x.b.and_(count, x.const(15)), [], single)


@njit(nogil=True, cache=True)
def multiply_share(params, activations, out, residual, ith, nth):
    """One thread's rows of every matrix of the node."""
    count = load_i64((load_i64((params + 8 * M_COUNT_AT,)),))
    row_bytes = 4 * load_i64((params + 8 * M_WIDTH,))
    scratch = load_i64((params + 8 * M_SCRATCH,))
    for index in range(load_i64((params + 8 * M_MATRICES,))):
        matrix = params + 8 * (M_FIRST + MATRIX_WORDS * index)
        m, k = load_i64((matrix + 8 * W_ROWS,)), load_i64((matrix + 8 * W_K,))
        y = out + 4 * load_i64((matrix + 8 * W_COLUMN,))
        source = activations + load_i64((matrix + 8 * W_OFFSET,)) * count
        call_address(
            load_i64((matrix + 8 * W_FUNCTION,)),
            (load_i64((matrix + 8 * W_PACKED,)), m, k, source, count, y, row_bytes, scratch, ith, nth),
        )
        bias = load_i64((matrix + 8 * W_BIAS,))
        panels = (m + 31) // 32  # the rows that this thread has just computed
        first, last = 32 * (panels * ith // nth), min(m, 32 * (panels * (ith + 1) // nth))
        if (residual == 0 and bias == 0) or last <= first:
            continue
        at = 4 * (load_i64((matrix + 8 * W_COLUMN,)) + first)
        for token in range(count):
            row = at + token * row_bytes
            if bias != 0:
                add_floats((out + row, bias + 4 * first, last - first))
            if residual != 0:
                add_floats((out + row, residual + row, last - first))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def multiply_operator(tensor, ith, nth, params):
    """ggml custom operator: source 0 quantized activations, source 1 (if any) the residual."""
    source = tensor + 8 * WORD_SRC
    activations = load_i64((load_i64((source,)) + 8 * WORD_DATA,))
    residual = np.int64(0)
    if load_i64((params + 8 * M_RESIDUAL,)) != 0:
        residual = load_i64((load_i64((source + 8,)) + 8 * WORD_DATA,))
    multiply_share(
        params, activations, load_i64((tensor + 8 * WORD_DATA,)), residual, np.int64(ith), np.int64(nth)
    )


__all__ = ["multiply_operator", "quantize_operator"]
