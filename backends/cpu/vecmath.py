"""Vector functions written with the emitter, the same bits on every CPU with fused multiply-add."""

from __future__ import annotations

import numpy as np

from backends.cpu.simd import F32, F32X16, I32X16, Emitter, Value, ir

LOG2_E = float(np.float32(1.4426950408889634))
# ln 2 in two parts, the first short enough that n * LN2_HIGH is exact for |n| <= 2^10
LN2_HIGH, LN2_LOW = 0.693145751953125, float(np.float32(1.42860682030941723212e-6))
# e^r on [-ln2/2, ln2/2], Taylor coefficients 1/k! rounded to float32
EXP_COEFFICIENTS = tuple(float(np.float32(1.0 / f)) for f in (5040, 720, 120, 24, 6, 2, 1, 1))
EXP_UNDERFLOW = -87.0  # below this the result is 0; e^-87 is just above the smallest normal float32
EXP_BOUND = 3e-7  # relative error against float64


def exp(x: Emitter, v: Value) -> Value:
    """e^v for <16 x float> with v <= 88; lanes below EXP_UNDERFLOW (and -inf) give 0."""
    low = x.splat_f32(EXP_UNDERFLOW)
    under = x.b.fcmp_ordered("<", v, low)
    v = x.b.select(under, low, v)
    n = x.rint(x.fmul(v, x.splat_f32(LOG2_E)))
    r = x.fma(n, x.splat_f32(-LN2_HIGH), v)
    r = x.fma(n, x.splat_f32(-LN2_LOW), r)
    p = x.splat_f32(EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = x.fma(p, r, x.splat_f32(coefficient))
    exponent = x.b.add(x.b.fptosi(n, I32X16), x.splat_i32(127))
    power = x.b.bitcast(x.b.shl(exponent, x.splat_i32(23)), F32X16)
    return x.b.select(under, x.splat_f32(0.0), x.fmul(p, power))


def exp_scalar(x: Emitter, v: Value) -> Value:
    """The same for one float."""
    return x.b.extract_element(exp(x, x.splat(v)), x.const(0, ir.IntType(32)))


def clamp_half(x: Emitter, v: Value) -> Value:
    """Limit <16 x float> to what a half can hold, so that no infinity enters a KV pool."""
    bound = x.splat_f32(65504.0)
    v = x.b.select(x.b.fcmp_ordered(">", v, bound), bound, v)
    negative = x.splat_f32(-65504.0)
    return x.b.select(x.b.fcmp_ordered("<", v, negative), negative, v)


__all__ = ["EXP_BOUND", "EXP_UNDERFLOW", "F32", "clamp_half", "exp", "exp_scalar"]
