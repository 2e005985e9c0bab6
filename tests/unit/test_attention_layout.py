"""Attention through parts, order, masks and gathered blocks gives what block tables say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.ggml import attention_layout as layouts
from backends.ggml.attention_layout import BLOCK_SIZE, GATHERED, MAX_VIEWS, SPAN, Layout
from hetero.batch import Batch

DIM = 4
WINDOWS = (None, 40)
NUM_BLOCKS = (400, 500)


def make_batch(sequences: list[tuple[int, int]], shuffle: bool, seed: int) -> Batch:
    """(tokens before, query rows) of each sequence; two KV groups with tables of their own."""
    rng = np.random.default_rng(seed)
    counts = np.array([c for _, c in sequences], np.int32)
    starts = np.array([s for s, _ in sequences], np.int32)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + c) for s, c in sequences]).astype(np.int32)
    owners = np.repeat(np.arange(len(counts)), counts)
    tables, slots = [], []
    for blocks in NUM_BLOCKS:
        needed = [-(-(s + c) // BLOCK_SIZE) for s, c in sequences]
        free = np.arange(1, blocks)
        ids = rng.permutation(free) if shuffle else free
        table, at = np.zeros((len(counts), max(needed)), np.int32), 0
        for row, need in zip(table, needed, strict=True):
            row[:need] = ids[at : at + need]
            at += need
        tables.append(table)
        slots.append(
            (table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype("i4")
        )
    return Batch(0, positions, positions, slots, tables, starts + counts, cu, cu[1:] - 1, copies=[])


def expected(batch: Batch, q: np.ndarray, pools: list[tuple[np.ndarray, np.ndarray]], g: int) -> np.ndarray:
    """Attention of each row over its sequence's tokens, as the block tables say: [T, DIM]."""
    out = np.empty_like(q)
    owners = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.cu_seqlens_q))
    for row, (owner, position) in enumerate(zip(owners, batch.positions, strict=True)):
        first = 0 if WINDOWS[g] is None else max(0, position - WINDOWS[g] + 1)
        tokens = np.arange(first, position + 1)
        at = batch.block_tables[g][owner, tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
        out[row] = attend(q[row : row + 1], pools[g][0][at], pools[g][1][at], np.zeros((1, len(at))))[0]
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = q @ k.T + mask
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)) @ v


def through_parts(
    layout: Layout, batch: Batch, q: np.ndarray, pools: list[tuple[np.ndarray, np.ndarray]], g: int
) -> np.ndarray:
    """The same in the way of paged_graph.py."""
    rows = q if layout.order is None else q[layout.order]
    results, at = [], 0
    for part, member in zip(layout.parts, layout.members, strict=True):
        masks = layouts.mask(part, member, batch, g, WINDOWS[g]).view(np.float16)
        assert masks.shape == (part.sequences, 1, part.rows, part.spans[g])
        for i in range(part.sequences):
            if part.views[g]:
                first = batch.block_tables[g][member.indices[0], member.begins[g][0]] * BLOCK_SIZE
                k, v = (pool[first : first + part.spans[g]] for pool in pools[g])
            else:
                blocks = layouts.block_indices(part, member, batch.block_tables[g], g)
                blocks = blocks.reshape(part.sequences, -1)[i]
                slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
                k, v = (pool[slots] for pool in pools[g])
            assert len(k) == part.spans[g]
            results.append(attend(rows[at : at + part.rows], k, v, masks[i, 0].astype(np.float64)))
            at += part.rows
    attended = np.concatenate(results)
    return attended if layout.place is None else attended[layout.place]


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.booleans(), st.integers(0, 1 << 30))
def test_attention_through_parts_is_what_block_tables_say(
    sequences: list[tuple[int, int]], shuffle: bool, seed: int
) -> None:
    batch = make_batch(sequences, shuffle, seed)
    total = len(batch.positions)
    rows = layouts.bucket(total, 1, 1 << 20)
    layout = layouts.lay_out(batch, WINDOWS, (True, True), NUM_BLOCKS, rows)
    rng = np.random.default_rng(seed)
    pools = [
        (rng.standard_normal((n * BLOCK_SIZE, DIM)), rng.standard_normal((n * BLOCK_SIZE, DIM)))
        for n in NUM_BLOCKS
    ]
    q = rng.standard_normal((rows, DIM))
    for g in range(2):
        got = through_parts(layout, batch, q, pools, g)
        assert got.shape[0] == rows and np.isfinite(got).all()
        np.testing.assert_allclose(got[:total], expected(batch, q[:total], pools, g), atol=1e-12)
    members = np.concatenate([m.indices for m in layout.members])
    assert sorted(members) == list(range(len(sequences))), "each sequence is in one part"


def test_a_single_user_is_attended_in_place() -> None:
    for start, count in ((500, 1), (0, 64), (300, 32)):
        batch = make_batch([(start, count)], shuffle=False, seed=0)
        layout = layouts.lay_out(batch, WINDOWS, (True, True), NUM_BLOCKS, count)
        assert [part.views for part in layout.parts] == [(True, True)]
        assert layout.order is None


def test_scattered_blocks_are_gathered() -> None:
    batch = make_batch([(500, 1)], shuffle=True, seed=0)
    (part,) = layouts.lay_out(batch, WINDOWS, (True, True), NUM_BLOCKS, 1).parts
    assert part.views == (False, False) and part.spans == (512, SPAN)


def test_a_view_does_not_reach_beyond_the_pool() -> None:
    batch = make_batch([(16 * 380, 1)], shuffle=False, seed=0)
    blocks = batch.block_tables[0].shape[1] + 1
    (part,) = layouts.lay_out(batch, WINDOWS, (True, True), (blocks, NUM_BLOCKS[1]), 1).parts
    assert part.spans[0] > blocks * BLOCK_SIZE and not part.views[0]


def test_many_streams_of_one_length_are_one_part_in_their_own_order() -> None:
    batch = make_batch([(200 + i, 1) for i in range(MAX_VIEWS + 4)], shuffle=True, seed=0)
    layout = layouts.lay_out(batch, WINDOWS, (True, True), NUM_BLOCKS, 8)
    assert len(layout.parts) == 1 and layout.order is None


def test_a_part_gathers_a_bounded_number_of_tokens() -> None:
    tables = [np.tile(np.arange(1, 300, dtype=np.int32), (32, 1))] * 2
    batch = make_batch([(1, 1)], shuffle=False, seed=0)
    batch.block_tables, batch.context_lens = tables, np.full(32, 299 * BLOCK_SIZE, np.int32)
    batch.cu_seqlens_q = np.arange(33, dtype=np.int32)
    layout = layouts.lay_out(batch, WINDOWS, (True, True), NUM_BLOCKS, 32)
    assert len(layout.parts) > 1
    assert all(part.sequences * part.spans[0] <= GATHERED for part in layout.parts)


def test_a_group_that_the_stage_lacks_costs_nothing() -> None:
    batch = make_batch([(500, 1)], shuffle=False, seed=0)
    (part,) = layouts.lay_out(batch, WINDOWS, (False, True), NUM_BLOCKS, 1).parts
    assert part.spans == (0, SPAN) and part.views == (False, True)
