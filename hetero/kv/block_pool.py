"""The blocks of one KV group: who is free, who is in use, who is only worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

SCRATCH_BLOCK = 0  # padding tokens write here; never handed out


class BlockPool:
    """Reference-counted fixed-size blocks. Every block but the scratch block is exactly one of

    free        on the free list, content worthless
    idle        kept by an owner (a node of the prefix tree), referenced by nobody: may be reclaimed
    referenced  in a live block table or the source of a pending copy; with or without an owner

    `num_blocks` counts the scratch block. Every operation is O(1).
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs at least 2 blocks (one is scratch), not {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._owners: list[Any] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest last use first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a live request."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int | None:
        """A free block, now referenced once; None when all are idle or referenced."""
        if not self._free:
            return None
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to an idle or referenced block."""
        if self.ref_counts[block] == 0:
            del self._idle[block]  # KeyError: a free block has no content to share
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One reference less. The last one makes the block idle (newest in use) or free."""
        if self.ref_counts[block] <= 0:
            raise ValueError(f"block {block} is released but not referenced")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self._owners[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def keep(self, block: int, owner: object) -> None:
        """Let `owner` keep a referenced block's content once nobody references it."""
        if self.ref_counts[block] <= 0 or self._owners[block] is not None:
            raise ValueError(f"block {block} is not referenced or already has an owner")
        self._owners[block] = owner

    def forget(self, block: int) -> None:
        """Take the block from its owner; it becomes free unless it is referenced."""
        if self._owners[block] is None:
            raise ValueError(f"block {block} has no owner")
        self._owners[block] = None
        if self.ref_counts[block] == 0:
            del self._idle[block]
            self._free.append(block)

    def owner(self, block: int) -> Any:
        return self._owners[block]

    def oldest_idle(self) -> int | None:
        """The idle block whose last use is longest ago."""
        return next(iter(self._idle), None)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block is in exactly one state. O(num_blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert SCRATCH_BLOCK not in free and SCRATCH_BLOCK not in self._idle
        assert self.ref_counts[SCRATCH_BLOCK] == 0 and self._owners[SCRATCH_BLOCK] is None
        for block in range(1, self.num_blocks):
            referenced = self.ref_counts[block] > 0
            assert self.ref_counts[block] >= 0
            assert (block in free) + (block in self._idle) + referenced == 1, f"block {block}"
            if block in free:
                assert self._owners[block] is None, f"free block {block} has an owner"
            elif not referenced:
                assert self._owners[block] is not None, f"idle block {block} has no owner"
