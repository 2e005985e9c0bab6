"""The CPU attention and RoPE operators against plain numpy, and their independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cpu import attention as attend
from backends.cpu import rope_store as store
from backends.cpu.step import BLOCK_SIZE, QUERY_ROWS, StepHeader, rotation_table, work_items
from backends.ggml.models.config import Rope
from hetero.batch import Batch

ATTENTION_BOUND = 2e-3  # relative to the largest output; half-precision keys and values
ROPE = Rope(n_rot=16, base=10000.0, scale=1.0, neox=False)


class Bench:
    """One layer's pools and both operators, driven without ggml."""

    def __init__(
        self, heads=6, kv_heads=2, dim_k=32, dim_v=48, blocks=64, window=0, rope=ROPE, norm=False, seed=0
    ):
        self.heads, self.kv_heads, self.dim_k, self.dim_v, self.window = heads, kv_heads, dim_k, dim_v, window
        self.rope, self.rng = rope, np.random.default_rng(seed)
        self.header = StepHeader(
            1, [rope], [None], 1, max(1, QUERY_ROWS * kv_heads // heads), 4, attend.SCRATCH_BYTES
        )
        self.keys = np.zeros((blocks, kv_heads, dim_k, BLOCK_SIZE), np.float16)
        self.values = np.zeros((blocks, kv_heads, BLOCK_SIZE, dim_v), np.float16)
        self.norms = self.rng.uniform(0.5, 1.5, (2, dim_k)).astype(np.float32) if norm else None
        self.eps = 1e-6
        self.scale = np.float32(dim_k**-0.5)

    def run(self, batch, q, k, v, threads=2):
        """Both operators over a batch; returns [T, heads, dim_v]."""
        self.header.set(batch)
        ready = np.empty_like(q)
        out = np.empty((len(q), self.heads, self.dim_v), np.float32)
        p = self._store_parameters()
        for ith in range(threads):
            store.store_share(
                p.ctypes.data,
                q.ctypes.data,
                k.ctypes.data,
                v.ctypes.data,
                ready.ctypes.data,
                np.int64(len(q)),
                np.int64(ith),
                np.int64(threads),
            )
        a = self._attention_parameters()
        for ith in range(threads):
            attend.attend_share(
                a.ctypes.data, ready.ctypes.data, out.ctypes.data, np.int64(len(q)), np.int64(ith)
            )
        return out

    def _store_parameters(self):
        p = np.zeros(store.NUM_PARAMS, np.int64)
        self._common(p, store)
        p[store.P_ROPE_WORD] = self.header.rope_word(0)
        p[store.P_ROTATED], p[store.P_NEOX] = self.rope.n_rot, int(self.rope.neox)
        p[store.P_SCALE] = int(np.float32(self.scale).view(np.int32))
        p[store.P_EPS] = int(np.float32(self.eps).view(np.int32))
        if self.norms is not None:
            p[store.P_QUERY_NORM], p[store.P_KEY_NORM] = self.norms[0].ctypes.data, self.norms[1].ctypes.data
        return p

    def _attention_parameters(self):
        a = np.zeros(attend.NUM_PARAMS, np.int64)
        self._common(a, attend)
        a[attend.P_WINDOW], a[attend.P_COUNTER] = self.window, self.header.counter_address(0)
        return a

    def _common(self, p, names):
        p[names.P_HEADER], p[names.P_HEADS], p[names.P_KV_HEADS] = (
            self.header.address,
            self.heads,
            self.kv_heads,
        )
        p[names.P_DIM_K], p[names.P_DIM_V] = self.dim_k, self.dim_v
        p[names.P_KEY_POOL], p[names.P_VALUE_POOL] = self.keys.ctypes.data, self.values.ctypes.data

    def rotated(self, x, positions, which):
        """Reference in float64: norm, then rotate x [T, heads, dim]."""
        x = x.astype(np.float64)
        if self.norms is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.norms[which]
        r = self.rope
        angles = positions[:, None] * (r.scale * r.base ** (-np.arange(0, r.n_rot, 2) / r.n_rot))
        c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
        half = r.n_rot // 2
        first = np.arange(half) if r.neox else np.arange(0, r.n_rot, 2)
        second = first + half if r.neox else first + 1
        out = x.copy()
        out[..., first] = x[..., first] * c - x[..., second] * s
        out[..., second] = x[..., first] * s + x[..., second] * c
        return out

    def reference(self, q, k, v, start):
        """One sequence whose keys and values are all given: queries are the last len(q) tokens."""
        positions = np.arange(len(k))
        keys, queries = self.rotated(k, positions, 1), self.rotated(q, positions[start:], 0) * self.scale
        share = self.heads // self.kv_heads
        out = np.empty((len(q), self.heads, self.dim_v))
        for i in range(len(q)):
            position = start + i
            low = max(0, position - self.window + 1) if self.window else 0
            for h in range(self.heads):
                s = keys[low : position + 1, h // share] @ queries[i, h]
                weights = np.exp(s - s.max())
                out[i, h] = weights @ v[low : position + 1, h // share].astype(np.float64) / weights.sum()
        return out


def make_batch(sequences):
    """sequences: list of (block table, start, count)."""
    counts = [c for _, _, c in sequences]
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + c) for _, s, c in sequences]).astype(np.int32)
    tables = np.zeros((len(sequences), max(len(t) for t, _, _ in sequences)), np.int32)
    for row, (table, _, _) in zip(tables, sequences, strict=True):
        row[: len(table)] = table
    owner = np.repeat(np.arange(len(sequences)), counts)
    slots = (tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32)
    lens = np.array([s + c for _, s, c in sequences], np.int32)
    return Batch(0, np.zeros(cu[-1], np.int32), positions, [slots], [tables], lens, cu, cu[1:] - 1, [])


def random_tokens(bench, count):
    shapes = ((bench.heads, bench.dim_k), (bench.kv_heads, bench.dim_k), (bench.kv_heads, bench.dim_v))
    return [bench.rng.standard_normal((count, *shape)).astype(np.float32) for shape in shapes]


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
    assert bench.values[1, :, 1].min() == -65504


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


def test_unwritten_slots_do_not_matter():
    """A block is handed out with whatever it held before; NaNs there must not reach the output."""
    clean, dirty = Bench(seed=3), Bench(seed=3)
    dirty.keys[1:], dirty.values[1:] = np.nan, np.nan
    for bench in (clean, dirty):
        bench.out = bench.run(make_batch([([5, 9], 0, 21), ([7], 0, 1)]), *random_tokens(bench, 22))
    np.testing.assert_array_equal(dirty.out, clean.out)
