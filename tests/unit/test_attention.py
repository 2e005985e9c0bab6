"""The CPU attention and RoPE operators against plain numpy, and their independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from attention_tools import Bench, make_batch, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cpu.step import BLOCK_SIZE, rotation_table, work_items
from backends.ggml.models.config import Rope

ATTENTION_BOUND = 2e-3  # relative to the largest output; half-precision keys and values


@pytest.mark.parametrize(
    "heads, kv_heads, dim_k, dim_v", [(6, 2, 32, 48), (4, 4, 64, 64), (4, 1, 128, 256), (8, 1, 16, 16)]
)
@pytest.mark.parametrize("window", [0, 1, 20, 64])
def test_equals_numpy_in_chunks(heads, kv_heads, dim_k, dim_v, window):
    bench = Bench(heads, kv_heads, dim_k, dim_v, window=window)
    length = 150
    table = bench.rng.permutation(np.arange(1, 64))[: -(-length // BLOCK_SIZE)]
    q, k, v = random_tokens(bench, length)
    start = 0
    got = np.empty((length, heads, dim_v), np.float32)
    for count in (1, 7, 64, 33, 45):
        part = slice(start, start + count)
        got[part] = bench.run(
            make_batch([(table, start, count)]), q[part].copy(), k[part].copy(), v[part].copy()
        )
        start += count
    want = bench.reference(q, k, v, 0)
    assert np.abs(got - want).max() <= ATTENTION_BOUND * np.abs(want).max()


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_norm_and_rotation(neox, norm):
    rope = Rope(n_rot=24, base=5000.0, scale=0.5, neox=neox)
    bench = Bench(rope=rope, norm=norm)
    q, k, v = random_tokens(bench, 40)
    got = bench.run(make_batch([([3, 1, 2], 0, 40)]), q, k, v)
    want = bench.reference(q, k, v, 0)
    assert np.abs(got - want).max() <= ATTENTION_BOUND * np.abs(want).max()


@settings(max_examples=25, deadline=None, print_blob=True)
@given(st.integers(0, 2**32), st.sampled_from([0, 5, 40]), st.integers(1, 4))
def test_bits_do_not_depend_on_the_batch(seed, window, sequences):
    """The same sequences, computed whole and alone, or in random chunks mixed with each other."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 120, sequences)
    tables = np.split(rng.permutation(np.arange(1, 64))[: 8 * sequences], sequences)
    alone = Bench(window=window, seed=1)
    inputs = [random_tokens(alone, int(n)) for n in lengths]
    want = [
        alone.run(make_batch([(t, 0, int(n))]), *x, threads=1)
        for t, n, x in zip(tables, lengths, inputs, strict=True)
    ]
    mixed = Bench(window=window, seed=1)
    got = [np.empty_like(w) for w in want]
    done = np.zeros(sequences, int)
    while (done < lengths).any():
        todo = [i for i in rng.permutation(sequences) if done[i] < lengths[i]]
        counts = [int(rng.integers(1, lengths[i] - done[i] + 1)) for i in todo]
        batch = make_batch([(tables[i], int(done[i]), c) for i, c in zip(todo, counts, strict=True)])
        parts = [[x[done[i] : done[i] + c] for x in inputs[i]] for i, c in zip(todo, counts, strict=True)]
        out = mixed.run(batch, *(np.concatenate(columns) for columns in zip(*parts, strict=True)), threads=3)
        row = 0
        for i, c in zip(todo, counts, strict=True):
            got[i][done[i] : done[i] + c] = out[row : row + c]
            done[i], row = done[i] + c, row + c
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_huge_values_are_stored_finite():
    bench = Bench()
    q, k, v = random_tokens(bench, 3)
    k[1], v[1] = 1e9, -1e9
    assert np.isfinite(bench.run(make_batch([([1], 0, 3)]), q, k, v)).all()
    assert bench.stored(1)[1, :, 1].min() == -65504


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 70)), min_size=1, max_size=9), st.integers(1, 32)
)
def test_work_items_cover_each_row_once(sequences, queries):
    counts = np.array([c for _, c in sequences])
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.array([s + c for s, c in sequences], np.int32)
    items = work_items(cu, lens, queries)
    rows = sorted(r for _, row, n in items for r in range(row, row + n))
    assert rows == list(range(cu[-1]))
    assert all(cu[s] <= row and row + n <= cu[s + 1] and 1 <= n <= queries for s, row, n in items)


def test_rotation_table_is_exact_at_long_positions():
    positions = np.array([0, 1, 100_000], np.int32)
    table = rotation_table(positions, np.array([1.0, 0.01]))
    np.testing.assert_allclose(table[2, 1], [np.cos(1000.0), np.sin(1000.0)], rtol=1e-6)
