"""A scheduling step as plain data, and the numpy arrays that a stage computes from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero.request import Request


@dataclass(slots=True)
class BlockCopy:
    """Copy block `src` to `dst` in the pool of KV group `group`, before the step computes."""

    group: int
    src: int
    dst: int


@dataclass(slots=True)
class BlockMove:
    """Copy a block of KV group `group` to host slot `slot` (a spill), or back (a load), in every layer."""

    group: int
    block: int
    slot: int


@dataclass(slots=True)
class StateUse:
    """The slots of recurrent layers' states that a request uses in a step.

    `source` holds the state before its first row, 0: there is none yet. `writes`: (rows, slot), ascending:
    the state after so many of its rows goes to that slot. No row of a draft is ever in a state.
    """

    source: int
    writes: list[tuple[int, int]]


@dataclass(slots=True)
class Step:
    """What one step computes: `num_scheduled_tokens[i]` tokens of `requests[i]`, from `starts[i]` on.

    `sampled[i]` says whether the step reaches the end of the request's tokens, so that its last
    row's logits give the next one. Then `drafts[i]` may have guesses of the tokens that follow: they are
    the last of the scheduled ones, and the rows from the last known token on all give logits. `states[i]`
    says which states it uses, where the model has recurrent layers; else `states` is empty.

    `spills` happen before anything else of the step, in particular before the copies. `loads` come
    after them and end before anything of the *next* step: no token of this step attends what they bring.
    A step may have moves alone and no requests.

    A step that `embeds` has requests for embeddings alone: it gives each token's row behind the model's last
    norm, and no logits. Then `sampled[i]` says whether it reaches the end of the request.
    """

    step_id: int
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    states: list[StateUse] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    spills: list[BlockMove] = field(default_factory=list)
    loads: list[BlockMove] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)
    embeds: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def add(self, request: Request, start: int, count: int, due: bool, state: StateUse | None) -> None:
        """Have `count` tokens of a request computed, from `start` on; `due`: the next one is wanted."""
        self.requests.append(request)
        self.starts.append(start)
        self.num_scheduled_tokens.append(count)
        self.sampled.append(due)
        self.drafts.append([])
        if state is not None:
            self.states.append(state)


@dataclass(slots=True)
class Batch:
    """A step's arrays. T tokens of S sequences, laid end to end; G KV groups.

    input_ids, positions  int32 [T]
    slot_mapping          G x int32 [T]      block * block_size + offset where the token's KV goes
    block_tables          G x int32 [S, B]   B = longest table; entries never attended are 0
    context_lens          int32 [S]          tokens of the sequence after this step
    cu_seqlens_q          int32 [S + 1]      sequence s owns rows cu[s] .. cu[s + 1]
    logits_rows           int32 [L]          rows whose logits are wanted, ascending
    state_sources         int32 [S]          slot of the state before the sequence's first row, 0: none yet
    state_writes          int32 [W, 3]       sequence, rows, slot: the state after so many of its rows goes
                                             there; in the order of sequences, then of rows

    Groups of recurrent layers are not counted in G; without such layers there are no sources and writes.
    """

    step_id: int
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: list[np.ndarray]
    block_tables: list[np.ndarray]
    context_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    logits_rows: np.ndarray
    copies: list[BlockCopy]
    spills: Sequence[BlockMove] = ()
    loads: Sequence[BlockMove] = ()
    only_argmax: bool = False  # of the logits nothing but the largest is asked for
    embeds: bool = False  # all rows behind the last norm are asked for, in place of logits
    state_sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    state_writes: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))


def build(step: Step, num_groups: int, block_size: int, only_argmax: bool = False) -> Batch:
    """Turn a step into arrays. Every scheduled position must lie inside the block tables.

    `num_groups`: without that of recurrent layers.
    """
    size = len(step.requests)
    counts = np.array(step.num_scheduled_tokens, np.int32)
    starts = np.array(step.starts, np.int32)
    if step.num_tokens == size:  # one token each: nothing to spread out
        ids = [r.token_ids(i, i + 1)[0] for r, i in zip(step.requests, step.starts, strict=True)]
        cu_seqlens, owners, positions = np.arange(size + 1, dtype=np.int32), np.arange(size), starts
    else:
        ids = []
        for request, start, count, draft in zip(
            step.requests, step.starts, step.num_scheduled_tokens, step.drafts, strict=True
        ):
            ids += request.token_ids(start, start + count - len(draft))
            ids += draft
        cu_seqlens = np.concatenate(([0], np.cumsum(counts, dtype=np.int32)), dtype=np.int32)
        owners = np.repeat(np.arange(size), counts)
        positions = np.arange(len(ids), dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], counts)
    tables = [_pad([r.block_tables[g] for r in step.requests]) for g in range(num_groups)]
    blocks, offsets = np.divmod(positions, block_size)
    slots = [t[owners, blocks] * block_size + offsets for t in tables]
    return Batch(
        step_id=step.step_id,
        input_ids=np.asarray(ids, np.int32),
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        context_lens=starts + counts,
        cu_seqlens_q=cu_seqlens,
        logits_rows=_logits_rows(step, cu_seqlens),
        copies=step.copies,
        spills=step.spills,
        loads=step.loads,
        only_argmax=only_argmax,
        embeds=step.embeds,
        state_sources=np.array([state.source for state in step.states], np.int32),
        state_writes=_state_writes(step),
    )


def _state_writes(step: Step) -> np.ndarray:
    writes = [(i, rows, slot) for i, state in enumerate(step.states) for rows, slot in state.writes]
    return np.array(writes, np.int32).reshape(-1, 3)


def _logits_rows(step: Step, cu_seqlens: np.ndarray) -> np.ndarray:
    due = np.asarray(step.sampled, bool)
    last_rows: np.ndarray = cu_seqlens[1:][due] - 1
    if not any(step.drafts):
        return last_rows
    counts = np.array([1 + len(draft) for draft in step.drafts], np.int32)[due]
    firsts = np.cumsum(counts, dtype=np.int32) - counts  # of each request's rows among all of these
    return np.repeat(last_rows + 1 - counts - firsts, counts) + np.arange(counts.sum(), dtype=np.int32)


def _pad(tables: Sequence[list[int]]) -> np.ndarray:
    out = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
