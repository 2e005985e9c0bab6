"""Guesses of the tokens that follow, computed in what a step has left.

    tokens of a request      p p p p o o | d d d      o: output so far, d: draft
    the step computes                  o   d d d      the last known token, then the draft
    its rows say what comes after      1   2 3 4      row 1 is right; row n + 1 if the draft's first n are
    num_computed_tokens      . . . . . . |            counts no draft until it is verified

A draft has blocks like any token. Those of a wrong one are given back when its step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetero.batch import Step
from hetero.kv.manager import KVManager
from hetero.request import Request


class Drafter(Protocol):
    def draft(
        self, due: Sequence[Request], limits: Sequence[int], num_tokens: int, room: int, /
    ) -> Sequence[list[int]]:
        """Guesses for the requests `due` in a step, [] for none: at most `limits[i]` tokens for `due[i]`,
        at most `room` in all, behind the `num_tokens` tokens that the step has without them."""
        ...

    def read(self, requests: Sequence[Request], num_tokens: int, /) -> None:
        """A step computes `num_tokens` tokens of these requests' prompts, and nobody is due."""
        ...


def add_drafts(
    step: Step, kv: KVManager, drafter: Drafter, limits: Sequence[int], room: int, spare_blocks: int
) -> None:
    """Lengthen the step's parts that are due for a next token by what the drafter guesses.

    `limits[i]`: tokens that `step.requests[i]` may still get before its last one. `room`: tokens in all.
    `spare_blocks` of each pool are left to others; where blocks are short, so are the drafts.
    """
    if step.requests and not any(step.sampled):
        drafter.read(step.requests, step.num_tokens)
    due = [i for i, sampled in enumerate(step.sampled) if sampled and limits[i] > 0]
    if not due or room < 1:
        return
    guesses = drafter.draft([step.requests[i] for i in due], [limits[i] for i in due], step.num_tokens, room)
    for i, guess in zip(due, guesses, strict=True):
        count = _fitting(kv, step.requests[i], min(len(guess), limits[i], room), spare_blocks)
        if count:
            count = kv.allocate(step.requests[i], count, known=False)
            step.drafts[i] = list(guess[:count])
            step.num_scheduled_tokens[i] += count
            room -= count


def _fitting(kv: KVManager, request: Request, count: int, spare_blocks: int) -> int:
    """How many of `count` tokens have blocks without touching what is to be left."""
    for group, table, available in zip(kv.groups, request.block_tables, kv.available_blocks(), strict=True):
        if group.recurrent:
            continue  # no guess is ever in a state
        blocks = len(table) + max(0, available - spare_blocks)
        count = min(count, blocks * kv.block_size - request.num_computed_tokens)
    return count


def take_drafts(kv: KVManager, request: Request, tokens: Sequence[int]) -> None:
    """Append what was guessed right; room for one token more stays, the blocks of the rest go.

    With recurrent layers these tokens are computed once more, in the request's next step: a state cannot
    take back what was guessed wrong, so that no guess is ever in it.
    """
    request.output_token_ids += tokens
    if not kv.recurrent:
        request.num_computed_tokens += len(tokens)
        kv.commit(request, request.num_computed_tokens)
    kv.cut(request, request.num_tokens + 1)
