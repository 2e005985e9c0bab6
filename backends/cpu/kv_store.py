"""One token's key or value of one KV head into its part of the pools (drawn in kv_codes.py).

fp8   as quant.fp8.encode_rows: the best of some scales that turn the largest magnitude into a code
q8_0  as quant.encoders.encode_q8_0, which is ggml's

Whatever the format, values are first limited to what a half can hold, so that no infinity enters a pool.
"""

from __future__ import annotations

import functools

from numba import cfunc

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.kv_codes import F16, FP8, Q8_BLOCK, SCALE_ROW_BYTES, TOKENS
from backends.cpu.simd import F16 as HALF
from backends.cpu.simd import (
    F16X16,
    F32X16,
    I8X16,
    I32,
    I32X16,
    LANES,
    Emitter,
    Value,
    ir,
    kernel_family,
)
from backends.cpu.vecmath import clamp_half
from quant.fp8 import LARGEST, PEAKS, SMALLEST_SCALE, SPLIT

SIGNATURE = "void(int64, int64, int64, int64)"
KEYS, VALUES = 0, 1


def emit_row(
    x: Emitter, kind: int, which: int, part: Value, token: Value, head: Value, vectors: Value
) -> None:
    """The 16 * vectors floats at `head` as token `token` of a part, KEYS or VALUES."""
    emit = _store_halfs if kind == F16 else _store_codes
    emit(x, kind, which, part, token, head, vectors)


def _store_halfs(
    x: Emitter, kind: int, which: int, part: Value, token: Value, head: Value, vectors: Value
) -> None:
    def body(i: Value, _: list[Value]) -> list[Value]:
        v = x.b.fptrunc(clamp_half(x, x.load(head, x.mul(i, 64))), F16X16)
        if which == VALUES:
            x.store(v, x.add(part, x.mul(token, x.mul(vectors, 32))), x.mul(i, 32))
        else:
            _scatter(x, v, x.add(x.add(part, x.mul(token, 2)), x.mul(i, 2 * TOKENS * LANES)), 2)
        return []

    x.loop(vectors, [], body)


def _store_codes(
    x: Emitter, kind: int, which: int, part: Value, token: Value, head: Value, vectors: Value
) -> None:
    scales = x.add(x.add(part, x.mul(vectors, LANES * TOKENS)), x.mul(token, 2))
    first = x.mul(token, x.mul(vectors, LANES)) if which == VALUES else token
    codes = x.add(part, first)

    def group(count: Value | int, source: Value, target: Value, scale_at: Value) -> None:
        """`count` vectors that share a scale."""

        def largest(i: Value, carried: list[Value]) -> list[Value]:
            return [x.fmax(carried[0], x.fabs(clamp_half(x, x.load(source, x.mul(i, 64)))))]

        (top,) = x.loop(count, [x.splat_f32(0.0)], largest)
        if kind == FP8:
            inverse = x.splat(_fp8_scale(x, x.reduce_max(top), source, vectors, scale_at))
        else:
            inverse = x.splat(_q8_scale(x, x.reduce_max(top), scale_at))

        def encode(i: Value, _: list[Value]) -> list[Value]:
            v = x.fmul(clamp_half(x, x.load(source, x.mul(i, 64))), inverse)
            encoded = x.b.trunc(_e4m3(x, v) if kind == FP8 else _nearest_away(x, v), I8X16)
            if which == VALUES:
                x.store(encoded, target, x.mul(i, LANES))
            else:
                _scatter(x, encoded, x.add(target, x.mul(i, LANES * TOKENS)), 1)
            return []

        x.loop(count, [], encode)

    if kind == FP8:
        group(vectors, head, codes, scales)
        return
    step = Q8_BLOCK if which == VALUES else Q8_BLOCK * TOKENS

    def each(g: Value, _: list[Value]) -> list[Value]:
        group(
            Q8_BLOCK // LANES,
            x.add(head, x.mul(g, 4 * Q8_BLOCK)),
            x.add(codes, x.mul(g, step)),
            x.add(scales, x.mul(g, SCALE_ROW_BYTES)),
        )
        return []

    x.loop(x.b.lshr(vectors, x.const(1)), [], each)


def _scatter(x: Emitter, vector: Value, address: Value, element_bytes: int) -> None:
    """One dimension after the other into one token's place in the keys."""
    for lane in range(LANES):
        element = x.b.extract_element(vector, x.const(lane, I32))
        x.store(element, address, TOKENS * element_bytes * lane, element_bytes)


def _fp8_scale(x: Emitter, largest: Value, source: Value, vectors: Value, address: Value) -> Value:
    """Write the best scale, and return by what values are to be multiplied. See quant.fp8.encode_rows."""
    b, count = x.b, len(PEAKS)
    peaks = ir.Constant(F32X16, [*PEAKS, *([LARGEST] * (LANES - count))])
    rounded = b.fpext(b.fptrunc(b.fdiv(x.splat(largest), peaks), F16X16), F32X16)
    scales = x.fmax(rounded, x.splat_f32(SMALLEST_SCALE))
    inverses = b.fdiv(x.splat_f32(1.0), scales)
    scale, inverse = (
        [b.extract_element(v, x.const(i, I32)) for i in range(count)] for v in (scales, inverses)
    )
    factors = [x.splat(v) for v in inverse]

    def add_errors(i: Value, sums: list[Value]) -> list[Value]:
        v = clamp_half(x, x.load(source, x.mul(i, 64)))
        return [
            x.fadd(total, _squared_rest(x, x.fmul(v, factor)))
            for total, factor in zip(sums, factors, strict=True)
        ]

    errors = x.loop(vectors, [x.splat_f32(0.0)] * count, add_errors)
    least, best, chosen = None, scale[0], inverse[0]
    for total, s, i in zip(errors, scale, inverse, strict=True):
        error = x.fmul(x.reduce_add(total), x.fmul(s, s))
        if least is None:
            least = error
            continue
        better = b.fcmp_ordered("<", error, least)
        least, best, chosen = (
            b.select(better, new, old) for new, old in ((error, least), (s, best), (i, chosen))
        )
    x.store(b.fptrunc(best, HALF), address, 0, 2)
    return chosen


def _squared_rest(x: Emitter, v: Value) -> Value:
    """The square of what rounding to 3 mantissa bits changes."""
    spread = x.fmul(v, x.splat_f32(SPLIT))
    rest = x.fsub(x.fsub(spread, x.fsub(spread, v)), v)
    return x.fmul(rest, rest)


def _q8_scale(x: Emitter, largest: Value, address: Value) -> Value:
    """The same for values up to `largest`, as ggml does it."""
    b = x.b
    scale = b.fdiv(largest, x.f32(127.0))
    x.store(b.fptrunc(scale, HALF), address, 0, 2)
    inverse = b.fdiv(x.f32(1.0), scale)
    return b.select(b.fcmp_ordered("<", inverse, x.f32(float("inf"))), inverse, x.f32(0.0))


def _e4m3(x: Emitter, v: Value) -> Value:
    """quant.fp8.encode_e4m3 of <16 x float>, as <16 x i32>; a NaN becomes the largest number."""
    b = x.b
    size, limit, normal = x.fabs(v), x.splat_f32(LARGEST), x.splat_f32(2.0**-6)
    size = b.select(b.fcmp_ordered("<", size, limit), size, limit)
    bits = b.bitcast(size, I32X16)
    odd = b.and_(x.shift_right(bits, 20), x.splat_i32(1))
    rounded = x.shift_right(b.add(bits, b.add(odd, x.splat_i32(0x7FFFF))), 20)
    codes = b.sub(rounded, x.splat_i32(120 << 3))
    few = b.fptosi(x.rint(x.fmul(size, x.splat_f32(2.0**9))), I32X16)
    codes = b.select(b.fcmp_ordered("<", size, normal), few, codes)
    sign = b.and_(x.shift_right(b.bitcast(v, I32X16), 24), x.splat_i32(0x80))
    return b.or_(codes, sign)


def _nearest_away(x: Emitter, v: Value) -> Value:
    """<16 x float> to the nearest <16 x i32>, halves away from zero, as C's roundf."""
    b = x.b
    whole = x.call("llvm.trunc.v16f32", F32X16, v)
    rest = x.fabs(x.fsub(v, whole))
    one = b.select(b.fcmp_ordered("<", v, x.splat_f32(0.0)), x.splat_i32(-1), x.splat_i32(1))
    further = b.fcmp_ordered(">=", rest, x.splat_f32(0.5))
    return b.add(b.fptosi(whole, I32X16), b.select(further, one, x.splat_i32(0)))


store_row = kernel_family(emit_row)


@functools.cache
def compiled_store(kind: int, which: int):
    """The cfunc that stores a token's KEYS or VALUES in a format; compiled, or loaded, on first use.

    Called as `store(part, token, head, vectors)`, all int64: the address of the part, the token's place in
    the block, the address of 16 * vectors floats.
    """

    @cfunc(SIGNATURE, nopython=True, cache=True)
    def store(part, token, head, vectors):
        store_row(kind, which, (part, token, head, vectors))

    return store


__all__ = ["KEYS", "VALUES", "compiled_store", "emit_row"]
