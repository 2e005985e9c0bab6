"""The plain numpy encoders against ggml's own, byte for byte."""

import platform

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.ggml.lib import ggml
from quant.blocks import dequantize
from quant.encoders import encode, nearest_int
from quant.types import GGML_TYPES, TYPE_IDS, row_bytes

NAMES = ("Q8_0", "Q5_K", "Q6_K")
same_arithmetic = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="ggml is compiled with fused multiply-add there"
)


def ggml_encode(name: str, values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty((len(values), row_bytes(TYPE_IDS[name], values.shape[1])), np.uint8)
    ggml().quantize_chunk(TYPE_IDS[name], values.ctypes.data, out.ctypes.data, 0, *values.shape, None)
    return out


def assert_equal_bytes(name: str, values: np.ndarray) -> None:
    np.testing.assert_array_equal(encode(TYPE_IDS[name], values), ggml_encode(name, values))


def adversarial() -> dict[str, np.ndarray]:
    """Rows of 512 that reach the branches: [4, 512] each."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((4, 512)).astype(np.float32)
    outliers = normal.copy()
    outliers[:, ::97] *= 1e4
    groups = normal * np.repeat(10.0 ** rng.integers(-9, 4, (4, 32)), 16, axis=1)
    return {
        "zeros": np.zeros((4, 512)),
        "negative zeros": np.full((4, 512), -0.0),
        "constants": np.repeat([[0.5], [-0.5], [1e-20], [3e4]], 512, axis=1),
        "outliers": outliers,
        "one weight": np.eye(4, 512) * -3,
        "sparse": normal * (rng.random((4, 512)) < 0.05),
        "negative": -np.abs(normal),
        "positive": np.abs(normal) + 1,
        "far from zero": normal * 1e-3 + 100,
        "denormals": normal * 1e-40,
        "smallest denormals": rng.integers(-40, 41, (4, 512)) * 1.4e-45,
        "around the smallest group": normal * 1e-15,
        "halfs underflow": normal * 1e-6,
        "halfs overflow": normal * 1e7,
        "groups of all sizes": groups,
        "ties": rng.integers(-31, 32, (4, 512)) / 2,
        "alternating": np.tile([1.0, -1.0], (4, 256)),
        "two values": np.where(normal > 0, 1.0, 1.0000001),
    }


CASES = {name: values.astype(np.float32) for name, values in adversarial().items()}


@same_arithmetic
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_adversarial_rows(name, case):
    assert_equal_bytes(name, CASES[case])


@same_arithmetic
@pytest.mark.parametrize("name", NAMES)
def test_random_rows(name):
    rng = np.random.default_rng(1)
    assert_equal_bytes(name, rng.standard_normal((200, 1024)) * rng.lognormal(0, 3, (200, 1)))
    assert_equal_bytes(name, rng.standard_t(2, (200, 1024)) * 0.02)


@same_arithmetic
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_rows(name, data):
    """Blocks of bit patterns that hypothesis chooses, mixed with a few repeated values."""
    finite = st.floats(-1e9, 1e9, width=32, allow_subnormal=True)
    few = data.draw(st.lists(finite, min_size=1, max_size=12))
    seed = data.draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).choice(np.array(few, np.float32), (3, 512))
    assert_equal_bytes(name, values)


@pytest.mark.parametrize(("name", "bound"), [("Q8_0", 0.006), ("Q5_K", 0.04), ("Q6_K", 0.02)])
def test_what_is_encoded_decodes_to_about_itself(name, bound):
    """Relative error of norms; also where ggml's bytes may differ in a rounding."""
    values = np.random.default_rng(5).standard_normal((20, 768)).astype(np.float32)
    decoded = dequantize(TYPE_IDS[name], encode(TYPE_IDS[name], values), values.shape)
    assert np.linalg.norm(decoded - values) <= bound * np.linalg.norm(values)


def test_nearest_int_is_rint_where_it_is_meant_to_be():
    values = np.array([0.5, 1.5, -0.5, -2.5, 2.4999, 4194303.0, -4194303.0], np.float32)
    np.testing.assert_array_equal(nearest_int(values), np.rint(values))
    np.testing.assert_array_equal(nearest_int(np.array([np.inf, np.nan], np.float32)), [-(2**22), 0])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Q4_K", np.zeros((1, 256)), "no encoder for Q4_K"),
        ("Q5_K", np.zeros((1, 576)), "576 weights is not whole blocks of 256"),
        ("Q8_0", np.full((1, 32), np.nan), "not finite"),
        ("Q6_K", np.full((1, 256), 1e39), "not finite"),
    ],
)
def test_what_cannot_be_encoded_is_refused(name, values, message):
    with pytest.raises(ValueError, match=message):
        encode(TYPE_IDS[name], values)


def test_sizes():
    for name in NAMES:
        fmt = GGML_TYPES[TYPE_IDS[name]]
        values = np.ones((3, 2 * fmt.elements), np.float32)
        assert encode(TYPE_IDS[name], values).shape == (3, 2 * fmt.nbytes)
