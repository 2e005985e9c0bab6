"""Rows of packed matrices as floats, against what ggml decodes."""

from __future__ import annotations

import numpy as np
import pytest
from matmul_tools import aligned, ggml_dequantize, random_rows

from backends.cpu import embedding, matmul
from backends.cpu.matmul import FORMATS
from quant.types import TYPE_IDS

pytestmark = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")
# Where ggml was compiled to fuse d q + m, the last bit of the product is not rounded away first.
ROUNDING_BOUND = 2e-7  # of the largest weight


@pytest.mark.parametrize("name", [f.name for f in FORMATS.values()])
def test_rows_are_ggmls(name):
    type_id, m, k = TYPE_IDS[name], 75, 512  # the last panel has 11 rows
    raw = random_rows(np.random.default_rng(0), type_id, m, k)
    packed, scratch = aligned(matmul.packed_nbytes(type_id, m, k)), aligned(2 * matmul.SCRATCH_BYTES)
    matmul.pack(type_id, raw.ctypes.data, m, k, packed.ctypes.data)
    rows = np.array([0, 1, 31, 32, 63, 64, 74, 0, 5, 5], np.int32)
    out = np.full((len(rows) + 1, k), np.nan, np.float32)  # one row is padding of the graph
    p, count = np.zeros(embedding.NUM_PARAMS, np.int64), np.array([len(rows)], np.int64)
    p[embedding.E_COUNT_AT], p[embedding.E_PACKED], p[embedding.E_K] = (
        count.ctypes.data,
        packed.ctypes.data,
        k,
    )
    p[embedding.E_FUNCTION] = embedding.compiled_lookup(type_id).address
    p[embedding.E_SCRATCH] = scratch.ctypes.data
    for ith in range(2):
        embedding.embed_share(p.ctypes.data, rows.ctypes.data, out.ctypes.data, ith, 2)
    want = ggml_dequantize(type_id, raw, m, k)[rows]
    assert np.isnan(out[-1]).all()
    np.testing.assert_allclose(out[:-1], want, rtol=0, atol=ROUNDING_BOUND * float(np.abs(want).max()))
