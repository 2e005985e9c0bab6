"""Our quantized matmul: against float64, against ggml's error, and bit for bit against itself."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_tools import GgmlMatmul, OurMatmul, aligned, random_rows

from backends.cpu import matmul
from backends.cpu.features import LEVELS, available_levels
from backends.cpu.matmul.layout import BLOCKWISE, FLOATS, FORMATS, SUPERBLOCKWISE
from quant.blocks import dequantize

NAMES = {f.name: f.type_id for f in FORMATS.values()}
QUANTIZED = [f.name for f in FORMATS.values() if f.activation_kind != FLOATS]
pytestmark = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")

# An activation is off by at most half a step of max|x| / 127 in its block, so an output by at most
# sum |w| * max|x| / 254; rounding of the float sums is far below and covered by the factor.
ROUNDING_BOUND = 1.01
# With float weights and activations only sums round: over 32 products, then over k / 32 such sums.
FLOAT_ROUNDING = 2.0**-24
# Root-mean-square error over ggml's on the same bytes. ggml stores 32-blocks' activation scales as f16.
GGML_ERROR_RATIO = 1.05
F32_ERROR_RATIO = 1.25  # both only round sums, in another order: 1e-7 of the output


@functools.cache
def matrix(type_id: int, m: int, k: int, seed: int = 0) -> tuple[np.ndarray, OurMatmul, np.ndarray]:
    """(file bytes, packed matrix, float64 weights)."""
    raw = random_rows(np.random.default_rng(seed), type_id, m, k)
    return raw, OurMatmul(type_id, raw, m, k), dequantize(type_id, raw, (m, k)).astype(np.float64)


def largest_by_block(x: np.ndarray, block: int) -> np.ndarray:
    """max |x| of each element's quantization block, float64 of x's shape."""
    n, k = x.shape
    blocks = np.abs(x.astype(np.float64)).reshape(n, k // block, block).max(-1)
    return np.repeat(blocks, block, axis=1)


def assert_within_bound(y: np.ndarray, x: np.ndarray, weights: np.ndarray, kind: int) -> None:
    if kind == FLOATS:
        size = np.abs(x.astype(np.float64)) @ np.abs(weights).T
        bound = (32 + x.shape[1] // 32) * FLOAT_ROUNDING * size + 1e-40
        assert (np.abs(y - x.astype(np.float64) @ weights.T) <= bound).all()
        return
    step = largest_by_block(x, 32 if kind == BLOCKWISE else 256) / 254
    size = np.abs(x.astype(np.float64)) @ np.abs(weights).T
    bound = ROUNDING_BOUND * step @ np.abs(weights).T + 1e-6 * size + 1e-30
    assert (np.abs(y - x.astype(np.float64) @ weights.T) <= bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_error_is_no_larger_than_ggmls(name):
    m, k, n = 96, 1024, 24
    raw, ours, weights = matrix(NAMES[name], m, k)
    rng = np.random.default_rng(2)
    normal = rng.standard_normal((n, k))
    rare = rng.random((n, k)) < 0.01
    theirs = GgmlMatmul(NAMES[name], raw, m, k, n)
    for x in (normal, np.where(rare, 100 * normal, normal), np.where(rare, normal, 0), normal * 1e-3):
        x = x.astype(np.float32)
        y = ours.multiply(x)
        assert_within_bound(y, x, weights, matmul.activation_kind(NAMES[name]))
        exact = x.astype(np.float64) @ weights.T
        ratio = F32_ERROR_RATIO if name == "F32" else GGML_ERROR_RATIO
        assert np.linalg.norm(y - exact) <= ratio * np.linalg.norm(theirs.multiply(x) - exact)
    theirs.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_token_does_not_depend_on_its_batch(name):
    m, k = 72, 768
    _, ours, _ = matrix(NAMES[name], m, k)
    x = np.random.default_rng(3).standard_normal((512, k)).astype(np.float32)
    alone = np.concatenate([ours.multiply(x[i : i + 1]) for i in range(40)])
    whole = ours.multiply(x)
    np.testing.assert_array_equal(whole[:40].view(np.uint32), alone.view(np.uint32))
    for n in [*range(2, 41), 64, 65, 69, 71, 100, 175, 200, 208, 250]:
        y = ours.multiply(x[:n])
        np.testing.assert_array_equal(y.view(np.uint32), whole[:n].view(np.uint32), err_msg=f"{n} tokens")
    shifted = ours.multiply(np.roll(x, 77, axis=0))
    np.testing.assert_array_equal(np.roll(shifted, -77, axis=0).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_a_result_does_not_depend_on_the_threads(name, threads):
    _, ours, _ = matrix(NAMES[name], 72, 768)
    for n in (1, 5, 80):
        x = np.random.default_rng(n).standard_normal((n, 768)).astype(np.float32)
        np.testing.assert_array_equal(ours.multiply(x, threads), ours.multiply(x))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(NAMES)),
    m=st.integers(1, 70),
    blocks=st.integers(1, 40),
    n=st.integers(1, 30) | st.integers(60, 80),
    seed=st.integers(0, 3),
)
def test_any_shape(name, m, blocks, n, seed):
    fmt = FORMATS[NAMES[name]]
    k = fmt.elements * (blocks if fmt.blocks == 1 else 1 + blocks // 8)
    raw = random_rows(np.random.default_rng(seed), fmt.type_id, m, k)
    x = np.random.default_rng(seed + 1).standard_normal((n, k)).astype(np.float32)
    y = OurMatmul(fmt.type_id, raw, m, k).multiply(x, threads=1 + seed)
    weights = dequantize(fmt.type_id, raw, (m, k)).astype(np.float64)
    assert_within_bound(y, x, weights, fmt.activation_kind)


def adversarial_rows(k: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.standard_normal(k).astype(np.float32)
    outlier = x.copy()
    outlier[::97] = 1e4
    return {
        "zeros": np.zeros(k, np.float32),
        "outliers": outlier,
        "huge": x * np.float32(1e30),
        "tiny": x * np.float32(1e-25),
        "denormal": x * np.float32(1e-40),
        "constant": np.full(k, -3.25, np.float32),
        "one block": np.where(np.arange(k) < 32, x, 0).astype(np.float32),
        "alternating extremes": np.where(np.arange(k) % 2, 127, -127).astype(np.float32),
        "mixed magnitudes": x * np.float32(10.0) ** rng.integers(-8, 8, k).astype(np.float32),
    }


@pytest.mark.parametrize("name", NAMES)
def test_adversarial_activations(name):
    m, k = 40, 512
    rows = adversarial_rows(k)
    _, ours, weights = matrix(NAMES[name], m, k)
    x = np.stack(list(rows.values()))
    y = ours.multiply(x)
    assert np.isfinite(y).all()
    assert not y[list(rows).index("zeros")].any()
    assert_within_bound(y, x, weights, matmul.activation_kind(NAMES[name]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_activation_spoils_its_own_token_only(name, bad):
    _, ours, _ = matrix(NAMES[name], 40, 512)
    x = np.random.default_rng(5).standard_normal((7, 512)).astype(np.float32)
    clean = ours.multiply(x)
    x[3, 300] = bad
    y = ours.multiply(x)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_codes_do_not_overflow(name):
    """Largest codes, scales and mins against activations of one sign: the largest integer sums there are."""
    type_id, m, k = NAMES[name], 33, 1024
    fmt = FORMATS[type_id]
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        raw = random_rows(np.random.default_rng(6), type_id, m, k).reshape(m, -1, fmt.raw_bytes)
        if type_id == NAMES["Q6_K"]:
            raw[..., :208] = fill
        else:
            raw[..., 4 if name[-1] in "1K" else 2 :] = fill
        raw = np.ascontiguousarray(raw.reshape(m, -1))
        weights = dequantize(type_id, raw, (m, k)).astype(np.float64)
        for sign in (1, -1):
            x = np.full((9, k), sign * 127, np.float32)
            assert_within_bound(OurMatmul(type_id, raw, m, k).multiply(x), x, weights, fmt.activation_kind)


@pytest.mark.parametrize("name", NAMES)
def test_packing_loses_nothing(name):
    """One-hot activations read every weight back; 127 is quantized exactly."""
    type_id, m = NAMES[name], 37
    fmt = FORMATS[type_id]
    k = 64 if fmt.blocks == 1 else 512
    raw = random_rows(np.random.default_rng(7), type_id, m, k)
    x = np.eye(k, dtype=np.float32)
    y = OurMatmul(type_id, raw, m, k).multiply(x)
    weights = dequantize(type_id, raw, (m, k)).T
    # decoding takes at most 3 roundings, of terms not larger than the format's range within the block
    atol = 4e-7 * np.abs(weights).max()
    np.testing.assert_allclose(y, weights, rtol=4e-7, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_packing_by_threads_is_the_same(name):
    type_id, m, k = NAMES[name], 130, 512
    raw = random_rows(np.random.default_rng(8), type_id, m, k)
    parts = aligned(matmul.packed_nbytes(type_id, m, k))
    parts[:] = 0xAA
    for i in range(3):
        matmul.pack(type_id, raw.ctypes.data, m, k, parts.ctypes.data, i, 3)
    np.testing.assert_array_equal(parts, OurMatmul(type_id, raw, m, k).packed)


def test_rows_of_y_are_strided_and_the_gaps_untouched():
    type_id, m, k, n = NAMES["Q5_0"], 45, 96, 3
    _, ours, _ = matrix(type_id, m, k)
    x = np.random.default_rng(9).standard_normal((n, k + 8)).astype(np.float32)
    activations = aligned(matmul.activation_nbytes(BLOCKWISE, n, k))
    scratch, y = aligned(matmul.SCRATCH_BYTES), np.full((n, m + 3), 7, np.float32)
    matmul.quantize_activations(BLOCKWISE, x.ctypes.data, x.strides[0], n, k, activations.ctypes.data, 0, 1)
    matmul.compiled_matmul(type_id).ctypes(
        ours.packed.ctypes.data,
        m,
        k,
        activations.ctypes.data,
        n,
        y.ctypes.data,
        y.strides[0],
        scratch.ctypes.data,
        0,
        1,
    )
    np.testing.assert_array_equal(y[:, :m], ours.multiply(np.ascontiguousarray(x[:, :k])))
    assert (y[:, m:] == 7).all()


def test_supported():
    assert matmul.supported(NAMES["Q4_1"], 1, 576)
    assert not matmul.supported(NAMES["Q4_1"], 1, 570)
    assert not matmul.supported(NAMES["Q6_K"], 32, 576)
    assert not matmul.supported(NAMES["F16"], 32, 48)
    assert not matmul.supported(19, 32, 256)  # IQ1_S
    kinds = {BLOCKWISE, SUPERBLOCKWISE, FLOATS}
    assert {matmul.activation_kind(t) for t in NAMES.values()} == kinds


_CHECK_LEVEL = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from matmul_tools import OurMatmul, random_rows
for type_id in (8, 3, 13, 14, 20, 23, 39, 1, 30):
    rng = np.random.default_rng(10)
    raw = random_rows(rng, type_id, 40, 512)
    x = rng.standard_normal((80, 512)).astype(np.float32)
    sys.stdout.buffer.write(OurMatmul(type_id, raw, 40, 512).multiply(x).tobytes())
"""


def level_bytes(level: str) -> bytes:
    """The products of some matrices on a CPU level, in a process of its own."""
    command = [sys.executable, "-c", _CHECK_LEVEL, str(Path(__file__).parent.parent)]
    environment = dict(os.environ)
    if level != available_levels()[0]:  # whose kernels the other tests have compiled
        environment["HETERO_CPU_LEVEL"] = level
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def test_every_cpu_level_gives_the_same_bits():
    levels = [level for level in LEVELS if level in available_levels() and level.startswith("avx")]
    first, *others = [level_bytes(level) for level in levels]
    assert len(first) == 9 * 80 * 40 * 4
    assert all(other == first for other in others)
