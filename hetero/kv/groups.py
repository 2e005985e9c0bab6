"""Layers that attend alike share a block table: a KV group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one attention span, hence one block table per request.

    `window` is the number of positions a query sees, itself included (None: all of them), so the
    query at position p attends [max(0, p - window + 1), p]. `num_blocks` is the size of the
    group's pool. Group 0 is always the one with `window` None where a model has such layers.

    Where the layers are `recurrent`, their state after position p - 1 is what position p needs, and
    `num_blocks` is a number of states: see hetero.kv.states. That group, whose `window` is 0, is the last.
    """

    layers: tuple[int, ...]
    window: int | None
    num_blocks: int
    recurrent: bool = False

    def first_needed(self, position: int) -> int:
        """The first position that the query at `position` attends."""
        if self.recurrent:
            return max(0, position - 1)
        return 0 if self.window is None else max(0, position - self.window + 1)
