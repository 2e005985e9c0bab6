"""E4M3 in numpy against ml_dtypes, which is compiled from other sources."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.fp8 import LARGEST, NAN, SMALLEST_SCALE, decode_e4m3, decode_rows, encode_e4m3, encode_rows

E4M3 = ml_dtypes.float8_e4m3fn
ROW_BOUND = 1 / 16 + 2**-10  # relative to each value above the denormals: half of the last of 3 bits


def theirs(values: np.ndarray) -> np.ndarray:
    """Their codes; but they make NaN of what rounds to more than 448, infinities included, and we do not."""
    limited = np.clip(values.astype(np.float32), -LARGEST, LARGEST)
    return limited.astype(E4M3).view(np.uint8)


def test_encodes_every_half():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    codes = encode_e4m3(halves)
    nan = np.isnan(halves)
    assert (codes[nan] & 0x7F == NAN).all()
    np.testing.assert_array_equal(codes[~nan], theirs(halves[~nan]))
    within = np.abs(halves.astype(np.float32)) <= 464  # rounds to 448; beyond, they have NaN
    np.testing.assert_array_equal(codes[within], halves[within].astype(E4M3).view(np.uint8))


def test_encodes_floats_between_halves():
    """Ties, and what lies next to them, are decided on all 24 bits: rounding to a half first goes wrong."""
    middles = np.sort(np.unique(decode_e4m3(np.arange(127, dtype=np.uint8))))
    ties = ((middles[1:] + middles[:-1]) / 2).astype(np.float32)
    values = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), middles])
    values = np.concatenate([values, -values]).astype(np.float32)
    np.testing.assert_array_equal(encode_e4m3(values), theirs(values))
    twice = values.astype(np.float16).astype(np.float32)
    assert (encode_e4m3(twice) != encode_e4m3(values)).any()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_encodes_any_float(values):
    x = np.array(values, np.float32)
    np.testing.assert_array_equal(encode_e4m3(x), theirs(x))


def test_decodes_every_code():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(E4M3).astype(np.float32)
    np.testing.assert_array_equal(decode_e4m3(codes), want)
    numbers = codes[~np.isnan(want)]
    np.testing.assert_array_equal(encode_e4m3(decode_e4m3(numbers)), numbers)


@given(st.integers(0, 2**32), st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e9]))
def test_rows_keep_three_bits(seed, size):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((5, 64)) * size).astype(np.float32)
    x[4] = 0
    codes, scales = encode_rows(x)
    got, x = decode_rows(codes, scales), np.clip(x, -65504, 65504)
    step = scales.astype(np.float32)[:, None] * np.float32(2.0**-9)
    assert (np.abs(got - x) <= np.maximum(ROW_BOUND * np.abs(x), step)).all()
    assert (got[4] == 0).all()
    ordinary = scales > 100 * np.float16(SMALLEST_SCALE)  # halves with enough bits
    rows = np.arange(5)[ordinary]
    largest = np.abs(x[rows]).argmax(axis=1)
    np.testing.assert_allclose(got[rows, largest], x[rows, largest], rtol=0.01)


def test_rows_of_what_no_half_can_hold():
    codes, scales = encode_rows(np.array([[np.inf, -1e9, 1.0]]))
    assert decode_rows(codes, scales)[0, :2] == pytest.approx([65504, -65504], rel=1e-3)
