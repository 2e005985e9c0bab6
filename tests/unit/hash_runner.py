"""Stages that write what every token before says, so that a wrong block or slot shows in the text."""

from __future__ import annotations

import random

import numpy as np
from fake_runner import BLOCK_SIZE, N_VOCAB, FakeRunner, Result

from hetero.batch import Batch


def chained(digest: int, token: int) -> int:
    return hash((digest, token))


def after(digest: int) -> int:
    """The token that this model writes behind all that a digest stands for."""
    return 97 + digest % 26


def written(prompt: str, count: int) -> str:
    digest = 0
    for token in prompt.encode():
        digest = chained(digest, token)
    out = ""
    for _ in range(count):
        out += chr(after(digest))
        digest = chained(digest, ord(out[-1]))
    return out


class HashRunner(FakeRunner):
    """What it writes depends on every token before, as its paged memory has it.

    A slot holds the digests before and behind its token: a slot that is not of the sequence breaks the chain.
    """

    def __init__(self, depth: int = 1, window: int | None = None, wrong: float = 0.0, seed: int = 0):
        super().__init__(depth)
        self.window, self.wrong, self.rng = window, wrong, random.Random(seed)
        self.slots: list[dict[int, tuple[int, int]]] = [{}, {}]
        self.tokens = 0
        self.widest = 0  # tokens of a step

    def submit(self, batch: Batch, /) -> None:
        super().submit(batch)
        if self._results[-1].error is not None:
            return
        self.tokens += len(batch.input_ids)
        self.widest = max(self.widest, len(batch.input_ids))
        for copy in batch.copies:
            slots = self.slots[copy.group]
            for offset in range(BLOCK_SIZE):
                if (held := slots.get(copy.src * BLOCK_SIZE + offset)) is not None:
                    slots[copy.dst * BLOCK_SIZE + offset] = held
        digests = np.zeros(len(batch.input_ids), np.int64)
        for s in range(len(batch.context_lens)):
            self._compute(batch, s, digests)
        logits = np.zeros((len(batch.logits_rows), N_VOCAB), np.float32)
        for row, at in zip(logits, batch.logits_rows, strict=True):
            right = self.rng.random() >= self.wrong
            row[after(int(digests[at])) if right else 48] = 1
        self._results[-1] = Result(batch.step_id, logits, None, self._results[-1].stages)

    def _compute(self, batch: Batch, s: int, digests: np.ndarray) -> None:
        for row in range(batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1]):
            position = int(batch.positions[row])
            for g, slots in enumerate(self.slots[: len(batch.block_tables)]):
                table = batch.block_tables[g][s]

                def at(p: int, table: np.ndarray = table) -> int:
                    return int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE

                span = position if g == 0 or self.window is None else min(position, self.window - 1)
                before = slots[at(position - 1)][1] if position else 0
                for p in range(position - span + 1, position):
                    assert slots[at(p)][0] == slots[at(p - 1)][1], "attends what is not its own"
                digests[row] = chained(before, int(batch.input_ids[row]))
                slots[at(position)] = before, int(digests[row])
