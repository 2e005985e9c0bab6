"""A stage under test: steps of made-up sequences through a few layers, and what each part of one took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backends.base import StageBackend
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import StageSpec
from hetero.batch import Batch, BlockCopy
from hetero.kv_types import KVTypes
from hetero.plan.facts import token_bytes
from hetero.plan.planner import BLOCK_SIZE, kv_groups

POOL_BYTES = 96 << 20  # of KV; sequences share blocks beyond that, too far apart for any cache


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of a step: taking in its inputs, computing, handing out the result."""

    enter: float
    graph: float
    leave: float

    @property
    def total(self) -> float:
        return self.enter + self.graph + self.leave


class Probe:
    """A stage of layers [first, last) and the batches to time it with."""

    def __init__(
        self,
        open_stage: Callable[[StageSpec], StageBackend],
        config: ModelConfig,
        layers: tuple[int, int],
        sizes: tuple[int, int, int, int],
        types: KVTypes,
    ):
        """`sizes`: most sequences, longest context, most tokens attended in a step, tokens of a chunk.

        `types`: how the device keeps keys and values.
        """
        sequences, context, attended, chunk = sizes
        self._config, (self._first, self._last) = config, layers
        groups = kv_groups(config.layer_windows, context, sequences, chunk)
        self._recurrent = groups[-1].recurrent
        self._num_groups = len(groups) - self._recurrent
        token = sum(token_bytes(config, layer, types) for layer in range(*layers))
        affordable = POOL_BYTES // max(1, BLOCK_SIZE * token)
        least = -(-max(context, chunk, BLOCK_SIZE) // BLOCK_SIZE)
        self._blocks = max(least, min(affordable, -(-attended // BLOCK_SIZE)))  # block 0 on top
        spec = StageSpec(
            first=self._first,
            last=self._last,
            group_of={layer: g for g, group in enumerate(groups) for layer in group.layers},
            num_blocks=(1 + self._blocks,) * self._num_groups,
            max_tokens=max(sequences, chunk),
            max_logits=sequences,
            key_type=types.keys,
            value_type=types.values,
            num_states=1 + sequences if self._recurrent else 0,
        )
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((spec.max_tokens, config.n_embd)).astype(np.float32)
        self._rows = rows if self._first else None
        self._ids = rng.integers(0, config.n_vocab, spec.max_tokens).astype(np.int32)
        self._stage = open_stage(spec)
        self._fill()

    def step(self, tokens: int, context: int) -> Callable[[], Point]:
        """A step to run again and again: `tokens` sequences at `context` tokens; or, with context 0, a
        prompt's first `tokens` tokens."""
        batch = self._decode(tokens, context) if context else self._chunk(tokens)
        hidden = None if self._rows is None else self._rows[: len(batch.positions)]

        def run() -> Point:
            began = time.perf_counter()
            self._stage.prepare(batch, hidden)
            ready = time.perf_counter()
            self._stage.compute()
            graph = self._stage.graph_seconds
            return Point(ready - began, graph, max(0.0, time.perf_counter() - ready - graph))

        return run

    def close(self) -> None:
        self._stage.close()

    def _fill(self) -> None:
        """Write all blocks: memory that was never written is one page of zeros, in reach of every cache."""
        self.step(BLOCK_SIZE, 0)()
        batch = self._chunk(1)
        batch.copies = [
            BlockCopy(g, 1, block) for g in range(self._num_groups) for block in range(2, 1 + self._blocks)
        ]
        hidden = None if self._rows is None else self._rows[:1]
        self._stage.prepare(batch, hidden)
        self._stage.compute()

    def _decode(self, tokens: int, context: int) -> Batch:
        """`tokens` sequences, the last of their `context` tokens each."""
        length = -(-context // BLOCK_SIZE)
        tables = 1 + np.arange(tokens * length, dtype=np.int32).reshape(tokens, length) % self._blocks
        positions = np.full(tokens, context - 1, np.int32)
        return self._batch(tables, positions, np.ones(tokens, np.int32), np.arange(tokens, dtype=np.int32))

    def _chunk(self, tokens: int) -> Batch:
        tables = 1 + np.arange(-(-tokens // BLOCK_SIZE), dtype=np.int32)[None]
        last = np.array([tokens - 1], np.int32)
        return self._batch(tables, np.arange(tokens, dtype=np.int32), np.array([tokens], np.int32), last)

    def _batch(
        self, tables: np.ndarray, positions: np.ndarray, counts: np.ndarray, logits_rows: np.ndarray
    ) -> Batch:
        owners = np.repeat(np.arange(len(counts)), counts)
        slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        ends = np.cumsum(counts).astype(np.int32)
        batch = Batch(
            step_id=0,
            input_ids=self._ids[: len(positions)],
            positions=positions,
            slot_mapping=[slots.astype(np.int32)] * self._num_groups,
            block_tables=[tables] * self._num_groups,
            context_lens=positions[ends - 1] + 1,
            cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
            logits_rows=logits_rows if self._last == self._config.n_layer else np.zeros(0, np.int32),
            copies=[],
        )
        if self._recurrent:  # a slot for each sequence
            states = 1 + np.arange(len(counts))
            batch.state_sources = np.where(positions[ends - 1] >= counts, states, 0).astype(np.int32)
            batch.state_writes = np.stack([states - 1, counts, states], axis=1).astype(np.int32)
        return batch


__all__ = ["Point", "Probe"]
