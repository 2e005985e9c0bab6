"""Weight codes of a block as bytes in registers, and four-byte dot products by CPU level."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from backends.cpu.features import cpu_level
from backends.cpu.matmul.layout import Format
from backends.cpu.simd import I1, I8X16, I8X64, I32X16, Emitter, Value

GROUPS = 2  # registers of 16 rows in a panel
I8X32, I16X16, I16X32, I32X4, I32X8, I32X32 = (
    ir.VectorType(ir.IntType(bits), n)
    for bits, n in ((8, 32), (16, 16), (16, 32), (32, 4), (32, 8), (32, 32))
)

PerGroup = list[Value]
Words = Iterator[tuple[int, PerGroup]]


def load_words(x: Emitter, address: Value, words: range) -> Words:
    """Words that are stored as bytes: (word, register per group)."""
    for word in words:
        yield word, [x.load(address, 128 * word + 64 * g, I32X16, 64) for g in range(GROUPS)]


def decode_words(x: Emitter, fmt: Format, codes: Value) -> Words:
    """The words of a packed block, one byte a weight. With 6 bits the first four come first."""
    if fmt.bits == 8:
        yield from load_words(x, codes, range(8))
        return
    planes = dict(load_words(x, codes, range(fmt.code_bytes // 128)))
    order = [(word, upper) for word in range(4) for upper in (0, 1)]
    if fmt.bits == 6:
        order.sort(key=lambda pair: pair[1])
    for word, upper in order:
        parts = [x.b.and_(x.shift_right(v, 4 * upper), x.splat_bytes(15)) for v in planes[word]]
        if fmt.bits == 5:
            parts = _with_bits(x, parts, planes[4], word + 4 * upper - 4, 16)
        elif fmt.levels:
            parts = [_look_up(x, fmt, v) for v in parts]
        elif fmt.bits == 6:
            parts = _with_bits(x, parts, planes[4 + upper], 2 * word - 4, 48)
        yield word + 4 * upper, parts


def _with_bits(x: Emitter, parts: PerGroup, plane: PerGroup, shift: int, mask: int) -> PerGroup:
    high = [x.b.and_(x.shift_right(v, shift), x.splat_bytes(mask)) for v in plane]
    return [x.b.or_(low, bits) for low, bits in zip(parts, high, strict=True)]


def _look_up(x: Emitter, fmt: Format, indexes: Value) -> Value:
    """The level plus the format's offset for each byte."""
    table = [level + (1 << fmt.offset_bits) for level in fmt.levels]
    if cpu_level() == "avx512_vnni":
        found = x.call(
            "llvm.x86.avx512.pshuf.b.512", I8X64, ir.Constant(I8X64, table * 4), x.b.bitcast(indexes, I8X64)
        )
        return x.b.bitcast(found, I32X16)
    if cpu_level() == "dotprod":
        quarters = [
            x.call("llvm.aarch64.neon.tbl1.v16i8", I8X16, ir.Constant(I8X16, table), part)
            for part in _bytes_of_quarters(x, indexes)
        ]
        return _join_quarters(x, [x.b.bitcast(part, I32X4) for part in quarters])
    halves = [
        x.call(
            "llvm.x86.avx2.pshuf.b",
            I8X32,
            ir.Constant(I8X32, table * 2),
            x.b.bitcast(x.part(indexes, start, 8), I8X32),
        )
        for start in (0, 8)
    ]
    return x.concat(*(x.b.bitcast(half, I32X8) for half in halves))


def dot_bytes(x: Emitter, total: Value, weights: Value, activations: Value, signed: bool) -> Value:
    """total + the dot product of each lane's four bytes, <16 x i32>; unsigned weights, signed activations.

    With `signed` the weights are the bytes ^ 0x80 of signed ones, and count as signed: for levels where
    u8 * i8 + u8 * i8 would overflow 16 bits. All levels give the same integers.
    """
    level = cpu_level()
    if level == "avx512_vnni":  # LLVM 22 takes vectors of bytes, and still reads this older form
        return x.call("llvm.x86.avx512.vpdpbusd.512", I32X16, total, weights, activations)
    if level == "dotprod":
        return _dot_neon(x, total, weights, activations, signed)
    halves = []
    for start in (0, 8):
        part, w, a = (x.part(v, start, 8) for v in (total, weights, activations))
        if level == "avx_vnni":
            halves.append(x.call("llvm.x86.avx512.vpdpbusd.256", I32X8, part, w, a))
        else:
            halves.append(_dot_avx2(x, part, w, a, signed))
    return x.concat(*halves)


def _dot_avx2(x: Emitter, total: Value, weights: Value, activations: Value, signed: bool) -> Value:
    """Pairs of products in 16 bits: at most 2 * 63 * 127 unsigned, 2 * 128 * 127 signed."""
    weights, activations = x.b.bitcast(weights, I8X32), x.b.bitcast(activations, I8X32)
    if signed:
        q = x.b.xor(weights, ir.Constant(I8X32, [-128] * 32))
        weights = x.call("llvm.abs.v32i8", I8X32, q, x.const(0, I1))
        activations = x.call("llvm.x86.avx2.psign.b", I8X32, activations, q)
    pairs = x.call("llvm.x86.avx2.pmadd.ub.sw", I16X16, weights, activations)
    return x.b.add(total, x.call("llvm.x86.avx2.pmadd.wd", I32X8, pairs, ir.Constant(I16X16, [1] * 16)))


def counts_as_signed(fmt: Format) -> bool:
    """Whether a format's codes go to `dot_bytes` as signed ones, and need no correction for an offset."""
    return fmt.offset_bits == 7 and cpu_level() in ("avx2", "dotprod")


def _dot_neon(x: Emitter, total: Value, weights: Value, activations: Value, signed: bool) -> Value:
    """Signed times signed: codes below 128 are the same either way."""
    quarters = []
    for i, (w, a) in enumerate(
        zip(_bytes_of_quarters(x, weights), _bytes_of_quarters(x, activations), strict=True)
    ):
        if signed:
            w = x.b.xor(w, ir.Constant(I8X16, [-128] * 16))
        quarters.append(x.call("llvm.aarch64.neon.sdot.v4i32.v16i8", I32X4, x.part(total, 4 * i, 4), w, a))
    return _join_quarters(x, quarters)


def _bytes_of_quarters(x: Emitter, vector: Value) -> list[Value]:
    return [x.b.bitcast(x.part(vector, start, 4), I8X16) for start in range(0, 16, 4)]


def _join_quarters(x: Emitter, quarters: list[Value]) -> Value:
    return x.concat(x.concat(*quarters[:2]), x.concat(*quarters[2:]))


def dot_pairs(x: Emitter, total: Value, mins: Value, sums: Value) -> Value:
    """total + the dot product of each lane's two i16; `mins` is <32 x i16>, `sums` <16 x i32>."""
    if cpu_level() == "avx512_vnni":
        return x.call("llvm.x86.avx512.vpdpwssd.512", I32X16, total, x.b.bitcast(mins, I32X16), sums)
    sums = x.b.bitcast(sums, I16X32)
    if cpu_level() == "dotprod":
        products = x.b.mul(x.b.sext(mins, I32X32), x.b.sext(sums, I32X32))
        even, odd = (
            x.b.shuffle_vector(products, products, ir.Constant(I32X16, list(range(i, 32, 2)))) for i in (0, 1)
        )
        return x.b.add(total, x.b.add(even, odd))
    halves = [
        x.call("llvm.x86.avx2.pmadd.wd", I32X8, x.part(mins, 16 * half, 16), x.part(sums, 16 * half, 16))
        for half in (0, 1)
    ]
    return x.b.add(total, x.concat(*halves))
