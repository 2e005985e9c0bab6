"""Plain numpy encoders of Q8_0, Q5_K and Q6_K, equal to ggml's bytes; see blocks and kquants for decoders.

Source: `quantize_row_q8_0_ref`, `quantize_row_q5_K_ref`, `quantize_row_q6_K_ref` and their helpers
`make_qkx2_quants`, `make_qx_quants` and `nearest_int` in ggml-quants.c, without an importance matrix.
Equality holds where ggml's compiler does not fuse multiplications with additions, as on x86-64, where
ggml-base is built for any CPU; all sums therefore go from left to right in float32. Each function encodes
many blocks at once: float32 [n, weights of a block] to uint8 [n, bytes of a block]. Values must be finite.
"""

from __future__ import annotations

import numpy as np

from quant.types import GGML_TYPES

Q8_0, Q5_K, Q6_K = 8, 13, 14
GROUP_MAX_EPS = np.float32(1e-15)  # groups of smaller weights are stored as zeros


def encode(type_id: int, values: np.ndarray) -> np.ndarray:
    """Encode rows: float [rows, row length] to uint8 [rows, bytes of a row].

    ValueError for a type without an encoder here, a row length that is not whole blocks, and values that
    are not finite in float32.
    """
    if type_id not in _ENCODERS:
        name = GGML_TYPES[type_id].name if type_id in GGML_TYPES else f"type {type_id}"
        raise ValueError(f"no encoder for {name}")
    fmt = GGML_TYPES[type_id]
    rows, length = values.shape
    if length % fmt.elements:
        raise ValueError(f"a row of {length} weights is not whole blocks of {fmt.elements} ({fmt.name})")
    with np.errstate(over="ignore"):
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, fmt.elements)
    if not np.isfinite(blocks).all():
        raise ValueError("weights that are not finite cannot be quantized")
    # What is divided by zero here is masked out afterwards, or goes ggml's way through nearest_int.
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        return _ENCODERS[type_id](blocks).reshape(rows, -1)


def nearest_int(values: np.ndarray) -> np.ndarray:
    """Round to even by adding 1.5 * 2^23 and reading the mantissa; infinities give -2^22, NaN gives 0."""
    bits = (values + np.float32(12582912)).view(np.int32)
    return (bits & 0x007FFFFF) - 0x00400000


def _half_bytes(values: np.ndarray) -> np.ndarray:
    """[n] float32 as [n, 2] bytes of little-endian halfs."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _sum(terms: np.ndarray) -> np.ndarray:
    """Sums of rows from left to right, as a loop does; np.sum adds pairwise."""
    return np.add.accumulate(terms, axis=1)[:, -1]


def encode_q8_0(x: np.ndarray) -> np.ndarray:
    """f16 d, i8[32]: d = largest magnitude / 127, codes rounded half away from zero."""
    d = np.abs(x).max(axis=1) / np.float32(127)
    inverse = np.where(d != 0, 1 / d, np.float32(0))
    scaled = x * inverse[:, None]
    whole = np.trunc(scaled)
    whole += np.where(np.abs(scaled - whole) >= 0.5, np.copysign(np.float32(1), scaled), np.float32(0))
    codes = np.where(np.isfinite(whole), whole, 0).astype(np.int8)  # 1 / d overflows for denormal d
    return np.concatenate([_half_bytes(d), codes.view(np.uint8)], axis=1)


def encode_q5_k(x: np.ndarray) -> np.ndarray:
    """f16 d, f16 dmin, scales[12], high[32], nibbles[128]; drawn at decode_q5_k and unpack_scales."""
    n = len(x)
    groups = x.reshape(-1, 32)
    rms = np.sqrt(_sum(groups * groups) / np.float32(32))
    scale, minimum, codes = _fit_scale_and_min(groups, rms[:, None] + np.abs(groups), 31)
    scale, minimum, codes = scale.reshape(n, 8), minimum.reshape(n, 8), codes.reshape(n, 8, 32)
    max_scale = np.maximum(scale.max(axis=1), np.float32(0))
    max_min = np.maximum(minimum.max(axis=1), np.float32(0))
    scales, mins = _six_bits(scale, max_scale), _six_bits(minimum, max_min)
    d, dmin = (_half_bytes(v / np.float32(63)) for v in (max_scale, max_min))
    step = _floats(d) * scales.astype(np.float32)
    offset = _floats(dmin) * mins.astype(np.float32)
    again = nearest_int((x.reshape(n, 8, 32) + offset[:, :, None]) / step[:, :, None])
    codes = np.where(step[:, :, None] != 0, np.clip(again, 0, 31), codes).astype(np.uint8)
    high = np.zeros((n, 32), np.uint8)
    for s in range(8):
        high |= (codes[:, s] >> 4) << s
    nibbles = (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4
    return np.concatenate([d, dmin, _pack_scales(scales, mins), high, nibbles.reshape(n, 128)], axis=1)


def encode_q6_k(x: np.ndarray) -> np.ndarray:
    """low[128], high[64], i8 scales[16], f16 d; drawn at decode_q6_k."""
    n = len(x)
    scale, codes = _fit_scale(x.reshape(-1, 16), 32)
    scale, codes = scale.reshape(n, 16), codes.reshape(n, 16, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    inverse = np.float32(-128) / largest
    d = _half_bytes(1 / inverse[:, 0])
    scales = np.minimum(nearest_int(inverse * scale), 127).astype(np.int8)
    step = (_floats(d) * scales.astype(np.float32))[:, :, None]
    again = np.clip(nearest_int(x.reshape(n, 16, 16) / step), -32, 31) + 32
    codes = np.where(step != 0, again, codes).astype(np.uint8)
    halves = codes.reshape(n, 2, 4, 32)
    low = (halves[:, :, 0:2] & 15) | (halves[:, :, 2:4] & 15) << 4
    high = halves[:, :, 0] >> 4
    for b in range(1, 4):
        high = high | (halves[:, :, b] >> 4) << 2 * b
    parts = [low.reshape(n, 128), high.reshape(n, 64), scales.view(np.uint8), d]
    blocks = np.concatenate(parts, axis=1)
    blocks[np.abs(largest[:, 0]) < GROUP_MAX_EPS] = 0
    return blocks


def _floats(halves: np.ndarray) -> np.ndarray:
    """[n, 2] bytes of halfs as [n, 1] float32."""
    return halves.copy().view("<f2").astype(np.float32)


def _six_bits(values: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """63 values / largest, rounded, in a byte (which wraps below 0), at most 63."""
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    return np.minimum(nearest_int(inverse[:, None] * values) & 0xFF, 63).astype(np.uint8)


def _pack_scales(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """The inverse of kquants.unpack_scales: two uint8 [n, 8] below 64 to uint8 [n, 12]."""
    low = [v[:, :4] | (v[:, 4:] >> 4) << 6 for v in (scales, mins)]
    return np.concatenate([*low, (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4], axis=1)


def _fit_scale(x: np.ndarray, nmax: int) -> tuple[np.ndarray, np.ndarray]:
    """make_qx_quants with weights x^2: scale [n] and codes [n, k] in 0 .. 2 nmax - 1.

    They stand for x ~ scale (code - nmax). Of 19 scales around -nmax / (largest by magnitude), the one
    with the least weighted squared error.
    """
    index = np.abs(x).argmax(axis=1)[:, None]
    largest = np.take_along_axis(x, index, axis=1)[:, 0]
    weights = x * x

    def attempt(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes = np.clip(nearest_int(inverse[:, None] * x), -nmax, nmax - 1)
        levels = codes.astype(np.float32)
        return codes, _sum(weights * x * levels), _sum(weights * levels * levels)

    best_codes, xl, ll = attempt(np.float32(-nmax) / largest)
    scale = np.where(ll != 0, xl / ll, np.float32(0))
    best = scale * xl
    for i in (*range(-9, 0), *range(1, 10)):
        factor = np.float32(nmax) + np.float32(0.1) * np.float32(i)
        codes, xl, ll = attempt(-factor / largest)
        better = (ll > 0) & (xl * xl > best * ll)
        best_codes = np.where(better[:, None], codes, best_codes)
        scale = np.where(better, xl / ll, scale)
        best = np.where(better, scale * xl, best)
    zero = np.abs(largest) < GROUP_MAX_EPS
    scale[zero], best_codes[zero] = 0, -nmax
    return scale, best_codes + nmax


def _fit_scale_and_min(
    x: np.ndarray, weights: np.ndarray, nmax: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """make_qkx2_quants: scale [n], min [n] >= 0 and codes [n, k] in 0 .. nmax for x ~ scale code - min.

    16 scales are tried, each with the least-squares scale and min of its codes. As in ggml, a try that is
    better moves the minimum from which later tries start.
    """
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    low, high = np.minimum(x.min(axis=1), np.float32(0)), x.max(axis=1)
    flat = high == low

    def round_to(inverse: np.ndarray) -> np.ndarray:
        return np.clip(nearest_int(inverse[:, None] * (x - low[:, None])), 0, nmax)

    def error(scale: np.ndarray, minimum: np.ndarray, levels: np.ndarray) -> np.ndarray:
        difference = scale[:, None] * levels + minimum[:, None] - x
        return _sum(weights * (difference * difference))

    inverse = np.float32(nmax) / (high - low)
    scale, best_codes = 1 / inverse, round_to(inverse)
    best_error = error(scale, low, best_codes.astype(np.float32))
    start = low
    for i in range(16):
        factor = np.float32(-0.5) + np.float32(0.1) * np.float32(i) + np.float32(nmax)
        codes = round_to(factor / (high - low))
        levels = codes.astype(np.float32)
        weighted = weights * levels
        sum_l, sum_l2, sum_xl = _sum(weighted), _sum(weighted * levels), _sum(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        this_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = this_min > 0
        this_scale = np.where(above, sum_xl / sum_l2, this_scale)
        this_min = np.where(above, np.float32(0), this_min)
        this_error = error(this_scale, this_min, levels)
        better = (determinant > 0) & (this_error < best_error)
        best_codes = np.where(better[:, None], codes, best_codes)
        best_error = np.where(better, this_error, best_error)
        scale = np.where(better, this_scale, scale)
        low = np.where(better, this_min, low)
    scale = np.where(flat, np.float32(0), scale)
    best_codes[flat] = 0
    return scale, -np.where(flat, start, low), best_codes


_ENCODERS = {Q8_0: encode_q8_0, Q5_K: encode_q5_k, Q6_K: encode_q6_k}
