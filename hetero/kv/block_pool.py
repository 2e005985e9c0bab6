"""The blocks of one KV group: who is free, who is in use, who is only worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hetero.kv.free_runs import FreeRuns

SCRATCH_BLOCK = 0  # padding tokens write here; never handed out


class BlockPool:
    """Reference-counted fixed-size blocks. Every block but the scratch block is exactly one of

    free        in a run of free blocks, content worthless
    idle        kept by an owner (a node of the prefix tree), referenced by nobody: may be reclaimed
    referenced  in a live block table or the source of a pending copy; with or without an owner

    `num_blocks` counts the scratch block. Every operation is O(1). A sequence whose blocks follow each
    other is attended where it lies, without a copy, so blocks are handed out in that way where it can be.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs at least 2 blocks (one is scratch), not {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._owners: list[Any] = [None] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._free.put_all(SCRATCH_BLOCK + 1)
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

    @property
    def longest_run(self) -> int:
        """Free blocks in a row: so many somewhere, and nowhere twice as many."""
        if not self._free:
            return 0
        first, end = self._free.long_run()
        return end - first

    def allocate(self, after: int | None = None, room: int = 1) -> int | None:
        """A free block, now referenced once; None when all are idle or referenced.

        The one behind `after` if it is free. Otherwise a place where a sequence of about `room` blocks
        can grow, and that leaves the sequence before it as much space: in the middle of a long run.
        """
        if after is not None and after + 1 in self._free:
            return self.allocate_behind(after)
        if not self._free:
            return None
        first, block = self._place(room)
        self._free.take(block, first)
        self.ref_counts[block] = 1
        return block

    def allocate_behind(self, block: int) -> int:
        """The block behind one that is not free; itself it must be."""
        self._free.take(block + 1, block + 1)
        self.ref_counts[block + 1] = 1
        return block + 1

    def allocate_run(self, count: int, room: int) -> list[int] | None:
        """`count` blocks in a row, each now referenced once, where a sequence of `room` blocks has space.

        None when there is no such place.
        """
        if self.longest_run < room:
            return None
        first, start = self._place(room)
        run = list(range(start, start + count))
        for block in run:
            self._free.take(block, first if block == start else block)
            self.ref_counts[block] = 1
        return run

    def _place(self, room: int) -> tuple[int, int]:
        """A long run's first block, and where in it a sequence of `room` blocks had best begin."""
        first, end = self._free.long_run()
        half = (end - first) // 2
        return first, first + half if first > SCRATCH_BLOCK + 1 and half >= room else first

    def is_free(self, block: int) -> bool:
        return block in self._free

    def free_behind(self, block: int) -> int:
        """Free blocks in a row behind a block that is not free."""
        return self._free.count_from(block + 1)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

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
                self._free.put(block)
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
            self._free.put(block)

    def owner(self, block: int) -> Any:
        return self._owners[block]

    def oldest_idle(self) -> int | None:
        """The idle block whose last use is longest ago."""
        return next(iter(self._idle), None)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block is in exactly one state. O(num_blocks)."""
        self._free.check_invariants()
        assert SCRATCH_BLOCK not in self._free and SCRATCH_BLOCK not in self._idle
        assert self.ref_counts[SCRATCH_BLOCK] == 0 and self._owners[SCRATCH_BLOCK] is None
        for block in range(1, self.num_blocks):
            referenced = self.ref_counts[block] > 0
            assert self.ref_counts[block] >= 0
            assert (block in self._free) + (block in self._idle) + referenced == 1, f"block {block}"
            if block in self._free:
                assert self._owners[block] is None, f"free block {block} has an owner"
            elif not referenced:
                assert self._owners[block] is not None, f"idle block {block} has no owner"
