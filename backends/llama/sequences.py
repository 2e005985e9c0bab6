"""Which of libllama's sequences holds what, found by its tokens.

The scheduler thinks in blocks; libllama in sequences of tokens. A block's content follows from the tokens in
it and before it, so that of a request nothing needs to be known here but its tokens:

    wanted       t t t t t t t t t | n n n      t: computed before this step, n: new
    sequence a   t t t t t t x x                6 are the same; x: of another request, or a wrong guess
    sequence b   t t t t                        4
    taken        a copy of a's first 6, then t t t | n n n are computed

The scheduler knows what it has computed, so as a rule all of the t are found. What a full table of sequences
had to give up is computed again: an answer never depends on what is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backends.base import BLOCK_SIZE

_NONE = np.empty(0, np.int32)


class Memory(Protocol):
    """What a context can do with its sequences. See backends.llama.context."""

    def copy(self, source: int, target: int, length: int) -> None: ...

    def cut(self, sequence: int, length: int) -> bool: ...


@dataclass(slots=True)
class _Sequence:
    """`tokens` int32, and the block that the last one was said to be in. `used`: the step of that."""

    tokens: np.ndarray = field(default_factory=lambda: _NONE)
    last_block: int = -1
    used: int = 0


class Sequences:
    """The contents of `count` sequences of a memory.

    `keeps_prefixes`: the memory can cut and copy a sequence anywhere; else a sequence only goes on, or
    begins anew. A sequence that was taken in the present step is not given to anybody else in it.
    """

    def __init__(self, memory: Memory, count: int, num_blocks: int, keeps_prefixes: bool):
        self._memory, self._keeps = memory, keeps_prefixes
        self._all = [_Sequence() for _ in range(count)]
        self._writer = np.full(num_blocks, -1, np.int32)  # the sequence that wrote a block last
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1

    def source(self, tokens: np.ndarray, blocks: np.ndarray) -> tuple[int, int]:
        """(a sequence that begins as int32 `tokens` do, how many of them it has).

        `blocks` are those that the tokens are in, and the block of the next token last.
        """
        if not len(tokens):
            return 0, 0
        for candidate in dict.fromkeys(self._writer[blocks[-2:]].tolist()):
            if candidate >= 0 and _common(self._all[candidate].tokens, tokens) == len(tokens):
                return candidate, len(tokens)
        lengths = [_common(sequence.tokens, tokens) for sequence in self._all]
        best = int(np.argmax(lengths))
        return best, lengths[best]

    def take(self, tokens: np.ndarray, blocks: np.ndarray, source: int, length: int) -> tuple[int, int]:
        """Prepare a sequence that goes on behind `tokens`; source and length as `source` has them.

        Returns (the sequence, how many of the tokens it has): the rest has to be computed.
        """
        if self._is_own(blocks, source, length):
            if len(self._all[source].tokens) == length or self._memory.cut(source, length):
                self._all[source] = _Sequence(tokens.copy(), used=self._step)
                return source, length
            length = 0
        if not self._keeps:
            length = 0
        target = self._free(source if length else -1)
        if target is None:  # every other one is in use
            if self._memory.cut(source, length):
                self._all[source] = _Sequence(tokens[:length].copy(), used=self._step)
                return source, length
            target, length = source, 0
        self._clear(target)
        if length:
            self._memory.copy(source, target, length)
            own = self._all[source]
            own.used = max(own.used, self._step - 1)  # of use lately, and still free for another request
        self._all[target] = _Sequence(tokens[:length].copy(), used=self._step)
        return target, length

    def extend(self, sequence: int, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Take note that tokens go behind those of a sequence taken in this step, into these blocks."""
        own = self._all[sequence]
        own.tokens, own.last_block = np.concatenate((own.tokens, tokens)), int(blocks[-1])
        self._writer[blocks] = sequence

    def block_changed(self, block: int) -> None:
        """What is in the block came from elsewhere."""
        self._writer[block] = -1

    def give_up(self, count: int) -> int:
        """Forget up to `count` sequences that this step has no use for, the least useful first."""
        idle = [i for i, s in enumerate(self._all) if len(s.tokens) and s.used < self._step]
        idle.sort(key=self._worth)
        for sequence in idle[:count]:
            self._clear(sequence)
        return min(count, len(idle))

    def forget_all(self) -> None:
        """After a failure nobody knows what the memory holds."""
        for sequence in range(len(self._all)):
            self._clear(sequence)

    def check_invariants(self) -> None:
        assert all(s.used <= self._step for s in self._all)
        assert self._writer.min(initial=-1) >= -1 and self._writer.max(initial=-1) < len(self._all)

    def _is_own(self, blocks: np.ndarray, source: int, length: int) -> bool:
        """Whether whoever asks has written `source`, as far as can be told, and nobody else goes on with it.

        A block that is not full is of one request alone. At the end of a full one it is a guess: who is
        wrong about it has his tokens copied, or computed, again.
        """
        own = self._all[source]
        if not length or own.used == self._step:
            return False
        if not self._keeps or len(own.tokens) == length:
            return self._writer[blocks[(length - 1) // BLOCK_SIZE]] == source
        return bool(length % BLOCK_SIZE) and self._writer[blocks[length // BLOCK_SIZE]] == source

    def _free(self, keep: int) -> int | None:
        """The least useful one that this step does not use, and that is not `keep`. None: there is none."""
        idle = (i for i, s in enumerate(self._all) if s.used < self._step and i != keep)
        return min(idle, key=self._worth, default=None)

    def _worth(self, sequence: int) -> tuple[bool, bool, int]:
        """The least first: empty ones, those whose blocks others have written over, the longest unused."""
        own = self._all[sequence]
        lives = own.last_block >= 0 and self._writer[own.last_block] == sequence
        return len(own.tokens) > 0, lives, own.used

    def _clear(self, sequence: int) -> None:
        if len(self._all[sequence].tokens):
            self._memory.cut(sequence, 0)
        self._all[sequence] = _Sequence(used=self._all[sequence].used)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the longest common beginning."""
    count = min(len(a), len(b))
    if not count or a[0] != b[0]:
        return 0
    differs = a[:count] != b[:count]
    return int(np.argmax(differs)) if differs.any() else count


__all__ = ["Memory", "Sequences"]
