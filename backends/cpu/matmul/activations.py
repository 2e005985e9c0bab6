"""Activations as 8-bit integers, or as they are, in the order in which the tiles read them.

There are three kinds. BLOCKWISE has one scale for 32 activations and serves the formats of 32-weight blocks,
SUPERBLOCKWISE one for 256 and serves the K formats; FLOATS, for weights that are floats, is float32 with one
region of 32 words. Below, "block" is 32 or 256 of them. Tokens are cut into
tiles of up to 8 (`tile_size`). The buffer has four regions, each for all tokens; in a region with
w words of 4 bytes for one block of one token, the tile of T tokens that starts at token t0 has its words at

    4 w (t0 blocks + T block) + 4 (T word + t)       t = 0 .. T - 1: the token in its tile

    region  BLOCKWISE                           SUPERBLOCKWISE
    0       8 words: 4 codes each, i8           64 words: 4 codes each, i8
    1       scale, f32                          scale, f32
    2       scale * sum of the codes, f32       4 words: sums of 32 codes, two i16 each
    3       -128 * (sum of the codes), i32      16 words: -32 * (sum of 16 codes), i32

A code is x / scale rounded to nearest, ties to even; scale = max |x| / 127. A block whose largest magnitude
is below 2^-100 counts as zero; an infinity or a NaN makes the scale one, and so the token's outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import njit

from backends.cpu import jit  # noqa: F401  (sets numba's cache folder)
from backends.cpu.features import cpu_level
from backends.cpu.matmul.layout import BLOCKWISE, FLOATS, SUPERBLOCKWISE, Format, Scaling
from backends.cpu.simd import F32, I8X16, I32, I32X16, LANES, Emitter, Value, kernel

TOKEN_BLOCK = 174  # tokens that pass over a panel together, a third of 512; tiles do not straddle it
# what 16 registers of 256 bits hold, or 32 of 512
LARGEST_TILE = 8 if cpu_level() == "avx512_vnni" else 2
BLOCK_ELEMENTS = (32, 256, 32)  # by kind
REGION_BYTES = ((32, 4, 4, 4), (256, 4, 16, 64), (128, 0, 0, 0))  # of one block of one token, by kind

_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it leaves the rounded integer in the low bits
_ROUNDER_BITS = 0x4B400000
_TINY = 2.0**-100  # 127 / _TINY is finite


def activation_nbytes(kind: int, n_tokens: int, k: int) -> int:
    """Bytes of the quantized activations of n_tokens rows of k, a multiple of the kind's block."""
    return n_tokens * (k // BLOCK_ELEMENTS[kind]) * sum(REGION_BYTES[kind])


def sum_region(fmt: Format) -> int:
    """The region with the sums that a format reads."""
    return 2 if fmt.scaling in (Scaling.AFFINE, Scaling.K_AFFINE) else 3


@njit(cache=True)
def tile_size(token: int, n_tokens: int) -> int:
    """Tokens in the tile that starts at `token`."""
    end = min(n_tokens, (token // TOKEN_BLOCK + 1) * TOKEN_BLOCK)
    left = end - token
    if LARGEST_TILE == 2:
        return min(left, 2)
    if left == 8 or left == 16:
        return 8
    if left == 7:
        return 4
    if left == 5:
        return 3
    return min(left, 6)


def _scale_of(x: Emitter, values: list[Value]) -> tuple[Value, Value]:
    """(scale, its inverse) of a block's vectors."""
    b = x.b
    largest = [b.and_(b.bitcast(v, I32X16), x.splat_i32(0x7FFFFFFF)) for v in values]
    while len(largest) > 1:  # as integers, a NaN is the largest of all
        pairs = zip(largest[::2], largest[1::2], strict=True)
        largest = [x.call("llvm.umax.v16i32", I32X16, first, second) for first, second in pairs]
    bits = x.call("llvm.vector.reduce.umax.v16i32", I32, largest[0])
    top = b.bitcast(bits, F32)
    tiny = b.fcmp_ordered("<=", top, x.f32(_TINY))
    normal = b.and_(b.not_(tiny), b.fcmp_ordered("<", top, x.f32(float("inf"))))
    inverse = b.select(normal, b.fdiv(x.f32(127.0), top), x.f32(0.0))
    return b.select(tiny, x.f32(0.0), b.fdiv(top, x.f32(127.0))), inverse


def _quantize_block(x: Emitter, kind: int, values: list[Value], out: list[Value], tile: Value) -> None:
    """Quantize one token's block of vectors; `out` has the addresses of the token's words in the regions."""
    b = x.b
    codes, scale_at, third, fourth = out
    stride = x.mul(tile, 4)
    scale, inverse = _scale_of(x, values)
    factor = x.splat(inverse)
    numbers = []
    for v in values:
        rounded = b.bitcast(x.fma(v, factor, x.splat_f32(_ROUNDER)), I32X16)
        words = b.bitcast(b.trunc(rounded, I8X16), ir.VectorType(I32, 4))
        for word in range(4):
            x.store(b.extract_element(words, x.const(word, I32)), codes, align=4)
            codes = x.add(codes, stride)
        numbers.append(b.sub(rounded, x.splat_i32(_ROUNDER_BITS)))
    x.store(scale, scale_at, align=4)
    if kind == BLOCKWISE:
        total = x.reduce_add(b.add(*numbers))
        x.store(b.fmul(scale, b.sitofp(total, F32)), third, align=4)
        x.store(b.mul(total, x.const(-128, I32)), fourth, align=4)
        return
    sums = [x.reduce_add(v) for v in numbers]  # of 16 codes
    totals = [b.add(first, second) for first, second in zip(sums[::2], sums[1::2], strict=True)]  # of 32
    for low, high in zip(totals[::2], totals[1::2], strict=True):
        pair = b.or_(b.and_(low, x.const(0xFFFF, I32)), b.shl(high, x.const(16, I32)))
        x.store(pair, third, align=4)
        third = x.add(third, stride)
    for total in sums:
        x.store(b.mul(total, x.const(-32, I32)), fourth, align=4)
        fourth = x.add(fourth, stride)


def _store_floats(x: Emitter, values: list[Value], out: Value, tile: Value) -> None:
    """One token's block of vectors as they are, a word for each element."""
    stride = x.mul(tile, 4)
    for v in values:
        for lane in range(LANES):
            x.store(x.b.extract_element(v, x.const(lane, I32)), out, align=4)
            out = x.add(out, stride)


def emit_token(
    x: Emitter,
    kind: int,
    load: Callable[[Value], Value],
    out: list[Value],
    tile: Value,
    first: Value,
    count: Value,
) -> None:
    """Quantize `count` blocks of one token from block `first`; `load(i)` gives elements 16 i .. 16 i + 15.

    `out` has the addresses of the token's block 0 in the regions.
    """
    vectors = BLOCK_ELEMENTS[kind] // LANES
    steps = [x.mul(tile, nbytes) for nbytes in REGION_BYTES[kind]]
    start = [x.add(address, x.b.mul(step, first)) for address, step in zip(out, steps, strict=True)]

    def block(i: Value, addresses: list[Value]) -> list[Value]:
        index = x.mul(x.add(first, i), vectors)
        values = [load(x.add(index, v)) for v in range(vectors)]
        if kind == FLOATS:
            _store_floats(x, values, addresses[0], tile)
        else:
            _quantize_block(x, kind, values, addresses, tile)
        return [x.add(address, step) for address, step in zip(addresses, steps, strict=True)]

    x.loop(count, start, block)


def _plain(kind: int) -> Callable[..., None]:
    def emit(x: Emitter, source: Value, tile: Value, first: Value, count: Value, *out: Value) -> None:
        emit_token(x, kind, lambda i: x.load(source, x.mul(i, 64)), list(out), tile, first, count)

    return emit


_quantize_blocks = kernel(_plain(BLOCKWISE))
_quantize_superblocks = kernel(_plain(SUPERBLOCKWISE))
_arrange_floats = kernel(_plain(FLOATS))


@njit(cache=True)
def region_addresses(kind, out, token, tile_start, n_tokens, k):
    """Addresses of a token's block 0 in the four regions of the buffer `out`."""
    blocks = k // BLOCK_ELEMENTS[kind]
    first, second, third, fourth = REGION_BYTES[kind]
    lane, before, all_ = 4 * (token - tile_start), tile_start * blocks, n_tokens * blocks
    codes = out + first * all_
    return (
        out + first * before + lane,
        codes + second * before + lane,
        codes + second * all_ + third * before + lane,
        codes + (second + third) * all_ + fourth * before + lane,
    )


@njit(cache=True)
def thread_share(n_tokens, blocks, token, ith, nth):
    """The blocks (first, count) of a token that thread `ith` of `nth` quantizes."""
    total = n_tokens * blocks
    begin, end = total * ith // nth, total * (ith + 1) // nth
    first = min(max(begin - token * blocks, 0), blocks)
    return first, min(max(end - token * blocks, 0), blocks) - first


@njit(nogil=True, cache=True)
def quantize_activations(kind, source, row_bytes, n_tokens, k, out, ith, nth):
    """Quantize float32 rows at address `source`, `row_bytes` apart, into the buffer at `out`.

    n_tokens rows of k, a multiple of the kind's block. Thread `ith` of `nth` does its share; together they
    fill `activation_nbytes(kind, n_tokens, k)` bytes. All arguments are int64.
    """
    start = 0
    while start < n_tokens:
        size = tile_size(start, n_tokens)
        for token in range(start, start + size):
            first, count = thread_share(n_tokens, k // BLOCK_ELEMENTS[kind], token, ith, nth)
            if count > 0:
                one, two, three, four = region_addresses(kind, out, token, start, n_tokens, k)
                arguments = (source + token * row_bytes, size, first, count, one, two, three, four)
                if kind == FLOATS:
                    _arrange_floats(arguments)
                elif kind == BLOCKWISE:
                    _quantize_blocks(arguments)
                else:
                    _quantize_superblocks(arguments)
        start += size
