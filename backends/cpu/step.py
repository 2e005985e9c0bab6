"""The memory through which a step's arrays reach the operators inside a ggml graph.

A graph is built once per shape, its operators hold the address of a `StepHeader` for ever, and
before each run the header is pointed at the arrays of the step. All fields are int64 words:

    word 0  tokens T        4  cu_seqlens_q (int32)      8  counters (two int64 per layer)
         1  sequences S     5  items (int32 [n, 3])      9  scratch of thread 0
         2  positions       6  number of items          10  scratch bytes per thread
         3  context_lens    7  rows of logits L         11  factors of queries (float32 [T]), 0: none
    word 12 + 3 g            slot_mapping, block_table, entries per block-table row of KV group g
    word 12 + 3 G + r        cosine and sine (float32 [T, n_rot / 2, 2]) of RoPE kind r
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends import base
from backends.base import BatchLike
from backends.ggml.models.config import Growth, Rope

BLOCK_SIZE = base.BLOCK_SIZE
QUERY_ROWS = 32  # query rows (tokens x heads of one KV head) that share a pass over keys and values
CHUNK_BLOCKS = 4  # blocks between two updates of the running softmax, at fixed positions

(TOKENS, SEQUENCES, POSITIONS, CONTEXT_LENS, CU_SEQLENS, ITEMS, NUM_ITEMS, LOGITS) = range(8)
COUNTERS, SCRATCH, SCRATCH_STRIDE, GROWTH, GROUPS = 8, 9, 10, 11, 12
WORDS_PER_GROUP = 3


class StepHeader:
    """Owns the header's memory, and whatever a step's words point to while it runs."""

    def __init__(
        self,
        num_groups: int,
        ropes: Sequence[Rope],
        rope_factors: Sequence[np.ndarray | None],
        num_layers: int,
        queries_per_item: int,
        threads: int,
        scratch_bytes: int,
        growth: Growth | None = None,
    ):
        """`growth`: of the queries, where the model has it."""
        self.num_groups, self.queries_per_item = num_groups, queries_per_item
        self.words = np.zeros(GROUPS + WORDS_PER_GROUP * num_groups + len(ropes), np.int64)
        self._growth = growth
        self._turns = [
            (rope.frequencies(factors), rope.magnitude)
            for rope, factors in zip(ropes, rope_factors, strict=True)
        ]
        self._counters = np.zeros(num_layers * 8, np.int64)  # a cache line each
        self._scratch = aligned_empty(threads * scratch_bytes)
        self.words[COUNTERS] = self._counters.ctypes.data
        self.words[SCRATCH] = self._scratch.ctypes.data
        self.words[SCRATCH_STRIDE] = scratch_bytes
        self._alive: list[object] = []

    @property
    def address(self) -> int:
        return self.words.ctypes.data

    def word_address(self, word: int) -> int:
        return self.address + 8 * word

    def counter_address(self, layer: int) -> int:
        return self._counters.ctypes.data + 64 * layer

    def expert_counter_address(self, layer: int) -> int:
        return self.counter_address(layer) + 8

    def rope_word(self, kind: int) -> int:
        return GROUPS + WORDS_PER_GROUP * self.num_groups + kind

    def set_rows(self, count: int) -> None:
        """So many tokens, of which nothing else is known: for graphs without attention."""
        self.words[TOKENS] = count
        self._counters[:] = 0

    def set(self, batch: BatchLike) -> None:
        """Point the header at a step's arrays, which it keeps alive until the next one."""
        items = work_items(batch.cu_seqlens_q, batch.context_lens, self.queries_per_item)
        tables = [rotation_table(batch.positions, *turns) for turns in self._turns]
        factors = None if self._growth is None else self._growth.factors(batch.positions)
        self._alive = [batch, items, tables, factors]
        w = self.words
        w[GROWTH] = 0 if factors is None else factors.ctypes.data
        w[TOKENS], w[SEQUENCES] = len(batch.positions), len(batch.context_lens)
        w[LOGITS] = len(batch.logits_rows)
        w[POSITIONS], w[CONTEXT_LENS] = batch.positions.ctypes.data, batch.context_lens.ctypes.data
        w[CU_SEQLENS], w[ITEMS], w[NUM_ITEMS] = batch.cu_seqlens_q.ctypes.data, items.ctypes.data, len(items)
        for g in range(self.num_groups):
            at = GROUPS + WORDS_PER_GROUP * g
            w[at] = batch.slot_mapping[g].ctypes.data
            w[at + 1] = batch.block_tables[g].ctypes.data
            w[at + 2] = batch.block_tables[g].shape[1]
        for kind, table in enumerate(tables):
            w[self.rope_word(kind)] = table.ctypes.data
        self._counters[:] = 0


def work_items(cu_seqlens: np.ndarray, context_lens: np.ndarray, queries: int) -> np.ndarray:
    """Cut each sequence's rows into items of at most `queries` rows: int32 [n, 3] sequence, row, rows.

    Costly items first, so that threads which take them one by one end together.
    """
    if cu_seqlens[-1] == len(context_lens):  # one row each, as in a decode
        items = np.empty((len(context_lens), 3), np.int32)
        items[:, 0] = items[:, 1] = np.argsort(-context_lens, kind="stable")
        items[:, 2] = 1
        return items
    counts = np.diff(cu_seqlens)
    tiles = -(-counts // queries)
    owner = np.repeat(np.arange(len(counts)), tiles)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    items = np.empty((len(owner), 3), np.int32)
    items[:, 0] = owner
    items[:, 1] = cu_seqlens[owner] + index * queries
    items[:, 2] = np.minimum(queries, cu_seqlens[owner + 1] - items[:, 1])
    seen = context_lens[owner] - cu_seqlens[owner + 1] + items[:, 1] + items[:, 2]
    return np.ascontiguousarray(items[np.argsort(-seen * items[:, 2], kind="stable")])


def rotation_table(positions: np.ndarray, frequencies: np.ndarray, magnitude: float = 1.0) -> np.ndarray:
    """float32 [T, n_rot / 2, 2]: cosine and sine for each token and pair, from float64 angles, times
    `magnitude`."""
    angles = positions.astype(np.float64)[:, None] * frequencies
    table = np.empty((*angles.shape, 2), np.float32)
    np.cos(angles, out=table[..., 0], casting="same_kind")
    np.sin(angles, out=table[..., 1], casting="same_kind")
    if magnitude != 1.0:
        table *= np.float32(magnitude)
    return table


def aligned_empty(nbytes: int, alignment: int = 64) -> np.ndarray:
    """uint8 [nbytes] at an address that is a multiple of `alignment`, zeroed."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
