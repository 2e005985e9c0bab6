"""How the rows of a step are attended on a device that has no kernel for block tables.

Plain ggml operators attend tensors of equal extents, so the sequences of a step are sorted into
*parts*: sequences with about as many query rows and about as many tokens, padded to the largest.

    step rows      a a a a a a b c d           (a: a chunk of a prompt; b, c, d: one token each)
    part 0         a a a a a a . .             1 sequence, 8 rows, span 256
    part 1         b c d                       3 sequences, 1 row, span 512

`order` gathers the rows of all parts, one behind the other; `place` finds each row again.
A part of one sequence whose blocks follow each other reads keys and values where they lie (a *view*);
the others gather copies of their blocks. Pure: arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backends.base import BLOCK_SIZE, BatchLike

if TYPE_CHECKING:
    from backends.ggml.state_layout import StateLayout

SPAN = 256  # tokens: CUDA's flash attention wants multiples of it
SHORT = 8  # up to so many rows, sequences share parts; more are a prefill's chunk, a part of their own
MAX_VIEWS = 4  # up to so many short sequences are attended one by one, each in place
GATHERED = 16384  # tokens that a part may copy, unless a single sequence is longer
HIDDEN = 0xFC00  # minus infinity as f16


@dataclass(frozen=True, slots=True)
class Part:
    """Extents of a part: `rows` query rows of each sequence; per KV group the tokens, and whether in place.

    A group that the stage does not have has span 0.
    """

    sequences: int
    rows: int
    spans: tuple[int, ...]
    views: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """The sequences of a part, and where in each the attended tokens begin: `begins[g]` in blocks."""

    indices: np.ndarray
    begins: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Layout:
    """`parts` decides the shape of the graph, the rest is one step's contents.

    `order` is int32 [sum of sequences x rows], None where it would be the rows as they are; then the
    result needs no `place` (int32 [T]) either.
    """

    parts: tuple[Part, ...]
    members: list[Member]
    order: np.ndarray | None
    place: np.ndarray | None
    states: StateLayout | None = None  # where there are recurrent layers

    @property
    def key(self) -> tuple:
        return self.parts, self.order is None, self.states and self.states.waves


def bucket(count: int, low: int, limit: int) -> int:
    """The number of rows a graph for `count` rows has: exact up to 8, then four sizes per doubling.

    At least `low`, and at most `limit` unless `low` is more. 0 stays 0.
    """
    if count == 0:
        return 0
    step = 1 << max(0, count.bit_length() - 3)
    return max(low, min(-(-count // step) * step, limit))


def span_of(tokens: int) -> int:
    """Tokens that are attended in place of `tokens`: whole SPANs, from 1,024 on four sizes per doubling."""
    step = max(SPAN, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


def lay_out(
    batch: BatchLike,
    windows: Sequence[int | None],
    used: Sequence[bool],
    num_blocks: Sequence[int],
    rows: int,
    in_place: bool = True,
) -> Layout:
    """Parts for a step. `windows[g]`, `num_blocks[g]` and whether it is used, of each KV group.

    `rows` is the number of rows that the graph has, padding included. `in_place`: whether keys and
    values can be attended where they lie.
    """
    counts, lens = np.diff(batch.cu_seqlens_q), batch.context_lens
    first_query = lens - counts
    begins = [
        np.zeros_like(lens) if w is None else np.maximum(0, first_query - w + 1) // BLOCK_SIZE
        for w in windows
    ]
    needs = [lens - b * BLOCK_SIZE for b in begins]
    parts, members = [], []
    for indices, height in _sort(counts, needs, used):
        chosen = [b[indices] for b in begins]
        spans = tuple(span_of(int(n[indices].max())) if u else 0 for n, u in zip(needs, used, strict=True))
        views = tuple(
            in_place
            and u
            and len(indices) == 1
            and _in_place(table[indices[0]], int(b[0]), int(n[indices[0]]), s, blocks)
            for u, table, b, n, s, blocks in zip(
                used, batch.block_tables, chosen, needs, spans, num_blocks, strict=True
            )
        )
        parts.append(Part(bucket(len(indices), 1, 1 << 30), height, spans, views))
        members.append(Member(indices, chosen))
    order, place = _order(parts, members, batch.cu_seqlens_q, counts, rows)
    if np.array_equal(order, np.arange(rows)):
        return Layout(tuple(parts), members, None, None)
    return Layout(tuple(parts), members, order, place)


def _sort(counts: np.ndarray, needs: list[np.ndarray], used: Sequence[bool]) -> list[tuple[np.ndarray, int]]:
    """(indices in step order, rows) of each part."""
    need = np.max([n for n, u in zip(needs, used, strict=True) if u], axis=0)
    found = [(np.array([i]), bucket(int(counts[i]), 1, 1 << 30)) for i in np.flatnonzero(counts > SHORT)]
    short = np.flatnonzero(counts <= SHORT)
    if len(short) <= MAX_VIEWS:
        return found + [(np.array([i]), _height(int(counts[i]))) for i in short]
    heights = np.array([_height(int(c)) for c in counts[short]])
    for height in np.unique(heights):
        left = short[heights == height]
        left = left[np.argsort(-need[left], kind="stable")]
        while len(left):
            longest = int(need[left[0]])
            most = max(1, GATHERED // span_of(longest))
            count = min(most, int(np.count_nonzero(need[left] > longest // 2)))
            found.append((np.sort(left[:count]), int(height)))
            left = left[count:]
    return found


def _height(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _in_place(table: np.ndarray, begin: int, need: int, span: int, num_blocks: int) -> bool:
    """Whether the blocks follow each other, with room in the pool for the whole span."""
    blocks = table[begin : begin - (-need // BLOCK_SIZE)]
    if int(blocks[0]) * BLOCK_SIZE + span > num_blocks * BLOCK_SIZE:
        return False
    return bool((np.diff(blocks) == 1).all())


def _order(
    parts: list[Part], members: list[Member], cu_seqlens: np.ndarray, counts: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    pieces, place, at = [], np.zeros(rows, np.int32), 0
    for part, member in zip(parts, members, strict=True):
        piece = np.zeros((part.sequences, part.rows), np.int32)
        for i, sequence in enumerate(member.indices):
            start, count = int(cu_seqlens[sequence]), int(counts[sequence])
            piece[i] = start  # rows of padding repeat the first
            piece[i, :count] = np.arange(start, start + count)
            place[start : start + count] = np.arange(at, at + count) + i * part.rows
        pieces.append(piece.ravel())
        at += piece.size
    return np.concatenate(pieces), place


def block_indices(part: Part, member: Member, table: np.ndarray, group: int) -> np.ndarray:
    """int32 [sequences x span / BLOCK_SIZE]: the blocks to gather; the scratch block where there are none."""
    width = part.spans[group] // BLOCK_SIZE
    columns = member.begins[group][:, None] + np.arange(width)
    out = np.zeros((part.sequences, width), np.int32)
    inside = columns < table.shape[1]
    gathered = table[member.indices[:, None], np.where(inside, columns, 0)]
    out[: len(member.indices)] = np.where(inside, gathered, 0)
    return out.ravel()


def mask(part: Part, member: Member, batch: BatchLike, group: int, window: int | None) -> np.ndarray:
    """f16 bits, uint16 [sequences, 1, rows, span]: 0 for a token that a query sees, minus infinity else.

    What is padding sees one token, as a row that sees none has no softmax.
    """
    span = part.spans[group]
    out = np.zeros((part.sequences, 1, part.rows, span), np.uint16)
    out[len(member.indices) :, :, :, 1:] = HIDDEN
    for i, sequence in enumerate(member.indices):
        count = int(batch.cu_seqlens_q[sequence + 1] - batch.cu_seqlens_q[sequence])
        last = int(batch.context_lens[sequence]) - 1 - int(member.begins[group][i]) * BLOCK_SIZE
        query = np.full(part.rows, last - count + 1)
        query[:count] += np.arange(count)  # where each query stands among the attended tokens
        rows, first = out[i, 0], int(query[0])
        rows[:, first + 1 :][np.arange(first + 1, span) > query[:, None]] = HIDDEN
        if window is not None and last >= window:
            edge = last - window + 1
            rows[:, :edge][np.arange(edge) <= query[:, None] - window] = HIDDEN
    return out


__all__ = [
    "BLOCK_SIZE",
    "GATHERED",
    "Layout",
    "Member",
    "Part",
    "block_indices",
    "bucket",
    "lay_out",
    "mask",
    "span_of",
]
