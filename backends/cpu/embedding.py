"""Rows of a packed matrix as floats: a model whose output head is its embedding matrix then has it once."""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.matmul.drive import SCRATCH_BYTES
from backends.cpu.matmul.layout import BF16, BLOCK, F16, FORMATS, PANEL_ROWS, Format, Scaling
from backends.cpu.matmul.unpack import unpack_superblocks
from backends.cpu.simd import F16 as HALF
from backends.cpu.simd import F32, I8, I16, I32, Emitter, Value, call_address, kernel_family
from backends.cpu.words import load_i32, load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

E_COUNT_AT, E_FUNCTION, E_PACKED, E_K, E_SCRATCH = range(5)  # words of the operator's parameters
NUM_PARAMS = 5
LOOKUP_SIGNATURE = "void(" + ", ".join(["int64"] * 5) + ")"

_VECTOR = 128  # bytes of an unpacked header's float [32]
_F32X4 = ir.VectorType(F32, 4)


def _scales(x: Emitter, fmt: Format, header: Value, block: Value, half: int) -> tuple[Value, Value | None]:
    """(factor, what is subtracted) of 16 weights of one row; `header` points at the row's first float.

    The products are those of ggml's dequantize_row, in its order: the floats are the same.
    """

    def vector(index: int | Value) -> Value:
        return x.load(
            header, x.mul(index, _VECTOR) if isinstance(index, ir.Value) else index * _VECTOR, F32, 4
        )

    if fmt.scaling is Scaling.OFFSET:
        return vector(0), None
    if fmt.scaling is Scaling.AFFINE:
        return vector(0), x.b.fneg(vector(1))
    if fmt.scaling is Scaling.K_OFFSET:
        return x.b.fmul(vector(16), vector(x.add(x.mul(block, 2), half))), None
    factor = x.b.fmul(vector(8), vector(block))
    if fmt.scaling is Scaling.K_LEVELS:
        return factor, None
    # pairs of i16 m: sub-blocks 2p and 2p + 1 in vector 10 + p
    at = x.add(x.mul(x.b.lshr(block, x.const(1)), _VECTOR), x.mul(x.b.and_(block, x.const(1)), 2))
    m = x.b.uitofp(x.load(header, x.add(at, 10 * _VECTOR), I16, 2), F32)
    return factor, x.b.fmul(vector(9), m)


def _splat4(x: Emitter, value: Value) -> Value:
    vector = x.b.insert_element(ir.Constant(_F32X4, ir.Undefined), value, x.const(0, I32))
    return x.b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, 4), [0] * 4))


@kernel_family
def copy_row(x: Emitter, kind: int, variant: int, unpacked: Value, row: Value, out: Value) -> None:
    """Row `row` (0 to 31) of an unpacked superblock as floats at `out`. `variant` is unused."""
    fmt = FORMATS[kind]
    header = x.add(unpacked, x.mul(row, 4))
    offset = ir.Constant(_F32X4, [float(1 << fmt.offset_bits if fmt.offset_bits else 0)] * 4)

    def block(i: Value, _: list[Value]) -> list[Value]:
        codes = x.add(x.add(header, fmt.unpacked_header_bytes), x.mul(i, BLOCK * PANEL_ROWS))
        to = x.add(out, x.mul(i, 4 * BLOCK))
        for half in (0, 1):
            factor, less = _scales(x, fmt, header, i, half)
            factors = _splat4(x, factor)
            for word in range(4 * half, 4 * half + 4):
                code = x.load(codes, 128 * word, ir.VectorType(I8, 4), 4)
                values = x.b.fmul(x.b.fsub(x.b.uitofp(code, _F32X4), offset), factors)
                if less is not None:
                    values = x.b.fsub(values, _splat4(x, less))
                x.store(values, to, 16 * word, 4)
        return []

    x.loop(fmt.blocks, [], block)


@kernel_family
def copy_float_row(x: Emitter, kind: int, variant: int, packed: Value, row: Value, out: Value) -> None:
    """The same for 32 weights of a format that is floats. `variant` is unused."""
    element_bytes = FORMATS[kind].bits // 8
    at = x.add(packed, x.mul(row, element_bytes))
    for j in range(BLOCK):
        place = PANEL_ROWS * element_bytes * j
        if kind == F16:
            value = x.b.fpext(x.load(at, place, HALF, 2), F32)
        elif kind == BF16:
            bits = x.b.shl(x.b.zext(x.load(at, place, I16, 2), I32), x.const(16, I32))
            value = x.b.bitcast(bits, F32)
        else:
            value = x.load(at, place, F32, 4)
        x.store(value, out, 4 * j, 4)


@functools.cache
def compiled_lookup(type_id: int):
    """The cfunc that decodes rows of a format; compiled, or loaded from the cache, on first use.

    Called as `lookup(packed, k, row, out, scratch)`, all int64: float32 [k] at `out` is row `row` of the
    packed matrix, as ggml decodes it. `scratch` is matmul.SCRATCH_BYTES (64-aligned).
    """
    fmt = FORMATS[type_id]
    packed_bytes, elements, is_float = fmt.packed_bytes, fmt.elements, fmt.scaling is Scaling.FLOAT
    assert is_float or fmt.unpacked_bytes <= SCRATCH_BYTES

    @cfunc(LOOKUP_SIGNATURE, nopython=True, cache=True)
    def lookup(packed, k, row, out, scratch):
        superblocks = k // elements
        w = packed + row // PANEL_ROWS * superblocks * packed_bytes
        for _ in range(superblocks):
            if is_float:
                copy_float_row(type_id, 0, (w, row % PANEL_ROWS, out))
            else:
                unpack_superblocks(type_id, 0, (w, scratch, np.int64(1)))
                copy_row(type_id, 0, (scratch, row % PANEL_ROWS, out))
            w += packed_bytes
            out += 4 * elements

    return lookup


@njit(nogil=True, cache=True)
def embed_share(params, ids, out, ith, nth):
    """One thread's tokens."""
    k, packed = load_i64((params + 8 * E_K,)), load_i64((params + 8 * E_PACKED,))
    scratch = load_i64((params + 8 * E_SCRATCH,)) + ith * SCRATCH_BYTES
    function = load_i64((params + 8 * E_FUNCTION,))
    for token in range(ith, load_i64((load_i64((params + 8 * E_COUNT_AT,)),)), nth):
        call_address(function, (packed, k, load_i32((ids + 4 * token,)), out + 4 * k * token, scratch))


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def embed_operator(tensor, ith, nth, params):
    """ggml custom operator: int32 token ids [T] -> their rows, float32 [k, T]."""
    ids = load_i64((load_i64((tensor + 8 * WORD_SRC,)) + 8 * WORD_DATA,))
    embed_share(params, ids, load_i64((tensor + 8 * WORD_DATA,)), np.int64(ith), np.int64(nth))


__all__ = ["NUM_PARAMS", "compiled_lookup", "embed_operator"]
