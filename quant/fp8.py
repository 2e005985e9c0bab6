"""FP8 numbers of 4 exponent and 3 mantissa bits, and rows of them that share a scale, in plain numpy.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433: E4M3. There are no infinities,
0x7f and 0xff are NaN, all else is a number:

    bit 7      6..3           2..0
    s (sign)   e (exponent)   m (mantissa)      e > 0: (-1)^s 2^(e - 7) (1 + m / 8), at most 448
                                                e = 0: (-1)^s 2^-6 m / 8

A row of keys or values is kept as codes and one scale, a half: value = scale x code.
"""

from __future__ import annotations

import numpy as np

LARGEST = 448.0
NAN = 0x7F
SMALLEST_SCALE = 2.0**-24  # the smallest half above 0
_SMALLEST_NORMAL = 2.0**-6
_DENORMALS_PER_ONE = 2.0**9


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """float [...] to uint8 [...], rounded to nearest, ties to even.

    Saturates: what is beyond the largest number, infinities included, becomes that. NaN stays NaN.
    """
    x = np.ascontiguousarray(values, np.float32)
    bits = x.view(np.uint32)
    sign = (bits >> 24 & 0x80).astype(np.uint8)
    size = np.minimum(np.abs(x), np.float32(LARGEST))  # NaN stays
    bits = size.view(np.uint32)
    # 23 mantissa bits to 3, ties to even; a carry goes into the exponent, whose bias changes from 127 to 7
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    denormal = np.rint(np.where(size < _SMALLEST_NORMAL, size, 0) * np.float32(_DENORMALS_PER_ONE))
    codes = np.where(size < _SMALLEST_NORMAL, denormal.astype(np.uint32), normal).astype(np.uint8)
    return sign | np.where(np.isnan(x), np.uint8(NAN), codes)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 [...] to float32 [...], exactly."""
    return _DECODED[codes]


def encode_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [n, dim] to codes uint8 [n, dim] and scales float16 [n].

    The scale is the largest magnitude / 448, so that the largest value is met as exactly as the scale,
    and at least SMALLEST_SCALE. Values are first limited to what a half can hold. They must not be NaN.
    """
    x = np.clip(np.asarray(values, np.float32), np.float32(-65504), np.float32(65504))
    largest = np.abs(x).max(axis=1)
    scales = np.maximum((largest / np.float32(LARGEST)).astype(np.float16), np.float16(SMALLEST_SCALE))
    inverse = np.float32(1) / scales.astype(np.float32)
    return encode_e4m3(x * inverse[:, None]), scales


def decode_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes uint8 [n, dim] and scales float16 [n] to float32 [n, dim]."""
    return decode_e4m3(codes) * scales.astype(np.float32)[:, None]


def _table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa / 8), _SMALLEST_NORMAL * mantissa / 8)
    size[codes & NAN == NAN] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


_DECODED = _table()

__all__ = ["LARGEST", "NAN", "decode_e4m3", "decode_rows", "encode_e4m3", "encode_rows"]
