"""Plain numpy decoders of ggml's 32-weight block formats; see kquants for those of 256.

Source of the layouts: `block_q4_0` … `block_q8_0` in ggml-common.h and `dequantize_row_*` in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quant import kquants
from quant.types import GGML_TYPES

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, BF16 = 2, 3, 6, 7, 8, 20, 39, 30

# kvalues_mxfp4: twice what a nibble stands for (OCP Microscaling Formats 1.0: FP4 E2M1)
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half(raw: np.ndarray) -> np.ndarray:
    """[n, 2] bytes as [n, 1] float32."""
    return raw.copy().view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[n, 16] bytes: low nibbles are weights 0 .. 15, high ones 16 .. 31."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """[n, 4] bytes, bit i of the little-endian word is bit 4 of weight i."""
    return np.unpackbits(raw, axis=1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """f16 d, nibbles[16]: d (q - 8)."""
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """f16 d, f16 m, nibbles[16]: d q + m."""
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw[:, 2:4])


def _q5_0(raw: np.ndarray) -> np.ndarray:
    """f16 d, bits[4], nibbles[16]: d (q - 16)."""
    codes = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return _half(raw[:, :2]) * (codes.astype(np.float32) - 16)


def _q5_1(raw: np.ndarray) -> np.ndarray:
    """f16 d, f16 m, bits[4], nibbles[16]: d q + m."""
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * codes.astype(np.float32) + _half(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """f16 d, i8[32]: d q."""
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(raw: np.ndarray) -> np.ndarray:
    """f16 d, nibbles[16]: d LEVELS[q]."""
    return _half(raw[:, :2]) * kquants.LEVELS[_nibbles(raw[:, 2:])]


def _mxfp4(raw: np.ndarray) -> np.ndarray:
    """E8M0 e, nibbles[16]: 2^(e - 128) FP4_LEVELS[q]. e = 255 is no NaN: it counts as in ggml."""
    scale = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128)
    return scale * FP4_LEVELS[_nibbles(raw[:, 1:])]


_DECODERS = {
    0: lambda raw: raw.copy().view("<f4"),
    1: lambda raw: raw.copy().view("<f2").astype(np.float32),
    Q4_0: _q4_0,
    Q4_1: _q4_1,
    Q5_0: _q5_0,
    Q5_1: _q5_1,
    Q8_0: _q8_0,
    kquants.Q4_K: kquants.decode_q4_k,
    kquants.Q5_K: kquants.decode_q5_k,
    kquants.Q6_K: kquants.decode_q6_k,
    IQ4_NL: _iq4_nl,
    kquants.IQ4_XS: kquants.decode_iq4_xs,
    MXFP4: _mxfp4,
    BF16: lambda raw: (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32),
}


def dequantize(type_id: int, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Decode the bytes of a tensor to float32 of `shape` (row length last), as ggml's to_float does.

    ValueError when the type has no decoder here or the bytes do not fit the shape.
    """
    if type_id not in _DECODERS:
        name = GGML_TYPES[type_id].name if type_id in GGML_TYPES else f"type {type_id}"
        raise ValueError(f"no decoder for {name}")
    fmt = GGML_TYPES[type_id]
    flat = np.ascontiguousarray(raw, np.uint8).reshape(-1)
    count = int(np.prod(shape))
    if shape[-1] % fmt.elements or flat.size != count // fmt.elements * fmt.nbytes:
        raise ValueError(f"{flat.size} bytes are not {fmt.name} of shape {tuple(shape)}")
    return _DECODERS[type_id](flat.reshape(-1, fmt.nbytes)).reshape(shape)
