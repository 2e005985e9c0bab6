"""Plain numpy decoders of the K formats and IQ4_XS, superblocks of 256 weights.

Source of the layouts: `block_q4_K`, `block_q5_K`, `block_q6_K`, `block_iq4_xs` in ggml-common.h and
`dequantize_row_*` in ggml-quants.c. Each function takes uint8 [n, block bytes] and gives float32 [n, 256].
"""

from __future__ import annotations

import numpy as np

Q4_K, Q5_K, Q6_K, IQ4_XS = 12, 13, 14, 23

# kvalues_iq4nl: what a nibble of IQ4_NL and IQ4_XS stands for
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def unpack_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and 8 mins of Q4_K and Q5_K: uint8 [n, 12] to two uint8 [n, 8].

    byte s      (s = 0 .. 3)   bits 0-5 scale s,   bits 6-7 bits 4-5 of scale s + 4
    byte 4 + s                 bits 0-5 min s,     bits 6-7 bits 4-5 of min s + 4
    byte 8 + s                 bits 0-3 of scale s + 4 (low nibble) and of min s + 4 (high nibble)
    """
    a, b, c = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, mins


def _halves(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view("<f2").astype(np.float32)


def _nibble_pairs(raw: np.ndarray) -> np.ndarray:
    """[n, 128] bytes to [n, 8, 32]: bytes 32c .. 32c + 31 hold sub-blocks 2c (low nibbles) and 2c + 1."""
    groups = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _scaled(raw: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """(d scale) q - (dmin min) with raw = f16 d, f16 dmin, scales[12], …"""
    scales, mins = unpack_scales(raw[:, 4:16])
    d = _halves(raw[:, :2]) * scales.astype(np.float32)
    m = _halves(raw[:, 2:4]) * mins.astype(np.float32)
    return (d[:, :, None] * codes.astype(np.float32) - m[:, :, None]).reshape(-1, 256)


def decode_q4_k(raw: np.ndarray) -> np.ndarray:
    """f16 d, f16 dmin, scales[12], nibbles[128]."""
    return _scaled(raw, _nibble_pairs(raw[:, 16:144]))


def decode_q5_k(raw: np.ndarray) -> np.ndarray:
    """f16 d, f16 dmin, scales[12], high[32] (bit s of byte i: weight i of sub-block s), nibbles[128]."""
    high = np.stack([(raw[:, 16:48] >> s) & 1 for s in range(8)], axis=1)
    return _scaled(raw, _nibble_pairs(raw[:, 48:176]) | (high << 4))


def decode_q6_k(raw: np.ndarray) -> np.ndarray:
    """low[128], high[64], i8 scales[16], f16 d: d scale (q - 32), a scale for 16 weights.

    Each half of 128 weights: low[64] has block b = 0 .. 3 of 32 in bytes 32 (b % 2) .., low nibble for b < 2;
    high[32] has its upper bits in bits 2b, 2b + 1.
    """
    low = raw[:, :128].reshape(-1, 2, 2, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    upper = np.concatenate([(high >> 2 * b) & 3 for b in range(4)], axis=2)
    codes = (nibbles | (upper << 4)).astype(np.float32) - 32
    scales = _halves(raw[:, 208:210]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def decode_iq4_xs(raw: np.ndarray) -> np.ndarray:
    """f16 d, u16 high, low[4], nibbles[128]: d scale LEVELS[q], a scale for 32 weights.

    scale + 32 of sub-block b has its low four bits in nibble b of low, two more in bits 2b, 2b + 1 of high.
    """
    high = raw[:, 2:4].copy().view("<u2").astype(np.int32)
    low = raw[:, 4:8].copy().view("<u4").astype(np.int64)
    b = np.arange(8)
    scales = ((low >> 4 * b) & 15) | (((high >> 2 * b) & 3) << 4)
    d = _halves(raw[:, :2]) * (scales - 32).astype(np.float32)
    nibbles = raw[:, 8:].reshape(-1, 8, 16)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    return (d[:, :, None] * LEVELS[codes]).reshape(-1, 256)
