"""The CPU attention and RoPE operators driven without ggml, and what the pools hold in plain numpy."""

from __future__ import annotations

import numpy as np

from backends.cpu import attention as attend
from backends.cpu import attention_pools, kv_codes, kv_store
from backends.cpu import rope_store as store
from backends.cpu.step import BLOCK_SIZE, QUERY_ROWS, StepHeader
from backends.ggml.models.config import Rope
from hetero.batch import Batch
from quant.encoders import encode_q8_0
from quant.fp8 import decode_rows, encode_rows

ROPE = Rope(n_rot=16, base=10000.0, scale=1.0, neox=False)


def encoded(kv_type: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, dim] and scales float16 [n, scales of a row] of float32 rows [n, dim] within +-65504."""
    if kv_type == "f16":
        return rows.astype(np.float16), np.zeros((len(rows), 0), np.float16)
    if kv_type == "fp8":
        codes, scales = encode_rows(rows)
        return codes, scales[:, None]
    blocks = encode_q8_0(rows.reshape(-1, 32))
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    return blocks[:, 2:].reshape(rows.shape), scales.reshape(len(rows), -1)


def decoded(kv_type: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [n, dim], the inverse."""
    if kv_type == "f16":
        return codes.astype(np.float32)
    if kv_type == "fp8":
        return decode_rows(codes, scales[:, 0])
    return codes.view(np.int8) * np.repeat(scales.astype(np.float32), 32, axis=1)


def take_apart(kv_type: str, part: np.ndarray, dim: int, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [16, dim] and scales [16, scales of a row] of a part uint8 [bytes], as kv_codes.py draws it."""
    end = BLOCK_SIZE * dim * (2 if kv_type == "f16" else 1)
    codes = part[:end].view(np.float16 if kv_type == "f16" else np.uint8)
    codes = codes.reshape(dim, BLOCK_SIZE).T if keys else codes.reshape(BLOCK_SIZE, dim)
    return codes.copy(), part[end:].view(np.float16).reshape(-1, BLOCK_SIZE).T


class Bench:
    """One layer's pools and both operators, driven without ggml."""

    def __init__(
        self,
        heads=6,
        kv_heads=2,
        dim_k=32,
        dim_v=48,
        blocks=64,
        window=0,
        rope=ROPE,
        norm=False,
        seed=0,
        kv_types=("f16", "f16"),
    ):
        self.heads, self.kv_heads, self.dim_k, self.dim_v, self.window = heads, kv_heads, dim_k, dim_v, window
        self.rope, self.rng = rope, np.random.default_rng(seed)
        self.header = StepHeader(
            1, [rope], [None], 1, max(1, QUERY_ROWS * kv_heads // heads), 4, attend.SCRATCH_BYTES
        )
        self.kv_types = kv_types
        self.part_bytes = [
            kv_codes.part_bytes(t, dim) for t, dim in zip(kv_types, (dim_k, dim_v), strict=True)
        ]
        self.keys, self.values = (np.zeros((blocks, kv_heads, n), np.uint8) for n in self.part_bytes)
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
        kinds = [kv_codes.FORMATS[t] for t in self.kv_types]
        p[store.P_STORE_KEY] = kv_store.compiled_store(kinds[0], kv_store.KEYS).address
        p[store.P_STORE_VALUE] = kv_store.compiled_store(kinds[1], kv_store.VALUES).address
        return p

    def _attention_parameters(self):
        a = np.zeros(attend.NUM_PARAMS, np.int64)
        self._common(a, attend)
        a[attend.P_WINDOW], a[attend.P_COUNTER] = self.window, self.header.counter_address(0)
        kinds = [kv_codes.FORMATS[t] for t in self.kv_types]
        a[attend.P_SCORES] = attention_pools.compiled_scores(kinds[0]).address
        a[attend.P_VALUES] = attention_pools.compiled_values(kinds[1]).address
        return a

    def _common(self, p, names):
        p[names.P_HEADER], p[names.P_HEADS], p[names.P_KV_HEADS] = (
            self.header.address,
            self.heads,
            self.kv_heads,
        )
        p[names.P_DIM_K], p[names.P_DIM_V] = self.dim_k, self.dim_v
        p[names.P_KEY_POOL], p[names.P_VALUE_POOL] = self.keys.ctypes.data, self.values.ctypes.data
        p[names.P_KEY_BYTES], p[names.P_VALUE_BYTES] = self.part_bytes

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

    def stored(self, which):
        """What the pools of keys (0) or values (1) stand for: float32 [blocks, KV heads, 16, dim]."""
        pool, dim = ((self.keys, self.dim_k), (self.values, self.dim_v))[which]
        t = self.kv_types[which]
        parts = pool.reshape(-1, pool.shape[-1])
        out = np.stack([decoded(t, *take_apart(t, part, dim, which == 0)) for part in parts])
        return out.reshape(*pool.shape[:2], BLOCK_SIZE, dim)

    def reference(self, q, k, v, start):
        """One sequence whose keys and values are all given: queries are the last len(q) tokens."""
        positions = np.arange(len(k))
        return self.attended(q, self.rotated(k, positions, 1), v, start)

    def reference_of_stored(self, q, table, start):
        """The same with the keys and values that are in the pools."""
        length = start + len(q)
        keys, values = (
            self.stored(which)[table].swapaxes(1, 2).reshape(-1, self.kv_heads, dim)[:length]
            for which, dim in ((0, self.dim_k), (1, self.dim_v))
        )
        return self.attended(q, keys.astype(np.float64), values, start)

    def attended(self, q, keys, v, start):
        queries = self.rotated(q, np.arange(start, start + len(q)), 0) * self.scale
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
