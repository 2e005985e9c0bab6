"""What a step does with the states of recurrent layers, for whoever computes it."""

from __future__ import annotations

import numpy as np

from backends.base import BatchLike


def state_segments(batch: BatchLike) -> np.ndarray:
    """A step's rows cut where a state is written: int64 [n, 5], in the order of sequences, then of rows.

    Each is: sequence, first row, rows, source, target. A segment begins with the state in slot `source` (0:
    with none, which is all zeros) and leaves its own in slot `target` (0: nowhere). Those of one sequence
    follow from each other; those of others never use its targets.
    """
    cu, sources, writes = batch.cu_seqlens_q, batch.state_sources, batch.state_writes
    count = len(batch.context_lens)
    if not len(sources):  # nobody keeps anything, as in a first step to see that all works
        sources = np.zeros(count, np.int32)
    if cu[-1] == count == len(writes):  # one row each, as in a decode
        columns = (np.arange(count), cu[:-1], np.ones(count, np.int64), sources, writes[:, 2])
        return np.stack(columns, axis=1).astype(np.int64)
    found, at = [], 0
    rows_of = writes.tolist()
    for sequence, source in enumerate(sources.tolist()):
        first, end = int(cu[sequence]), int(cu[sequence + 1])
        done = first
        while at < len(rows_of) and rows_of[at][0] == sequence:
            _, rows, slot = rows_of[at]
            found.append((sequence, done, first + rows - done, source, slot))
            done, source, at = first + rows, slot, at + 1
        if done < end:
            found.append((sequence, done, end - done, source, 0))
    return np.array(found, np.int64).reshape(-1, 5)


__all__ = ["state_segments"]
