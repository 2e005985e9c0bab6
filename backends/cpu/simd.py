"""Explicit vectors inside numba: Python functions that emit LLVM IR.

A kernel is a Python function `emit(x, *values)` that receives an `Emitter` and int64 IR values (addresses
and sizes) and writes instructions with it. Its own loops, lists and conditions run while the code is
generated, so unrolling and register tiles are plain Python; only what goes through the emitter exists at
run time.

    @kernel
    def add_rows(x, source, target, count):           # target[0:16 * count] += source[0:16 * count], float32
        def body(_, carried):
            s, t = carried
            x.store(x.fadd(x.load(s, 0, F32X16), x.load(t, 0, F32X16)), t)
            return [x.add(s, 64), x.add(t, 64)]
        x.loop(count, [source, target], body)

    @njit(cache=True)
    def add(source, target, count):
        add_rows((source, target, count))

Vectors have 16 lanes of 32 bits whatever the CPU: LLVM splits them where registers are narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Value = Any  # an llvmlite IR value

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
F32X16 = ir.VectorType(F32, LANES)
F16X16 = ir.VectorType(F16, LANES)
I32X16 = ir.VectorType(I32, LANES)
I16X16 = ir.VectorType(I16, LANES)
I8X16 = ir.VectorType(I8, LANES)
I8X64 = ir.VectorType(I8, 4 * LANES)


class Emitter:
    """Instructions on 16-lane vectors. Addresses are int64 values, offsets are bytes (int or value).

    `b` is the llvmlite builder, for any instruction that has no name here.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    # -- constants ------------------------------------------------------------------------------------

    def const(self, value: int, type: ir.Type = I64) -> Value:
        """A scalar integer constant."""
        return ir.Constant(type, value)

    def f32(self, value: float) -> Value:
        """A scalar float32 constant; `value` must be exactly representable."""
        return ir.Constant(F32, value)

    def splat_f32(self, value: float) -> Value:
        """<16 x float> of one constant; `value` must be exactly representable."""
        return ir.Constant(F32X16, [value] * LANES)

    def splat_i32(self, value: int) -> Value:
        """<16 x i32> of one constant, given signed or unsigned."""
        return ir.Constant(I32X16, [value - (1 << 32) if value >= 1 << 31 else value] * LANES)

    def splat_bytes(self, value: int) -> Value:
        """<16 x i32> whose 64 bytes are all `value` (0..255)."""
        return self.splat_i32(value * 0x01010101)

    # -- scalars and addresses ------------------------------------------------------------------------

    def add(self, a: Value, b: Value | int) -> Value:
        """a + b for int64; b may be a Python int."""
        if isinstance(b, int):
            return self.b.add(a, self.const(b)) if b else a
        return self.b.add(a, b)

    def mul(self, a: Value, b: Value | int) -> Value:
        """a * b for int64; b may be a Python int."""
        return self.b.mul(a, self.const(b) if isinstance(b, int) else b)

    def pointer(self, address: Value, offset: Value | int = 0) -> Value:
        return self.b.inttoptr(self.add(address, offset), ir.PointerType())

    # -- memory ---------------------------------------------------------------------------------------

    def load(self, address: Value, offset: Value | int = 0, type: ir.Type = F32X16, align: int = 1) -> Value:
        return self.b.load(self.pointer(address, offset), align=align, typ=type)

    def store(self, value: Value, address: Value, offset: Value | int = 0, align: int = 1) -> None:
        self.b.store(value, self.pointer(address, offset), align=align)

    def load_f16(self, address: Value, offset: Value | int = 0) -> Value:
        """16 halfs as <16 x float>."""
        return self.b.fpext(self.load(address, offset, F16X16), F32X16)

    def load_bf16(self, address: Value, offset: Value | int = 0) -> Value:
        """16 bfloats as <16 x float>."""
        bits = self.b.zext(self.load(address, offset, I16X16), I32X16)
        return self.b.bitcast(self.shift_right(bits, -16), F32X16)

    def store_f16(self, value: Value, address: Value, offset: Value | int = 0) -> None:
        """<16 x float> as 16 halfs, rounded to nearest even."""
        self.store(self.b.fptrunc(value, F16X16), address, offset)

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        """A vector with the scalar in every lane."""
        vector = ir.VectorType(scalar.type, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, self.const(0, I32))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def broadcast_f32(self, address: Value, offset: Value | int = 0) -> Value:
        """One float32 from memory in every lane."""
        return self.splat(self.load(address, offset, F32, 4))

    def broadcast_i32(self, address: Value, offset: Value | int = 0) -> Value:
        """Four bytes from memory in every lane, as <16 x i32>."""
        return self.splat(self.load(address, offset, I32, 4))

    def prefetch(
        self, address: Value, offset: Value | int = 0, locality: int = 2, write: bool = False
    ) -> None:
        """Ask for the cache line. locality 3: all levels, 2: L2, 1: L3. Any address is allowed."""
        flags = [self.const(v, I32) for v in (int(write), locality, 1)]  # 1: data cache
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(address, offset), *flags)

    # -- arithmetic -----------------------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *args: Value, **kwargs: Any) -> Value:
        """Call an LLVM intrinsic or external function by name."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(function, args, **kwargs)

    def fadd(self, a: Value, b: Value) -> Value:
        return self.b.fadd(a, b)

    def fsub(self, a: Value, b: Value) -> Value:
        return self.b.fsub(a, b)

    def fmul(self, a: Value, b: Value) -> Value:
        return self.b.fmul(a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once. Scalars or vectors of float32."""
        return self.call(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def fmax(self, a: Value, b: Value) -> Value:
        """Lane-wise maximum. A NaN lane gives the other operand or NaN, as the CPU likes."""
        return self.call(f"llvm.maxnum.{_suffix(a.type)}", a.type, a, b, fastmath=("nnan", "nsz"))

    def fabs(self, a: Value) -> Value:
        return self.call(f"llvm.fabs.{_suffix(a.type)}", a.type, a)

    def rint(self, a: Value) -> Value:
        """Round to the nearest integer, ties to even; the result is still float."""
        return self.call(f"llvm.rint.{_suffix(a.type)}", a.type, a)

    def to_f32(self, a: Value) -> Value:
        """<16 x i32> (signed) to <16 x float>."""
        return self.b.sitofp(a, F32X16)

    def reduce_add(self, vector: Value) -> Value:
        """Sum of the lanes in a fixed tree order (halves folded onto each other)."""
        return self._fold(vector, self.b.fadd if vector.type.element == F32 else self.b.add)

    def reduce_max(self, vector: Value) -> Value:
        """Largest lane of a float vector; NaNs as in `fmax`."""
        return self._fold(vector, self.fmax)

    def _fold(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        count = vector.type.count
        while count > 1:
            count //= 2
            vector = combine(self.part(vector, 0, count), self.part(vector, count, count))
        return self.b.extract_element(vector, self.const(0, I32))

    def part(self, vector: Value, start: int, count: int) -> Value:
        """Lanes start .. start + count of a vector, as a vector."""
        mask = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
        return self.b.shuffle_vector(vector, vector, mask)

    def concat(self, a: Value, b: Value) -> Value:
        """The lanes of a, then those of b (same type)."""
        mask = ir.Constant(ir.VectorType(I32, 2 * a.type.count), list(range(2 * a.type.count)))
        return self.b.shuffle_vector(a, b, mask)

    def shift_right(self, vector: Value, bits: int) -> Value:
        """Logical right shift of each i32 lane; negative bits shift left."""
        if bits < 0:
            return self.b.shl(vector, self.splat_i32(-bits))
        return self.b.lshr(vector, self.splat_i32(bits)) if bits else vector

    def call_family(
        self, emit: Callable[..., None], kind: int, variant: int, values: Sequence[Value]
    ) -> None:
        """Call `emit(x, kind, variant, *values)` as a function of int64, made when first called."""
        module = self.b.module
        name = f"{emit.__module__}.{emit.__qualname__}.{kind}.{variant}"
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * len(values)), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit(Emitter(inner), kind, variant, *function.args)
            inner.ret_void()
        self.b.call(function, values)

    # -- control --------------------------------------------------------------------------------------

    def loop(
        self, count: Value | int, init: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """Run `body(i, carried) -> carried` for i = 0 .. count - 1 and return what was carried last.

        Runs at least once: guard a count that may be 0 with `loop_maybe`.
        """
        b = self.b
        before, head = b.block, b.append_basic_block("loop")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        carried = [b.phi(v.type) for v in init]
        results = list(body(index, carried))
        assert len(results) == len(carried), "a loop body returns as many values as it receives"
        following = b.add(index, self.const(1))
        done = b.append_basic_block("done")
        limit = self.const(count) if isinstance(count, int) else count
        last = b.block
        b.cbranch(b.icmp_signed("<", following, limit), head, done)
        index.add_incoming(self.const(0), before)
        index.add_incoming(following, last)
        for phi, first, next_ in zip(carried, init, results, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_, last)
        b.position_at_end(done)
        return results

    def loop_maybe(
        self, count: Value, init: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """`loop`, for a count that may be 0: then `init` comes back."""
        b = self.b
        before, run, done = b.block, b.append_basic_block("some"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed(">", count, self.const(0)), run, done)
        b.position_at_end(run)
        results = self.loop(count, init, body)
        last = b.block
        b.branch(done)
        b.position_at_end(done)
        merged = [b.phi(v.type) for v in init]
        for phi, first, result in zip(merged, init, results, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(result, last)
        return merged


def _suffix(type: ir.Type) -> str:
    """The name part of an LLVM intrinsic for float32 scalars and vectors: f32, v16f32, …"""
    return f"v{type.count}f32" if isinstance(type, ir.VectorType) else "f32"


def kernel(emit: Callable[..., Any] | None = None, *, returns: types.Type = types.void) -> Any:
    """Turn `emit(x, *values)` into a function that njit code calls with one tuple of int64.

    The instructions are inlined at the call. With `@kernel(returns=types.float32)` the emitting function
    returns the IR value of that numba type.
    """
    if emit is None:
        return lambda f: kernel(f, returns=returns)

    @intrinsic
    def emitted(typing_context, args):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            unpacked = [builder.extract_value(values[0], i) for i in range(len(args))]
            result = emit(Emitter(builder), *unpacked)
            return context.get_dummy_value() if returns is types.void else result

        return returns(types.UniTuple(types.int64, len(args))), codegen

    return emitted


def kernel_family(emit: Callable[..., None]) -> Any:
    """Like `kernel`, for code that depends on two integers known at compile time.

    `emit(x, kind, variant, *values)`; njit code calls `k(kind, variant, (value, …))` where `kind` and
    `variant` are integer literals, globals or closure variables. (A closure over an intrinsic itself would
    defeat numba's disk cache, one over an int does not.) The code becomes one function per (kind, variant)
    in the calling module, called rather than inlined, so that large kernels compile in linear time.
    """

    @intrinsic(prefer_literal=True)
    def emitted(typing_context, kind, variant, args):  # type: ignore[no-untyped-def]
        if not isinstance(kind, types.IntegerLiteral) or not isinstance(variant, types.IntegerLiteral):
            return None
        count = len(args)

        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            unpacked = [builder.extract_value(values[2], i) for i in range(count)]
            Emitter(builder).call_family(emit, kind.literal_value, variant.literal_value, unpacked)
            return context.get_dummy_value()

        return types.void(kind, variant, types.UniTuple(types.int64, count)), codegen

    return emitted


@intrinsic
def call_address(typing_context, address, args):  # type: ignore[no-untyped-def]
    """Call the C function `void(int64, …)` at an address with a tuple of int64: `call_address(f, (a, b))`."""
    count = len(args)

    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        function_type = ir.FunctionType(ir.VoidType(), [I64] * count)
        function = builder.inttoptr(values[0], function_type.as_pointer())
        builder.call(function, [builder.extract_value(values[1], i) for i in range(count)])
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), codegen
