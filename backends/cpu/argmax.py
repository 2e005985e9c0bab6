"""The largest logit of each row, found by the threads of the graph while the row is still in cache."""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.simd import F32, I32, I32X16, LANES, Emitter, Value, ir, kernel
from backends.cpu.words import load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

NUM_PARAMS = 1  # word 0: address of the number of rows


@kernel
def argmax_row(x: Emitter, row: Value, vectors: Value, rest: Value, out: Value) -> None:
    """int32 at `out`: index of the largest of 16 * vectors + rest floats, lowest of equals; -1 if a NaN
    or +inf is among them, or nothing above -inf."""
    b = x.b
    lanes = ir.Constant(I32X16, list(range(LANES)))
    infinity = x.splat_f32(float("inf"))

    def step(i: Value, carried: list[Value]) -> list[Value]:
        best, at, bad = carried
        v = x.load(row, x.mul(i, 64))
        here = b.add(x.splat(b.trunc(x.mul(i, LANES), I32)), lanes)
        larger = b.fcmp_ordered(">", v, best)
        return [
            b.select(larger, v, best),
            b.select(larger, here, at),
            b.or_(bad, b.not_(b.fcmp_ordered("<", v, infinity))),
        ]

    nothing = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES)
    best, at, bad = x.loop_maybe(vectors, [x.splat_f32(float("-inf")), x.splat_i32(-1), nothing], step)
    # across the lanes: larger first, then the lower index
    top, index, wrong = x.f32(float("-inf")), x.const(-1, I32), x.const(0, ir.IntType(1))
    for lane in range(LANES):
        value, place, fault = (b.extract_element(vector, x.const(lane, I32)) for vector in (best, at, bad))
        top, index = _better(x, top, index, value, place)
        wrong = b.or_(wrong, fault)

    def tail(i: Value, carried: list[Value]) -> list[Value]:
        top, index, wrong = carried
        place = x.add(x.mul(vectors, LANES), i)
        value = x.load(row, x.mul(place, 4), F32, 4)
        top, index = _better(x, top, index, value, b.trunc(place, I32))
        return [top, index, b.or_(wrong, b.not_(b.fcmp_ordered("<", value, x.f32(float("inf")))))]

    top, index, wrong = x.loop_maybe(rest, [top, index, wrong], tail)
    wrong = b.or_(wrong, b.not_(b.fcmp_ordered(">", top, x.f32(float("-inf")))))
    x.store(b.select(wrong, x.const(-1, I32), index), out, 0, 4)


def _better(x: Emitter, top: Value, index: Value, value: Value, place: Value) -> tuple[Value, Value]:
    b = x.b
    equal_lower = b.and_(b.fcmp_ordered("==", value, top), b.icmp_unsigned("<", place, index))
    take = b.or_(b.fcmp_ordered(">", value, top), equal_lower)
    return b.select(take, value, top), b.select(take, place, index)


@njit(nogil=True, cache=True)
def argmax_share(logits, width, rows, out, ith, nth):
    """One thread's rows of float32 [rows, width]."""
    for row in range(ith, rows, nth):
        argmax_row((logits + 4 * row * width, width // 16, width % 16, out + 4 * row))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def argmax_operator(tensor, ith, nth, params):
    """ggml custom operator: logits [n_vocab, L] -> int32 in a float tensor [1, L]."""
    source = load_i64((tensor + 8 * WORD_SRC,))
    rows, width = load_i64((load_i64((params,)),)), load_i64((source + 8 * 2,))  # ne[0]
    data = load_i64((source + 8 * WORD_DATA,))
    argmax_share(data, width, rows, load_i64((tensor + 8 * WORD_DATA,)), np.int64(ith), np.int64(nth))


__all__ = ["NUM_PARAMS", "argmax_operator"]
