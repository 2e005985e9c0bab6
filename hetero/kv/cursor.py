"""What the KV manager remembers of a live request beside its block tables."""

from __future__ import annotations

from hetero.kv.block_pool import SCRATCH_BLOCK
from hetero.kv.prefix_tree import Node
from hetero.request import Request


class Cursor:
    """A live request's place in the prefix tree, and what is known of its blocks.

    blocks      0  1  2  3  4 | 5  6
    tree        root to `node`| not full yet, or not scheduled        depth = 5
    table[g]    .  .  x  x  x | x  x      . = SCRATCH_BLOCK           held[g] = 2

    `trimmed` is the number of computed tokens for which `held` is right. `placed`: where its blocks lie
    was looked at. `tail`: block number `depth` was a cached tail of so many tokens, see continue_tail.
    `waits`: the step in which it is not computed, because that loads what it has matched or would match.

    Of recurrent layers (states.py): its step at token `begins` begins with the state in slot `source`;
    `marks` are numbers of blocks behind which others want a state.
    """

    __slots__ = (
        "begins", "depth", "held", "marks", "node", "placed", "request", "root", "source", "tail", "trimmed",
        "waits",
    )  # fmt: skip

    def __init__(self, request: Request, node: Node, num_groups: int):
        self.request = request
        self.root = node
        self.node = node
        self.depth = 0
        self.held = [0] * num_groups
        self.trimmed = 0
        self.placed = False
        self.tail = 0
        self.waits = 0
        self.begins = -1
        self.source = SCRATCH_BLOCK
        self.marks: set[int] = set()
