"""Blocks that go to host memory and come back, on any kind of stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from worker_tools import BLOCK, BLOCKS, Model

from backends.base import StageBackend
from backends.ggml.stage import StageSpec
from hetero.batch import Batch, BlockCopy, BlockMove

SLOTS = 24
LENGTH = 60  # tokens of a sequence


def spec_of(model: Model, first: int = 0, last: int | None = None, **kv_types: str) -> StageSpec:
    """A stage whose groups have different numbers of host slots."""
    host_slots = tuple(SLOTS + g for g in range(model.num_groups))
    return replace(model.spec(first, last), host_slots=host_slots, **kv_types)  # type: ignore[arg-type]


def batch(
    model: Model,
    table: Sequence[int] = (),
    start: int = 0,
    ids: Sequence[int] = (),
    *,
    spills: Sequence[BlockMove] = (),
    copies: Sequence[BlockCopy] = (),
    loads: Sequence[BlockMove] = (),
) -> Batch:
    """Tokens of one sequence, the logits of each wanted; without any, a step of moves alone."""
    count, some = len(ids), int(bool(ids))
    positions = np.arange(start, start + count, dtype=np.int32)
    row = np.array(table or [0], np.int32)
    slots = (row[positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
    return Batch(
        step_id=0,
        input_ids=np.array(ids, np.int32),
        positions=positions,
        slot_mapping=[slots] * model.num_groups,
        block_tables=[np.tile(row, (some, 1))] * model.num_groups,
        context_lens=np.array([start + count] * some, np.int32),
        cu_seqlens_q=np.array([0] + [count] * some, np.int32),
        logits_rows=np.arange(count, dtype=np.int32),
        copies=list(copies),
        spills=spills,
        loads=loads,
    )


def step(stages: Sequence[StageBackend], batch: Batch) -> np.ndarray:
    hidden = None
    for stage in stages:
        stage.prepare(batch, hidden)
        hidden = stage.compute()
        assert (stage.moved_bytes > 0) == (stage.move_seconds > 0) == bool(batch.spills or batch.loads)
    assert hidden is not None
    return hidden.copy()


def moves(model: Model, blocks: Sequence[int], slots: Sequence[int]) -> list[BlockMove]:
    """The same in all groups."""
    return [
        BlockMove(g, block, slot)
        for g in range(model.num_groups)
        for block, slot in zip(blocks, slots, strict=True)
    ]


def there_and_back(model: Model, stages: Sequence[StageBackend], seed: int = 0) -> None:
    """Sequences that were spilled and overwritten go on bit by bit as if nothing had happened.

    Steps of moves alone, steps that also compute, and one whose spill, copy and load use the same block.
    """
    rng = np.random.default_rng(seed)
    n, last, groups = -(-LENGTH // BLOCK), LENGTH - 1, range(model.num_groups)
    first, second = (rng.integers(3, 300, LENGTH).tolist() for _ in range(2))
    # scattered, all of them: what is attended in place may have other bits than what is gathered
    blocks, slots = rng.permutation(np.arange(1, BLOCKS)).tolist(), rng.permutation(SLOTS).tolist()
    near, far, other, (spare, *_) = blocks[:n], blocks[n : 2 * n], blocks[2 * n : 3 * n], blocks[3 * n :]
    held, free = slots[:n], slots[n : 2 * n]

    def begin(table: list[int], ids: list[int]) -> np.ndarray:
        return step(stages, batch(model, table, 0, ids[:last]))

    def end(table: list[int], ids: list[int]) -> np.ndarray:
        return step(stages, batch(model, table, last, ids[last:]))

    alone = [(begin(far, ids), end(far, ids)) for ids in (first, second)]
    begin(near, first)
    nothing = step(stages, batch(model, spills=moves(model, near, held)))
    assert nothing.shape == (0, alone[0][0].shape[1]) and nothing.dtype == np.float32
    nbytes = [stage.moved_bytes for stage in stages]
    assert all(nbytes)
    begin(near, second)
    # the second is spilled and the first comes back while the first is computed elsewhere
    busy = batch(
        model, far, 0, first[:last], spills=moves(model, near, free), loads=moves(model, other, held)
    )
    assert np.array_equal(step(stages, busy), alone[0][0])
    assert [stage.moved_bytes for stage in stages] == [2 * b for b in nbytes]
    assert np.array_equal(end(other, first), alone[0][1])
    # a block is spilled, copied to another, and loaded anew, in this order
    order = batch(
        model,
        spills=moves(model, far[:1], held[:1]),
        copies=[BlockCopy(g, far[0], spare) for g in groups],
        loads=moves(model, far[:1], free[:1]),
    )
    step(stages, order)
    step(stages, batch(model, loads=moves(model, far[1:], free[1:])))
    assert np.array_equal(end(far, second), alone[1][1])
    assert np.array_equal(end([spare, *other[1:]], first), alone[0][1])
    step(stages, batch(model, loads=moves(model, [spare], held[:1])))
    assert np.array_equal(end([spare, *other[1:]], first), alone[0][1])


__all__ = ["BLOCKS", "LENGTH", "SLOTS", "batch", "moves", "spec_of", "step", "there_and_back"]
