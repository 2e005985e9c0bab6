"""The plain numpy decoders against ggml's own."""

import numpy as np
import pytest
from matmul_tools import ggml_dequantize, random_rows

from backends.cpu.matmul.layout import FORMATS
from quant.blocks import dequantize
from quant.types import GGML_TYPES

NAMES = {f.name: f.type_id for f in FORMATS.values()}


@pytest.mark.parametrize("name", NAMES)
def test_decoder_equals_ggml(name):
    m, k = 5, 512
    raw = random_rows(np.random.default_rng(1), NAMES[name], m, k)
    decoded = dequantize(NAMES[name], raw, (m, k))
    np.testing.assert_array_equal(decoded, ggml_dequantize(NAMES[name], raw, m, k))


@pytest.mark.parametrize("name", [n for n, t in NAMES.items() if GGML_TYPES[t].elements > 1])
def test_extreme_blocks(name):
    """All-zero and all-ones codes; the scales stay finite numbers."""
    fmt = GGML_TYPES[NAMES[name]]
    zero = np.zeros((1, fmt.nbytes), np.uint8)
    assert not dequantize(NAMES[name], zero, (1, fmt.elements)).any()
    full = np.full((1, fmt.nbytes), 0xFF, np.uint8)
    half = np.array([1.0], np.float16).view(np.uint8)
    full[0, 0:2] = full[0, 2:4] = full[0, -2:] = half
    want = ggml_dequantize(NAMES[name], full, 1, fmt.elements)
    np.testing.assert_array_equal(dequantize(NAMES[name], full, (1, fmt.elements)), want)


def test_floats_decode_to_themselves():
    values = np.array([[0.0, -1.5, 2.0**-20, 65504.0]], np.float32)
    np.testing.assert_array_equal(dequantize(0, values.view(np.uint8), (1, 4)), values)
    halves = values.astype(np.float16)
    np.testing.assert_array_equal(dequantize(1, halves.view(np.uint8), (1, 4)), halves.astype(np.float32))


@pytest.mark.parametrize("case", [(3, 20, (1, 64)), (3, 20, (1, 16)), (12, 144, (2, 128))])
def test_wrong_sizes_are_refused(case):
    type_id, nbytes, shape = case
    with pytest.raises(ValueError, match="bytes are not"):
        dequantize(type_id, np.zeros(nbytes, np.uint8), shape)


def test_unknown_types_are_refused():
    with pytest.raises(ValueError, match="no decoder for IQ1_S"):
        dequantize(19, np.zeros(50, np.uint8), (1, 256))
