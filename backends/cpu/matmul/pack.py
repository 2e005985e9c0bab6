"""Repack a matrix from the bytes of a GGUF file to the layout of layout.py, at memory speed."""

from __future__ import annotations

from numba import njit, types, uint32

from backends.cpu import jit  # noqa: F401  (sets numba's cache folder)
from backends.cpu.matmul.layout import BF16, F16, F32, IQ4_XS, MXFP4, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from backends.cpu.simd import I8, I16, I32, Emitter, Value, kernel


@kernel(returns=types.uint32)
def _word(x: Emitter, address: Value) -> Value:
    return x.load(address, 0, I32)


@kernel
def _put_word(x: Emitter, address: Value, value: Value) -> None:
    x.store(x.b.trunc(value, I32), address)


@kernel
def _put_byte(x: Emitter, address: Value, value: Value) -> None:
    x.store(x.b.trunc(value, I8), address)


@kernel
def _copy_half(x: Emitter, source: Value, target: Value) -> None:
    x.store(x.load(source, 0, I16), target)


@njit(cache=True)
def _gather_bits(word, i):
    """The bits i, i + 4, … i + 28 of a word as a byte."""
    v = (word >> uint32(i)) & uint32(0x11111111)
    v = (v | (v >> uint32(3))) & uint32(0x03030303)
    v = (v | (v >> uint32(6))) & uint32(0x000F000F)
    return (v | (v >> uint32(12))) & uint32(0xFF)


@njit(cache=True)
def _pack_32(type_id, source, out, row):
    """One row's block: d, [m], [bits], nibbles, or for Q8_0 d, codes."""
    _copy_half((source, out + 2 * row))
    source, out = source + 2, out + 64
    if type_id == Q8_0:
        for j in range(8):
            _put_word((out + 128 * j + 4 * row, _word((source + 4 * j,)) ^ uint32(0x80808080)))
        return
    if type_id in (Q4_1, Q5_1):
        _copy_half((source, out + 2 * row))
        source, out = source + 2, out + 64
    if type_id in (Q5_0, Q5_1):
        bits = _word((source,))
        for i in range(4):
            _put_byte((out + 512 + 4 * row + i, _gather_bits(bits, i)))
        source += 4
    for j in range(4):
        _put_word((out + 128 * j + 4 * row, _word((source + 4 * j,))))


@njit(cache=True)
def _pack_mxfp4(source, out, row):
    """One row's block of MXFP4: exponent e, nibbles. d = 2^(e - 128), which bf16 holds down to e = 0."""
    exponent = _word((source,)) & uint32(255)
    bits = (exponent - uint32(1)) << uint32(7)
    if exponent < 2:  # denormal
        bits = uint32(0x20) << exponent
    _put_byte((out + 2 * row, bits))
    _put_byte((out + 2 * row + 1, bits >> uint32(8)))
    for j in range(4):
        _put_word((out + 64 + 128 * j + 4 * row, _word((source + 1 + 4 * j,))))


@njit(cache=True)
def _put_nibbles(low, high, out):
    """Two words of codes 0..15 into one word of nibbles."""
    _put_word((out, (low & uint32(0x0F0F0F0F)) | ((high & uint32(0x0F0F0F0F)) << uint32(4))))


@njit(cache=True)
def _pack_k_scales(source, out, row):
    """The 12 bytes of 6-bit scales and mins of Q4_K and Q5_K (ggml's get_scale_min_k4), one byte each."""
    low, mid, top = _word((source,)), _word((source + 4,)), _word((source + 8,))
    for s in range(4):
        shift = uint32(8 * s)
        a, b, c = low >> shift, mid >> shift, top >> shift
        minimum = out + 256 + 64 * (s // 2) + 2 * row + s % 2
        _put_byte((out + 32 * s + row, a & uint32(63)))
        _put_byte((minimum, b & uint32(63)))
        _put_byte((out + 32 * (s + 4) + row, (c & uint32(15)) | ((a & uint32(0xC0)) >> uint32(2))))
        _put_byte((minimum + 128, ((c >> uint32(4)) & uint32(15)) | ((b & uint32(0xC0)) >> uint32(2))))


@njit(cache=True)
def _pack_k(type_id, source, out, row):
    """One row's superblock of Q4_K or Q5_K: d, dmin, scales[12], [high bits 32], nibbles[128].

    In the file, nibbles 32c .. 32c + 31 hold block 2c (low) and 2c + 1 (high), and bit s of byte i of the
    high bits belongs to weight i of block s.
    """
    _copy_half((source, out + 2 * row))
    _copy_half((source + 2, out + 64 + 2 * row))
    _pack_k_scales(source + 4, out + 128, row)
    source, out = source + 16, out + 640
    step = 512
    if type_id == Q5_K:
        step = 640
        for s in range(8):
            bits = uint32(0)
            for j in range(8):
                bits |= ((_word((source + 4 * j,)) >> uint32(s)) & uint32(0x01010101)) << uint32(j)
            _put_word((out + step * s + 512 + 4 * row, bits))
        source += 32
    for c in range(4):
        for j in range(4):
            first, second = _word((source + 32 * c + 4 * j,)), _word((source + 32 * c + 4 * j + 16,))
            at = out + 2 * step * c + 128 * j + 4 * row
            _put_nibbles(first, second, at)
            _put_nibbles(first >> uint32(4), second >> uint32(4), at + step)


@njit(cache=True)
def _pack_q6_k(source, out, row):
    """One row's superblock of Q6_K: low[128], high[64], scales i8[16], d.

    In the file, each half of 128 weights has blocks 0..3: block b's weight l has its low nibble in
    low[32 (b % 2) + l], lower half of the byte for b < 2, and its high bits in high[l], bits 2b and 2b + 1.
    """
    _copy_half((source + 208, out + 2 * row))
    for s in range(16):
        _put_byte((out + 64 + 32 * s + row, _word((source + 192 + (s & 12),)) >> uint32(8 * (s & 3))))
    out += 576
    for half in range(2):
        low, high = source + 64 * half, source + 128 + 32 * half
        for b in range(4):
            at = out + 768 * (4 * half + b) + 4 * row
            nibble, pair = uint32(4 * (b // 2)), uint32(2 * b)
            for j in range(4):
                word = low + 32 * (b % 2) + 4 * j
                _put_nibbles(_word((word,)) >> nibble, _word((word + 16,)) >> nibble, at + 128 * j)
            for v in range(2):
                bits = uint32(0)
                for s in range(4):
                    word = _word((high + 16 * v + 4 * s,))
                    bits |= ((word >> pair) & uint32(0x03030303)) << uint32(2 * s)
                _put_word((at + 512 + 128 * v, bits))


@njit(cache=True)
def _pack_iq4_xs(source, out, row):
    """One row's superblock of IQ4_XS: d, high scale bits u16, low scale bits[4], nibbles[128].

    Block b's scale + 32 has its low four bits in nibble b of the low ones, two more in bits 2b and 2b + 1.
    """
    _copy_half((source, out + 2 * row))
    high, low = _word((source + 2,)), _word((source + 4,))
    for b in range(8):
        scale = (low >> uint32(4 * b)) & uint32(15)
        scale |= ((high >> uint32(2 * b)) & uint32(3)) << uint32(4)
        _put_byte((out + 64 + 32 * b + row, scale - uint32(32)))
        for j in range(4):
            word = _word((source + 8 + 16 * b + 4 * j,))
            _put_word((out + 320 + 512 * b + 128 * j + 4 * row, word))


@njit(cache=True)
def _pack_superblock(type_id, source, out, row):
    if type_id in (Q4_K, Q5_K):
        _pack_k(type_id, source, out, row)
    elif type_id == Q6_K:
        _pack_q6_k(source, out, row)
    elif type_id == IQ4_XS:
        _pack_iq4_xs(source, out, row)
    elif type_id == MXFP4:
        _pack_mxfp4(source, out, row)
    elif type_id in (F16, BF16):
        for i in range(32):
            _copy_half((source + 2 * i, out + 64 * i + 2 * row))
    elif type_id == F32:
        for i in range(32):
            _put_word((out + 128 * i + 4 * row, _word((source + 4 * i,))))
    else:
        _pack_32(type_id, source, out, row)


@njit(nogil=True, cache=True)
def pack_panels(type_id, raw_bytes, packed_bytes, superblocks, source, m, out, ith, nth):
    """Repack thread `ith`'s share (of `nth`) of the panels of a matrix; see `pack`."""
    panels = (m + 31) // 32
    for panel in range(panels * ith // nth, panels * (ith + 1) // nth):
        target = out + panel * superblocks * packed_bytes
        rows = min(32, m - 32 * panel)
        if rows < 32:
            for at in range(0, superblocks * packed_bytes, 4):
                _put_word((target + at, uint32(0)))
        for block in range(superblocks):
            for row in range(rows):
                raw = source + ((32 * panel + row) * superblocks + block) * raw_bytes
                _pack_superblock(type_id, raw, target + block * packed_bytes, row)
