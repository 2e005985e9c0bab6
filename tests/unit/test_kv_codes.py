"""Keys and values by format: the stored against encoders in numpy, the attended against what is stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_tools import Bench, decoded, encoded, make_batch, random_tokens, take_apart
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cpu import kv_codes, kv_store
from backends.cpu.step import BLOCK_SIZE, aligned_empty
from backends.kv_format import KV_TYPES

STORED_BOUND = 2e-5  # relative to the largest output: float32 sums of what is stored, and e^x
PAIRS = list(itertools.product(KV_TYPES, KV_TYPES))
CODED = [pair for pair in PAIRS if pair != ("f16", "f16")]


def store(kv_type: str, rows: np.ndarray, which: int, part: np.ndarray) -> None:
    function = kv_store.compiled_store(kv_codes.FORMATS[kv_type], which).ctypes
    for token, row in enumerate(rows):
        function(part.ctypes.data, token, row.ctypes.data, len(row) // 16)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    st.sampled_from(KV_TYPES),
    st.sampled_from([kv_store.KEYS, kv_store.VALUES]),
    st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    st.integers(-12, 5),
    st.integers(0, 2**32),
)
def test_stores_what_the_encoders_say(kv_type, which, dim, exponent, seed):
    if kv_type == "q8_0":
        dim = -(-dim // 32) * 32
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((BLOCK_SIZE, dim)) * 10.0**exponent).astype(np.float32)
    rows[rng.integers(0, BLOCK_SIZE), :] = 0
    rows[rng.integers(0, BLOCK_SIZE), rng.integers(0, dim)] *= 100  # outliers, as keys have
    part = aligned_empty(kv_codes.part_bytes(kv_type, dim))
    part[:] = 0xFF
    store(kv_type, rows, which, part)
    codes, scales = take_apart(kv_type, part, dim, which == kv_store.KEYS)
    with np.errstate(divide="ignore"):  # rows of zeros
        want_codes, want_scales = encoded(kv_type, np.clip(rows, -65504, 65504))
    np.testing.assert_array_equal(scales.view(np.uint16), want_scales.view(np.uint16))
    np.testing.assert_array_equal(codes, want_codes)


@pytest.mark.parametrize("kv_type", ["fp8", "q8_0"])
def test_ties_are_stored_as_the_encoders_say(kv_type):
    """Values half way between two codes, under scales that are exact."""
    steps = np.arange(64, dtype=np.float32) * 0.5 - 16
    rows = np.stack([steps, steps * 2, steps + 100, -steps * 0.03125])
    rows[:, 5] = [127, 448, 448, 127]
    part = aligned_empty(kv_codes.part_bytes(kv_type, 64))
    store(kv_type, rows, kv_store.VALUES, part)
    codes, scales = take_apart(kv_type, part, 64, False)
    np.testing.assert_array_equal(codes[:4], encoded(kv_type, rows)[0])
    np.testing.assert_array_equal(scales[:4], encoded(kv_type, rows)[1])


@pytest.mark.parametrize("kv_type", ["fp8", "q8_0"])
def test_what_no_half_can_hold_is_stored_finite(kv_type):
    rows = np.full((1, 32), 3e38, np.float32)
    rows[0, ::2] = -np.inf
    part = aligned_empty(kv_codes.part_bytes(kv_type, 32))
    store(kv_type, rows, kv_store.KEYS, part)
    got = decoded(kv_type, *take_apart(kv_type, part, 32, True))[0]
    np.testing.assert_allclose(got, np.clip(rows[0], -65504, 65504), rtol=1e-3)


@pytest.mark.parametrize("kv_types", CODED, ids="-".join)
@pytest.mark.parametrize("heads, kv_heads, dim_k, dim_v", [(6, 2, 32, 96), (4, 1, 128, 64), (9, 1, 64, 64)])
@pytest.mark.parametrize("window", [0, 20])
def test_attends_to_what_is_stored(kv_types, heads, kv_heads, dim_k, dim_v, window):
    bench = Bench(heads, kv_heads, dim_k, dim_v, window=window, kv_types=kv_types, blocks=16)
    length = 150
    table = bench.rng.permutation(np.arange(1, 16))[: -(-length // BLOCK_SIZE)]
    q, k, v = random_tokens(bench, length)
    k[:, :, 3] *= 20
    start, got = 0, []
    for count in (1, 7, 64, 77, 1):
        rows = slice(start, start + count)
        got.append(
            bench.run(make_batch([(table, start, count)]), q[rows].copy(), k[rows].copy(), v[rows].copy())
        )
        start += count
    got, want = np.concatenate(got), bench.reference_of_stored(q, table, 0)
    assert np.abs(got - want).max() <= STORED_BOUND * np.abs(want).max()


@settings(max_examples=20, deadline=None, print_blob=True)
@given(
    st.sampled_from(CODED),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (8, 1), (16, 2)]),
    st.sampled_from([(32, 32), (64, 96), (128, 64), (96, 160)]),
    st.sampled_from([0, 1, 30, 64]),
    st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_any_shape(kv_types, heads, dims, window, sequences, seed):
    """Several sequences whose earlier tokens are in the pools, attended together and one by one."""
    bench = Bench(*heads, *dims, window=window, kv_types=kv_types, blocks=64, seed=seed)
    tables = np.split(bench.rng.permutation(np.arange(1, 64))[: 10 * len(sequences)], len(sequences))
    for table, (start, _) in zip(tables, sequences, strict=True):
        if start:
            bench.run(make_batch([(table, 0, start)]), *random_tokens(bench, start))
    inputs = [random_tokens(bench, count) for _, count in sequences]
    batch = make_batch([(t, s, c) for t, (s, c) in zip(tables, sequences, strict=True)])
    together = bench.run(batch, *(np.concatenate(column) for column in zip(*inputs, strict=True)), threads=3)
    row = 0
    for table, (start, count), x in zip(tables, sequences, inputs, strict=True):
        got = together[row : row + count]
        alone = bench.run(make_batch([(table, start, count)]), *x, threads=1)
        np.testing.assert_array_equal(got, alone)
        want = bench.reference_of_stored(x[0], table, start)
        assert np.abs(got - want).max() <= STORED_BOUND * np.abs(want).max()
        row += count


@pytest.mark.parametrize("kv_types", PAIRS, ids="-".join)
def test_unwritten_slots_do_not_matter(kv_types):
    """A block is handed out with whatever it held before; NaNs there (as halfs) must not reach the output."""
    clean, dirty = Bench(seed=3, kv_types=kv_types, dim_v=64), Bench(seed=3, kv_types=kv_types, dim_v=64)
    dirty.keys[1:], dirty.values[1:] = 0xFF, 0xFF
    for bench in (clean, dirty):
        bench.out = bench.run(make_batch([([5, 9], 0, 21), ([7], 0, 1)]), *random_tokens(bench, 22))
    np.testing.assert_array_equal(dirty.out, clean.out)
