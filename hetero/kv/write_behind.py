"""What is cached in memory goes to the disk, a little in each step.

    a request ends  ─> its full blocks that are not on the disk ─┐
    a spill ends    ─> the block that is in host memory now      ─┴─> todo
    todo, a slot has it       ─> to the disk at once
    todo, only a block has it ─> this step copies it to a slot; when that has ended, to the disk

A block stays with its node when it is copied out. Slots for it are those that nobody needs: free ones, those
of nodes that have the block as well, and those of nodes that the disk has, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hetero.batch import Step
from hetero.kv.below import copy_out, hold, let_go
from hetero.kv.disk_entry import groups_of, mask_of
from hetero.kv.disk_tier import DiskTier, Stored
from hetero.kv.leaving import near_an_end
from hetero.kv.prefix_tree import Node

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager

LOOK_AHEAD = 8  # nodes that are tried before all wait
MAX_TODO = 1 << 16  # nodes; more are not remembered
BUSY_SECONDS = 0.001  # of a step go to copying at most while requests wait for it
IDLE_SECONDS = 0.02  # of one that nobody waits for


class WriteBehind:
    """Chooses blocks and has `tier` store them. For the scheduler's thread."""

    def __init__(self, kv: KVManager, tier: DiskTier):
        self.kv, self.tier = kv, tier
        self._todo: OrderedDict[Node, None] = OrderedDict()
        self._copied: dict[int, set[Node]] = {}  # by which step in flight
        self._storing: dict[bytes, dict[int, int]] = {}  # pinned slots by group
        self._stuck = False  # whether nothing can be done until something ends

    @property
    def has_work(self) -> bool:
        """Whether a step, be it of moves alone, would bring something further."""
        return self.has_more and not self._stuck

    @property
    def num_waiting(self) -> int:
        """Nodes of which something is still to be written."""
        copied = sum(map(len, list(self._copied.values())))  # list(): any thread may ask
        return len(self._todo) + copied + len(self._storing)

    @property
    def has_more(self) -> bool:
        """Whether something is to be done, and writing is possible."""
        return bool(self._todo) and not self.tier.folder.is_paused

    # -- what there is to do -------------------------------------------------------------------------

    def offer_path(self, node: Node) -> None:
        """A request has ended at this node: what is not on the disk goes there, the rest was of use."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        used = []
        for each in reversed(path):  # the beginning first: without it the rest is worth nothing
            if len(each.tokens) == self.kv.block_size:
                key = self.kv.tree.key(each)
                if self.tier.mask(key):
                    used.append(key)
                self._offer(each)
        self.tier.touch(used)

    def _offer(self, node: Node) -> None:
        if self._missing(node) and len(self._todo) < MAX_TODO:
            self._todo[node] = None
            self._stuck = False

    def _missing(self, node: Node) -> int:
        """Groups that a node has and the disk should have. 0 also when the node is no longer cached."""
        kv = self.kv
        if not kv.tree.attached(node):
            return 0
        held, there = 0, self.tier.mask(kv.tree.key(node))
        for g, group in enumerate(kv.groups):
            if node.blocks[g] is None and node.slots[g] is None:
                continue
            wanted = group.window is None or there >> g & 1
            if wanted or near_an_end(node, kv.span_blocks(group.window or 0)):
                held |= 1 << g
        return held if held & ~there else 0

    # -- steps ---------------------------------------------------------------------------------------

    def plan(self, idle: bool) -> None:
        """Add copies to the step that is being scheduled. `idle`: there is nothing else in it."""
        seconds = IDLE_SECONDS if idle else BUSY_SECONDS
        budget = seconds / self.kv.host.costs.byte_seconds
        waiting = 0
        while self._todo and budget > 0 and waiting < min(LOOK_AHEAD, len(self._todo)):
            node = next(iter(self._todo))
            copied = self._advance(node)
            if copied is None:
                waiting += 1
                self._todo.move_to_end(node)
            else:
                budget -= copied
                self._todo.pop(node, None)
        self._stuck = waiting > 0

    def _advance(self, node: Node) -> int | None:
        """Copy out what of a node has no slot, or store it. Bytes copied, None when it has to wait."""
        kv = self.kv
        missing = self._missing(node)
        if not missing:
            return 0
        if not self.tier.wants(kv.tree.key(node), missing):
            # one that is being stored is done with; all others wait until there is room for them
            return 0 if kv.tree.key(node) in self._storing else None
        lacking = [g for g in groups_of(missing) if node.slots[g] is None]
        if not lacking:
            self._store(node)
            return 0
        if node.step_id >= kv.step_id or not all(self._can_go(g) for g in lacking):
            return None
        if copy_out(kv, node, evict=True):
            self._copied.setdefault(kv.step_id, set()).add(node)
        return sum(kv.host.block_bytes[g] for g in lacking if node.slots[g] is not None)

    def _can_go(self, g: int) -> bool:
        """Whether host memory can do without what it would give up next in a group: the disk has it."""
        pool, tree = self.kv.host.slots[g], self.kv.tree
        if pool.num_free or pool.num_spare:
            return True
        oldest = pool.oldest()
        owner = None if oldest is None else pool.owner(oldest)
        return owner is not None and bool(self.tier.mask(tree.key(owner)) >> g & 1)

    def ended(self, step: Step, good: bool) -> None:
        """See Below."""
        self._stuck = False
        copied = self._copied.pop(step.step_id, set())
        if not good:
            return
        owners = [self.kv.host.slots[move.group].owner(move.slot) for move in step.spills]
        for node in dict.fromkeys(owners):
            if node is not None and self._missing(node):
                # What was copied out in vain is not copied again: two nodes could take turns for ever.
                self._store(node, again=node not in copied)

    def _store(self, node: Node, again: bool = False) -> None:
        """Hand a node over, if all that is to be stored of it is in slots; else it is to do `again`."""
        missing = self._missing(node)
        slots = hold(self.kv, node)
        key = self.kv.tree.key(node)
        whole = mask_of(slots) & missing == missing
        if whole and self.tier.store(key, slots):
            self._storing[key] = slots
            return
        let_go(self.kv, slots)
        if key not in self._storing and (whole or again):
            self._offer(node)

    def stored(self, results: Iterable[Stored]) -> None:
        """These are done with."""
        for each in results:
            self._stuck = False
            let_go(self.kv, self._storing.pop(each.key))

    def forget(self) -> None:
        """Nothing that is cached is trusted. Slots that are being read stay pinned until that has ended."""
        self._todo.clear()
        self.tier.forget_stores()

    def check_invariants(self) -> None:
        """Raise AssertionError unless what is being stored is pinned."""
        for slots in self._storing.values():
            for g, slot in slots.items():
                assert self.kv.host.slots[g].pins[slot] > 0


__all__ = ["WriteBehind"]
