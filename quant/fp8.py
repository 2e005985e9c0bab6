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
PEAKS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)  # what a row's largest value may become
SPLIT = 2.0**20 + 1  # leaves 4 of 24 bits
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

    The scale is the largest magnitude divided by that of PEAKS with the least squared error; the first of
    equals. It is at least SMALLEST_SCALE. Values are first limited to what a half can hold. They must not
    be NaN. The CPU's kernel adds in the same order and gives the same bits.

    What was tried (`tests/bench/fp8_scales.py`): rms error of the outputs of attention, and the mean KL
    divergence of attention's weights, with coded keys; rms error with coded values. Of all heads of
    SmolLM2-135M, gemma-3-270m over 768 tokens of README.md:

                                        keys                            values
        largest / 448                   4.9 %, 3.4e-3  4.5 %, 2.9e-3    1.7 %   1.7 %
        a power of two                  6.3 %, 6.0e-3  5.1 %, 3.6e-3    1.9 %   1.9 %
        the best of 4 PEAKS             4.1 %, 2.4e-3  4.2 %, 2.4e-3    1.5 %   1.6 %
        the best of 8 PEAKS             3.7 %, 2.0e-3  4.2 %, 2.2e-3    1.4 %   1.5 %
        of 33 even steps of an octave   3.8 %, 2.0e-3  3.9 %, 2.1e-3    1.4 %   1.5 %
        8 PEAKS, Hadamard's rotation    3.6 %, 1.9e-3  6.4 %, 5.5e-3    1.5 %   1.7 %
        8 PEAKS, less the mean key      3.1 %, 1.3e-3  3.3 %, 1.6e-3
        a scale for each channel too    6.1 %, 5.2e-3  4.7 %, 3.3e-3    1.8 %   1.8 %
        (q8_0                           1.6 %, 4.1e-4  1.4 %, 3.9e-4    0.5 %   0.5 %)

    `hetero quality` of SmolLM2-135M with its weights made F32 (1,024 tokens, context 512): mean KL 1.8e-3,
    the same likeliest token at 98.2 %. With its weights as they are, Q4_1: 5.2e-3 and 95.3 %, but q8_0 then
    has 3.5e-3 and 97.3 % too. There activations are rounded to 8 bits, and any small change gives others.

    Few large channels carry the scores: a scale that puts the largest on a code gains most. The mean key
    would be one of the whole text, which is not known when the first key is stored.
    """
    x = np.clip(np.asarray(values, np.float32), np.float32(-65504), np.float32(65504))
    largest = np.abs(x).max(axis=1)
    best = least = np.empty(0)
    for peak in PEAKS:
        scales = np.maximum((largest / np.float32(peak)).astype(np.float16), np.float16(SMALLEST_SCALE))
        wide = scales.astype(np.float32)
        error = _squared_error(x * (np.float32(1) / wide)[:, None]) * (wide * wide)
        if peak == PEAKS[0]:
            best, least = scales, error
        else:
            best, least = np.where(error < least, scales, best), np.minimum(error, least)
    inverse = np.float32(1) / best.astype(np.float32)
    return encode_e4m3(x * inverse[:, None]), best


def _squared_error(x: np.ndarray) -> np.ndarray:
    """Of rounding [n, dim] to 3 mantissa bits: in each of 16 lanes in turn, then halves onto each other.

    Dekker's splitting, "A floating-point technique for extending the available precision", 1971.
    """
    spread = x * np.float32(SPLIT)
    rest = spread - (spread - x) - x
    lanes = np.zeros((len(x), -(-x.shape[1] // 16) * 16), np.float32)
    lanes[:, : x.shape[1]] = rest * rest
    total = np.add.accumulate(lanes.reshape(len(x), -1, 16), axis=1)[:, -1]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


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

__all__ = [
    "LARGEST",
    "NAN",
    "PEAKS",
    "SMALLEST_SCALE",
    "SPLIT",
    "decode_e4m3",
    "decode_rows",
    "encode_e4m3",
    "encode_rows",
]
