"""Layers that attend alike share a block table: a KV group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one attention span, hence one block table per request.

    `window` is the number of positions a query sees, itself included (None: all of them), so the
    query at position p attends [max(0, p - window + 1), p]. `num_blocks` is the size of the
    group's pool. Group 0 is always the one with `window` None where a model has such layers.
    """

    layers: tuple[int, ...]
    window: int | None
    num_blocks: int

    def first_needed(self, position: int) -> int:
        """The first position that the query at `position` attends."""
        return 0 if self.window is None else max(0, position - self.window + 1)
