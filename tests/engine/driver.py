"""Drives a stage directly: sequences in, logits out, with block tables of the test's choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from backends.base import RECURRENT, DeviceSpec
from backends.ggml.devices import open_device
from backends.ggml.models import ModelConfig, read_config
from backends.ggml.stage import GgmlStage, StageSpec
from hetero.batch import Batch, BlockCopy
from quant.gguf import open_gguf

BLOCK = 16


class Driver:
    """A model on a device with `num_blocks` blocks per KV group, of which block 0 is scratch.

    `kind` is another stage class than the ordinary one. `kv_types`: formats of keys and of values. `change`
    is made to the model's configuration before the stage is built.
    """

    def __init__(
        self,
        path: Path,
        num_blocks: int = 200,
        max_tokens: int = 256,
        threads: int = 2,
        device: DeviceSpec | str = "CPU",
        kind: type[GgmlStage] = GgmlStage,
        kv_types: tuple[str, str] = ("f16", "f16"),
        max_context: int = 0,
        change: Callable[[ModelConfig], ModelConfig] | None = None,
    ):
        self.gguf = open_gguf(path)
        self.config = read_config(self.gguf)
        if change is not None:
            self.config = change(self.config)
        found = set(self.config.layer_windows)
        windows = sorted(found, key=lambda w: (w == RECURRENT, w is not None, w or 0))
        group_of = {layer: windows.index(w) for layer, w in enumerate(self.config.layer_windows)}
        self.recurrent = RECURRENT in found
        self.num_groups, self.num_blocks = len(windows) - self.recurrent, num_blocks
        spec = StageSpec(
            0,
            self.config.n_layer,
            group_of,
            (num_blocks,) * self.num_groups,
            max_tokens,
            max_logits=max_tokens,
            max_context=max_context,
            key_type=kv_types[0],
            value_type=kv_types[1],
            num_states=num_blocks if self.recurrent else 0,
        )
        self.stage = kind(self.gguf, self.config, open_device(device, threads), spec)

    def step(
        self,
        sequences: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        copies: Sequence[BlockCopy] = (),
        states: tuple[Sequence[int], Sequence[tuple[int, int, int]]] | None = None,
    ) -> list[np.ndarray]:
        """Compute (block table, start, token ids) of several sequences; logits of every token.

        A sequence's state is in the slot with the number of its first block, unless `states` gives the
        batch's sources and writes.
        """
        counts = [len(ids) for _, _, ids in sequences]
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(s, s + len(i)) for _, s, i in sequences]).astype(np.int32)
        tables = np.zeros((len(sequences), max(len(t) for t, _, _ in sequences)), np.int32)
        for row, (table, _, _) in zip(tables, sequences, strict=True):
            row[: len(table)] = table
        owner = np.repeat(np.arange(len(sequences)), counts)
        slots = (tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
        batch = Batch(
            step_id=0,
            input_ids=np.concatenate([i for _, _, i in sequences]).astype(np.int32),
            positions=positions,
            slot_mapping=[slots] * self.num_groups,
            block_tables=[tables] * self.num_groups,
            context_lens=np.array([s + len(i) for _, s, i in sequences], np.int32),
            cu_seqlens_q=cu,
            logits_rows=np.arange(cu[-1], dtype=np.int32),
            copies=list(copies),
        )
        if states is not None:
            batch.state_sources = np.array(states[0], np.int32)
            batch.state_writes = np.array(states[1], np.int32).reshape(-1, 3)
        elif self.recurrent:
            batch.state_sources = np.array([table[0] * (s > 0) for table, s, _ in sequences], np.int32)
            writes = [(i, n, sequences[i][0][0]) for i, n in enumerate(counts)]
            batch.state_writes = np.array(writes, np.int32)
        self.stage.prepare(batch, None)
        logits = self.stage.compute().copy()
        return np.split(logits, cu[1:-1])

    def logits(self, ids: Sequence[int], chunk: int = 64, seed: int = 0) -> np.ndarray:
        """Logits [len(ids), n_vocab] of one sequence, computed in chunks through shuffled blocks."""
        table = np.random.default_rng(seed).permutation(np.arange(1, self.num_blocks))[
            : -(-len(ids) // BLOCK)
        ]
        parts = [
            self.step([(table, start, ids[start : start + chunk])])[0] for start in range(0, len(ids), chunk)
        ]
        return np.concatenate(parts)

    def close(self) -> None:
        self.stage.close()
