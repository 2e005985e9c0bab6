"""Where the keys and values of a block lie in the pools, and how their codes become floats.

A part is what one KV head has of a block. Keys are stored so that a vector holds 16 tokens, values so that
it holds 16 dimensions; scales follow the codes, those of 16 tokens side by side:

            keys of a part                   values of a part                 scales of a part, halfs
    f16     [dimension][16 tokens] half      [16 tokens][dimension] half
    fp8     [dimension][16 tokens] E4M3      [16 tokens][dimension] E4M3      [16 tokens]
    q8_0    [dimension][16 tokens] int8      [16 tokens][dimension] int8      [dimension / 32][16 tokens]

which are 16 * kv_format.row_bytes(kv_type, dim) bytes. Keys and values have their own formats.

The scale of 16 tokens is a vector: it multiplies the scores of a block once they are summed over the
dimension (q8_0: over 32 of them), and the weights of a block before its values are summed.
"""

from __future__ import annotations

from backends.cpu.simd import F16X16, F32X16, I8X16, I16X16, Emitter, Value, ir
from backends.kv_format import KV_TYPES, Q8_BLOCK, row_bytes

F16, FP8, Q8_0 = range(len(KV_TYPES))  # as in kernels and in parameters
FORMATS = {name: number for number, name in enumerate(KV_TYPES)}
TOKENS = 16  # of a block
SCALE_ROW_BYTES = 2 * TOKENS

# The bits of an E4M3 number, moved 7 places up, are a half whose exponent is 8 too small; denormals too.
FP8_FACTOR = 2.0**8


def part_bytes(kv_type: str, dim: int) -> int:
    """Bytes of the keys or the values of a block of one KV head. ValueError as row_bytes."""
    return TOKENS * row_bytes(kv_type, dim)


def load_codes(x: Emitter, kind: int, address: Value, offset: Value | int = 0) -> Value:
    """16 codes as <16 x float>, which times what `load_scales` gives are what they stand for."""
    if kind == F16:
        return x.load_f16(address, offset)
    codes = x.load(address, offset, I8X16)
    if kind == Q8_0:
        return x.b.sitofp(codes, F32X16)
    moved = x.b.shl(x.b.sext(codes, I16X16), ir.Constant(I16X16, [7] * 16))
    bits = x.b.and_(moved, ir.Constant(I16X16, [0xBFFF - 0x10000] * 16))  # the sign came along twice
    return x.b.fpext(x.b.bitcast(bits, F16X16), F32X16)


def load_scales(x: Emitter, kind: int, address: Value, offset: Value | int = 0) -> Value:
    """The scales of 16 tokens as <16 x float>, times what `load_codes` leaves out."""
    scales = x.load_f16(address, offset)
    return x.fmul(scales, x.splat_f32(FP8_FACTOR)) if kind == FP8 else scales


__all__ = [
    "F16",
    "FORMATS",
    "FP8",
    "Q8_0",
    "Q8_BLOCK",
    "SCALE_ROW_BYTES",
    "TOKENS",
    "load_codes",
    "load_scales",
    "part_bytes",
]
