"""What attention does between keys and values: the running softmax over chunks of CHUNK tokens."""

from __future__ import annotations

from llvmlite import ir

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.simd import F32, I32, Emitter, Value, kernel
from backends.cpu.vecmath import exp

CHUNK = S.CHUNK_BLOCKS * S.BLOCK_SIZE  # tokens
SCORE_ROW_BYTES = 4 * CHUNK


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


@kernel
def soft_cap(x: Emitter, row: Value, cap: Value) -> None:
    """A row's scores s of one chunk become c tanh(s / c). cap: address of the float c.

    As c - 2 c / (1 + e^(2 s / c)): the error is absolute, some 1e-7 of c.
    """
    limit, one, two = x.splat_f32(88.0), x.splat_f32(1.0), x.splat_f32(2.0)
    c = x.broadcast_f32(cap, 0)
    double = x.b.fdiv(two, c)
    for i in range(S.CHUNK_BLOCKS):
        v = x.fmul(x.load(row, 64 * i), double)
        v = x.b.select(x.b.fcmp_ordered(">", v, limit), limit, v)
        fraction = x.b.fdiv(two, x.fadd(one, exp(x, v)))
        x.store(x.fmul(c, x.fsub(one, fraction)), row, 64 * i)


@kernel
def reset_state(x: Emitter, state: Value) -> None:
    x.store(x.f32(float("-inf")), state, 0, 4)
    x.store(x.f32(0.0), state, 4, 4)


@kernel
def begin_with_sink(x: Emitter, state: Value, sink: Value) -> None:
    """As after one score, that at the address `sink`, whose value is zero."""
    x.store(x.load(sink, 0, F32, 4), state, 0, 4)
    x.store(x.f32(1.0), state, 4, 4)


@kernel
def divide_by_sum(x: Emitter, out: Value, state: Value, vectors: Value) -> None:
    total = x.broadcast_f32(state, 4)

    def body(_: Value, carried: list[Value]) -> list[Value]:
        x.store(x.b.fdiv(x.load(carried[0]), total), carried[0])
        return [x.add(carried[0], 64)]

    x.loop(vectors, [out], body)


__all__ = [
    "CHUNK",
    "SCORE_ROW_BYTES",
    "begin_with_sink",
    "divide_by_sum",
    "reset_state",
    "soft_cap",
    "softmax_update",
]
