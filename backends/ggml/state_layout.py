"""How a step's states are advanced on a device that has plain ggml operators only.

These take sequences of as many rows each, so the segments of a step (see recurrent.py) become *batches*,
padded to the longest; and those of one sequence, which follow from each other, go to *waves*:

    sequence a     512 rows, a state is left behind row 496 and behind the last
    sequence b, c  one row each
    wave 0         a: 496 rows, padded to 512 | b, c: 1 row
    wave 1         a: 16 rows

A padding row changes nothing: it has a decay of one, and adds nothing. Pure: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backends.base import BatchLike
from backends.ggml.attention_layout import bucket
from backends.ggml.recurrent import state_segments

Shape = tuple[int, int]  # of a batch: sequences, rows of each


@dataclass(frozen=True, slots=True)
class StateBatch:
    """One batch of segments in a step, n sequences of r rows.

    order    int32 [n r]            rows of the step
    real     float32 [n r]          1, or 0 for padding
    sources  int32 [n]              slots
    targets  int64 [n]              slots; one that nobody reads where nothing is kept
    tails    int32 [n (taps - 1)]   where a sequence's last inputs are, in rows of taps - 1 + r of each
    """

    order: np.ndarray
    real: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    tails: np.ndarray


@dataclass(frozen=True, slots=True)
class StateLayout:
    """`waves` decides the shape of the graph; `batches`, of all waves in turn, is one step's contents.

    `place` int32 [T] finds each row of the step again, among the rows of all batches one behind the other.
    """

    waves: tuple[tuple[Shape, ...], ...]
    batches: list[StateBatch]
    place: np.ndarray


def lay_out_states(batch: BatchLike, taps: int, nowhere: int, rows: int) -> StateLayout:
    """Waves for a step. `taps`: of the convolution. `nowhere`: the slot for states that nobody keeps.

    `rows` is the number of rows that the graph has, padding included.
    """
    segments = state_segments(batch)
    starts = np.flatnonzero(np.diff(segments[:, 0], prepend=-1))
    wave_of = np.arange(len(segments)) - np.repeat(starts, np.diff(starts, append=len(segments)))
    heights = np.array([bucket(int(n), 1, 1 << 30) for n in segments[:, 2]])
    waves, batches, place, at = [], [], np.zeros(rows, np.int32), 0
    for wave in range(int(wave_of.max()) + 1):
        shapes: list[Shape] = []
        for height in np.unique(heights[wave_of == wave]).tolist():
            members = segments[(wave_of == wave) & (heights == height)]
            count = bucket(len(members), 1, 1 << 30)
            shapes.append((count, height))
            batches.append(_batch(members, count, height, taps, nowhere))
            for i, (_, first, n, _, _) in enumerate(members.tolist()):
                place[first : first + n] = at + i * height + np.arange(n)
            at += count * height
        waves.append(tuple(shapes))
    return StateLayout(tuple(waves), batches, place)


def _batch(members: np.ndarray, count: int, height: int, taps: int, nowhere: int) -> StateBatch:
    order, real = np.zeros((count, height), np.int32), np.zeros((count, height), np.float32)
    sources, targets = np.zeros(count, np.int32), np.full(count, nowhere, np.int64)
    ends = np.full(count, 0)  # rows of each; the last inputs end behind them
    for i, (_, first, n, source, target) in enumerate(members.tolist()):
        order[i], real[i, :n], ends[i], sources[i] = first, 1.0, n, source
        order[i, :n] = np.arange(first, first + n)
        targets[i] = target or nowhere
    begins = np.arange(count) * (taps - 1 + height) + ends
    tails = (begins[:, None] + np.arange(taps - 1)).astype(np.int32)
    return StateBatch(order.ravel(), real.ravel(), sources, targets, tails.ravel())


__all__ = ["Shape", "StateBatch", "StateLayout", "lay_out_states"]
