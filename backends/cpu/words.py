"""What operators read and write one by one: the words of their parameters, and rows to be cleared."""

from __future__ import annotations

from numba import types

from backends.cpu.simd import I32, I64, Emitter, Value, kernel


@kernel(returns=types.int64)
def load_i64(x: Emitter, address: Value) -> Value:
    return x.load(address, 0, I64, 8)


@kernel(returns=types.int64)
def load_i32(x: Emitter, address: Value) -> Value:
    return x.b.sext(x.load(address, 0, I32, 4), I64)


@kernel
def store_i64(x: Emitter, address: Value, value: Value) -> None:
    x.store(value, address, 0, 8)


@kernel
def fill_zero(x: Emitter, address: Value, vectors: Value) -> None:
    def body(_: Value, carried: list[Value]) -> list[Value]:
        x.store(x.splat_f32(0.0), carried[0])
        return [x.add(carried[0], 64)]

    x.loop_maybe(vectors, [address], body)
