"""The ARM level of the matmul, compiled for it and run in an emulator: the same bits as this CPU's level."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("unicorn", reason="the ARM emulator is not installed")
from arm_tools import compile_arm, dot_products, run_arm
from matmul_tools import OurMatmul, aligned, random_rows

from backends.cpu import matmul
from backends.cpu.matmul import FORMATS, codes, tiles
from backends.cpu.matmul.activations import BLOCK_ELEMENTS, REGION_BYTES, sum_region
from quant.types import TYPE_IDS

pytestmark = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels to compare with")
ROWS, COLUMNS, TOKENS = 32, 512, 2


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "F16"])
def test_a_tile_has_the_bits_of_this_cpu(name: str, monkeypatch: pytest.MonkeyPatch):
    type_id, fmt = TYPE_IDS[name], FORMATS[TYPE_IDS[name]]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, COLUMNS)).astype(np.float32)
    ours = OurMatmul(type_id, random_rows(rng, type_id, ROWS, COLUMNS), ROWS, COLUMNS)
    want = ours.multiply(x)
    kind = fmt.activation_kind
    activations = aligned(matmul.activation_nbytes(kind, TOKENS, COLUMNS))
    matmul.quantize_activations(
        kind, x.ctypes.data, x.strides[0], TOKENS, COLUMNS, activations.ctypes.data, 0, 1
    )
    blocks = TOKENS * COLUMNS // BLOCK_ELEMENTS[kind]
    ends = np.cumsum([blocks * nbytes for nbytes in REGION_BYTES[kind]])
    regions = [part.copy() for part in np.split(activations[: ends[-1]], ends[:-1])]
    monkeypatch.setattr(codes, "cpu_level", lambda: "dotprod")
    elf = compile_arm(lambda x, *values: tiles._multiply_tile(x, type_id, TOKENS, *values), 6)
    assert (dot_products(elf) > 0) == (name != "F16")
    y = np.zeros((TOKENS, ROWS), np.float32)
    superblocks = COLUMNS // fmt.elements
    run_arm(elf, [ours.packed.copy(), regions[0], regions[1], regions[sum_region(fmt)], y, superblocks])
    assert y.any()
    np.testing.assert_array_equal(y, want)
