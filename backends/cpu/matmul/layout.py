"""Packed weights: the layout in memory of each format that our matmul reads.

A matrix W[m][k] is cut into panels of 32 rows; a panel is a run of superblocks along k, each a header and its
blocks of 32 weights per row. The unit is the word: 4 weights of one row that follow each other along k. Row r
of the panel has its share of every vector at a fixed place, so that one 64-byte register holds the same word
of 16 rows, and a dot-product instruction moves 16 rows on by 4 k:

    plane of words    byte 128 j + 4 r + i belongs to row r, weight 4j + i of the block

    nibbles   512 B   words j = 0 .. 3; low nibble: weight 4j + i, high nibble: weight 4j + i + 16
    bytes    1024 B   words j = 0 .. 7
    bit 5     128 B   one word a row; bit j of byte i is bit 4 of weight 4j + i
    bits 5-6  256 B   words v = 0, 1; bits 2s, 2s + 1 of byte i are bits 4, 5 of weight 16v + 4s + i
    half       64 B   one f16 a row, row r at 2r
    brain      64 B   one bf16 a row, row r at 2r
    bytes[s]  32s B   one byte a row and sub-block, row r at 32 s + r
    lines    2048 B   f16 or bf16, weight j of row r at 64 j + 2 r (f32: 4096 B, at 128 j + 4 r)
    pairs     256 B   one byte a row and sub-block, row r at 64 (s / 2) + 2 r + s % 2

    format  header                                       block                   weight
    Q4_0    half d                                       nibbles                 d (q - 8)
    Q4_1    half d, half m                               nibbles                 d q + m
    Q5_0    half d                                       nibbles, bit 5          d (q - 16)
    Q5_1    half d, half m                               nibbles, bit 5          d q + m
    Q8_0    half d                                       bytes (q ^ 0x80)        d (q - 128)
    Q4_K    half d, half dmin, bytes[8] s, pairs m       8 x nibbles             d s q - dmin m
    Q5_K    half d, half dmin, bytes[8] s, pairs m       8 x nibbles, bit 5      d s q - dmin m
    Q6_K    half d, bytes[16] s (signed)                 8 x nibbles, bits 5-6   d s (q - 32)
    IQ4_NL  half d                                       nibbles                 d LEVELS[q]
    IQ4_XS  half d, bytes[8] s (signed)                  8 x nibbles             d s LEVELS[q]
    MXFP4   brain d                                      nibbles                 d FP4_LEVELS[q]
    F16, BF16, F32                                       lines                   w

The 6-bit scales and mins of Q4_K, Q5_K and IQ4_XS take a byte each (+2.8 %, +2.3 %, +1.5 %), the exponent of
MXFP4 two, as the power of two that it stands for (+5.9 %); the rest is as large as in the file.
Rows after the last one are zero.

A panel's part can be unpacked to a scratch buffer, for use by many tokens. Float vectors are [32]:

    Q4_0, Q5_0, IQ4_NL  each block: float d, 8 words of bytes (IQ4: LEVELS[q] + 128)
    MXFP4               each block: float d, 8 words of bytes (FP4_LEVELS[q] + 16)
    Q4_1, Q5_1          each block: float d, float m, 8 words of bytes
    Q4_K, Q5_K          float s[8], float d, float dmin, pairs m in i16, 64 words of bytes
    Q6_K, IQ4_XS        float s[16] or s[8], float d, 64 words of bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quant.blocks import FP4_LEVELS
from quant.kquants import LEVELS
from quant.types import GGML_TYPES

PANEL_ROWS = 32
BLOCK = 32  # weights of a row that share a scale (Q6_K: 16)


class Scaling(Enum):
    """How a block's integer dot product becomes a float; decides which activation sums are read."""

    OFFSET = "d (q - offset)"
    AFFINE = "d q + m"
    K_AFFINE = "d s q - dmin m"
    K_OFFSET = "d s (q - 32), one s for each 16 weights"
    K_LEVELS = "d s (q - 128)"
    FLOAT = "w"


# kinds of activations: one scale for 32, for 256, or float32
BLOCKWISE, SUPERBLOCKWISE, FLOATS = range(3)


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: what a file's block holds, and how ours is laid out (bytes per 32 rows)."""

    type_id: int
    name: str
    bits: int  # of a code: 4, 5, 6 or 8; of a float: 16 or 32
    scaling: Scaling
    offset_bits: int  # log2 of the codes' offset; 0 where there is none
    blocks: int  # blocks of 32 weights in a superblock
    header_bytes: int
    code_bytes: int  # of one block

    @property
    def elements(self) -> int:
        """Weights of a row in a superblock."""
        return self.blocks * BLOCK

    @property
    def levels(self) -> tuple[int, ...]:
        """What the nibbles 0 .. 15 stand for; empty where they are numbers."""
        table = {IQ4_NL: LEVELS, IQ4_XS: LEVELS, MXFP4: FP4_LEVELS}.get(self.type_id, ())
        return tuple(int(level) for level in table)

    @property
    def activation_kind(self) -> int:
        """Which quantized activations the format multiplies."""
        if self.scaling is Scaling.FLOAT:
            return FLOATS
        return BLOCKWISE if self.blocks == 1 else SUPERBLOCKWISE

    @property
    def raw_bytes(self) -> int:
        """Bytes of one row's superblock in the file."""
        file = GGML_TYPES[self.type_id]
        return self.elements // file.elements * file.nbytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of a panel's superblock."""
        return self.header_bytes + self.blocks * self.code_bytes

    @property
    def unpacked_header_bytes(self) -> int:
        """Bytes before the codes of an unpacked superblock."""
        return {
            Scaling.OFFSET: 128,
            Scaling.AFFINE: 256,
            Scaling.K_AFFINE: (8 + 2 + 4) * 128,
            Scaling.K_OFFSET: (16 + 1) * 128,
            Scaling.K_LEVELS: (8 + 1) * 128,
            Scaling.FLOAT: 0,
        }[self.scaling]

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of an unpacked superblock of a panel."""
        return self.unpacked_header_bytes + self.elements * PANEL_ROWS


Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 12, 13, 14
IQ4_NL, IQ4_XS, MXFP4, F32, F16, BF16 = 20, 23, 39, 0, 1, 30

FORMATS = {
    f.type_id: f
    for f in (
        Format(Q4_0, "Q4_0", 4, Scaling.OFFSET, 3, 1, 64, 512),
        Format(Q4_1, "Q4_1", 4, Scaling.AFFINE, 0, 1, 128, 512),
        Format(Q5_0, "Q5_0", 5, Scaling.OFFSET, 4, 1, 64, 640),
        Format(Q5_1, "Q5_1", 5, Scaling.AFFINE, 0, 1, 128, 640),
        Format(Q8_0, "Q8_0", 8, Scaling.OFFSET, 7, 1, 64, 1024),
        Format(Q4_K, "Q4_K", 4, Scaling.K_AFFINE, 0, 8, 640, 512),
        Format(Q5_K, "Q5_K", 5, Scaling.K_AFFINE, 0, 8, 640, 640),
        Format(Q6_K, "Q6_K", 6, Scaling.K_OFFSET, 5, 8, 576, 768),
        Format(IQ4_NL, "IQ4_NL", 4, Scaling.OFFSET, 7, 1, 64, 512),
        Format(IQ4_XS, "IQ4_XS", 4, Scaling.K_LEVELS, 7, 8, 320, 512),
        Format(MXFP4, "MXFP4", 4, Scaling.OFFSET, 4, 1, 64, 512),
        Format(F16, "F16", 16, Scaling.FLOAT, 0, 1, 0, 2048),
        Format(BF16, "BF16", 16, Scaling.FLOAT, 0, 1, 0, 2048),
        Format(F32, "F32", 32, Scaling.FLOAT, 0, 1, 0, 4096),
    )
}

# bytes of a panel's superblock here / of 32 rows' blocks in the file
for _name, _id, _packed, _raw in (
    ("Q4_0", Q4_0, 576, 576),
    ("Q4_1", Q4_1, 640, 640),
    ("Q5_0", Q5_0, 704, 704),
    ("Q5_1", Q5_1, 768, 768),
    ("Q8_0", Q8_0, 1088, 1088),
    ("Q4_K", Q4_K, 4736, 4608),
    ("Q5_K", Q5_K, 5760, 5632),
    ("Q6_K", Q6_K, 6720, 6720),
    ("IQ4_NL", IQ4_NL, 576, 576),
    ("IQ4_XS", IQ4_XS, 4416, 4352),
    ("MXFP4", MXFP4, 576, 544),
    ("F16", F16, 2048, 2048),
    ("BF16", BF16, 2048, 2048),
    ("F32", F32, 4096, 4096),
):
    _format, _file = FORMATS[_id], GGML_TYPES[_id]
    assert (_format.name, _format.packed_bytes) == (_name, _packed)
    assert _format.raw_bytes * PANEL_ROWS == _raw and _format.elements % _file.elements == 0
    assert _packed % 64 == 0  # every superblock starts a cache line


def packed_nbytes(type_id: int, m: int, k: int) -> int:
    """Bytes of a packed m x k matrix; k is a multiple of the format's superblock."""
    fmt = FORMATS[type_id]
    return -(-m // PANEL_ROWS) * (k // fmt.elements) * fmt.packed_bytes
