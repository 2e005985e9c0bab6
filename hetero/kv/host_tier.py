"""Blocks in host memory: who has which slot, and what moves in the step that is being scheduled.

Unit    A slot holds one block of one KV group: the keys and values of 16 tokens in all of its layers. Slots
        are numbered per group; every stage has the same numbers and keeps its own layers' part there.
Key     The node of the prefix tree: `node.blocks[g]` is on the device, `node.slots[g]` in host memory. It may
        have either, both, or in a windowed group none. While a node has a slot, what is in it never changes.
Entry   When an idle block is reclaimed (leaving.detach): the step *spills* it. Only full blocks: of a tail at
        most 15 tokens are lost. Of a windowed group only what lies within a window before an end or a
        branch of the tree: nobody can go on from elsewhere.
Return  When a request matches a node that has a slot only (matching.match), if that is cheaper than computing
        its tokens (costs.MoveCosts): the step *loads* it into a fresh block, which is the node's again. The
        slot stays its own: should the block have to go once more, nothing needs to be copied.
Exit    For another spill. First the slots of nodes that have the block as well, then what left the device
        longest ago; in a group without a window a node only when nothing is behind it (a prefix is of use
        without what follows, not the other way round), so that the ends of sequences leave first.

Order within a step, at each stage:      spills   copies   compute
                                                           loads .....|  next step

    idle block ──spill──> slot, pinned ──step ends──> slot ──load──> block + slot, both pinned ──step ends──>

- A block may be written as soon as it was spilled, in the same step. It can only be spilled if an earlier
  step has filled it (node.step_id).
- What is loaded may be attended and copied from the next step on. A request that has matched such a block,
  by its own load or another's, is not computed in this step (Cursor.waits): it has its blocks and goes on
  in the next one.
- Until the step ends, the slots of its moves and the blocks of its loads are pinned: whatever becomes of the
  request or of the node, nothing else is written there.
- All moves of a step have ended at every stage when its result is in (base.StageBackend.prepare): from then
  on a tier below may read and write the slots. Pipelines need no other rule: each stage takes steps in their
  order.
- After a failure nothing is trusted: all nodes go, and with them all slots that no move pins.

At most one move per slot is in a step, hence no more spills than slots and no more loads than blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.batch import BlockMove
from hetero.kv.costs import MoveCosts
from hetero.kv.prefix_tree import Node


@dataclass(slots=True)
class TierCounters:
    """Totals since the start. `left_device`: blocks reclaimed; `left_host`: slots given up for others."""

    spilled_blocks: int = 0
    spilled_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    left_device: int = 0
    left_host: int = 0


class SlotPool:
    """The slots of KV group `group`. Every slot is exactly one of

    free     content worthless
    spare    a node's, which has the block as well; not pinned
    only     a node's, which has nothing else; not pinned
    pinned   part of a move whose step has not ended, or held for a tier below; with or without a node

    Every operation is O(1). Slots that were never used are handed out last first: the blocks of a sequence
    leave in that order, too, and what lies in a row at both ends is copied as one.
    """

    def __init__(self, num_slots: int, group: int = 0):
        self.num_slots = num_slots
        self.pins = [0] * num_slots
        self._group = group
        self._owners: list[Node | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._spare: OrderedDict[int, None] = OrderedDict()  # what became so longest ago first
        self._only: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_spare(self) -> int:
        return len(self._spare)

    def take(self) -> int | None:
        """A free slot, pinned once and nobody's; None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.pins[slot] = 1
        return slot

    def oldest(self) -> int | None:
        """The slot that should be given up next; None when all are free or pinned."""
        return next(iter(self._spare), None) if self._spare else next(iter(self._only), None)

    def owner(self, slot: int) -> Node | None:
        return self._owners[slot]

    def keep(self, slot: int, owner: Node) -> None:
        """Make the slot a node's. It must be pinned and nobody's."""
        if self.pins[slot] <= 0 or self._owners[slot] is not None:
            raise ValueError(f"slot {slot} is not pinned or already has an owner")
        self._owners[slot] = owner

    def forget(self, slot: int) -> None:
        """Take the slot from its node; it becomes free unless it is pinned."""
        if self._owners[slot] is None:
            raise ValueError(f"slot {slot} has no owner")
        self._owners[slot] = None
        if self.pins[slot] == 0:
            self._unfile(slot)
            self._free.append(slot)

    def pin(self, slot: int) -> None:
        """Keep the content where it is. The slot must be a node's or pinned."""
        if self.pins[slot] == 0:
            self._unfile(slot)
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """One pin less. The last one files the slot as the newest, or frees it when it is nobody's."""
        if self.pins[slot] <= 0:
            raise ValueError(f"slot {slot} is unpinned but not pinned")
        self.pins[slot] -= 1
        if self.pins[slot] == 0:
            self._file(slot)

    def refile(self, slot: int) -> None:
        """The node got or lost its block, or was of use: file its slot as the newest."""
        if self.pins[slot] == 0:
            self._unfile(slot)
            self._file(slot)

    def _file(self, slot: int) -> None:
        owner = self._owners[slot]
        if owner is None:
            self._free.append(slot)
        elif owner.blocks[self._group] is None:
            self._only[slot] = None
        else:
            self._spare[slot] = None

    def _unfile(self, slot: int) -> None:
        if slot in self._spare:
            del self._spare[slot]
        else:
            del self._only[slot]  # KeyError: a free slot has no content

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slot is in exactly one state. O(num_slots)."""
        assert len(set(self._free)) == len(self._free)
        free = set(self._free)
        for slot in range(self.num_slots):
            owner, pinned = self._owners[slot], self.pins[slot] > 0
            assert self.pins[slot] >= 0
            states = (slot in free) + (slot in self._spare) + (slot in self._only) + pinned
            assert states == 1, f"slot {slot} is in {states} states"
            if slot in free:
                assert owner is None, f"free slot {slot} has an owner"
            elif not pinned:
                assert owner is not None, f"slot {slot} is kept for nobody"
                assert (slot in self._spare) == (owner.blocks[self._group] is not None)


class HostTier:
    """The slots of all groups, and the moves of the step that is being scheduled.

    `block_bytes[g]` is what a block of group g holds in all stages together.
    """

    def __init__(self, num_slots: Sequence[int], block_bytes: Sequence[int] | None = None):
        self.slots = [SlotPool(count, g) for g, count in enumerate(num_slots)]
        self.block_bytes = tuple(block_bytes or [1] * len(num_slots))
        self.costs = MoveCosts()
        self.counters = TierCounters()
        self.spills: list[BlockMove] = []
        self.loads: list[BlockMove] = []
        self._load_bytes = 0
        self._loading: set[tuple[int, int]] = set()
        self._writing: set[tuple[int, int]] = set()  # slots, by steps that have not ended

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, at all stages together."""
        return sum(pool.num_slots * size for pool, size in zip(self.slots, self.block_bytes, strict=True))

    @property
    def load_bytes_left(self) -> int:
        """What the step may still load. The first load may be larger: else it could never happen."""
        return self.costs.load_budget - self._load_bytes

    def begin_step(self) -> None:
        """Moves from here on are the next step's."""
        self.spills, self.loads, self._load_bytes = [], [], 0
        self._loading.clear()

    def is_loading(self, g: int, block: int) -> bool:
        """Whether the step being scheduled loads something into this block."""
        return (g, block) in self._loading

    def is_being_written(self, g: int, slot: int) -> bool:
        """Whether a step that has not ended copies something to this slot."""
        return (g, slot) in self._writing

    def spill(self, g: int, block: int, slot: int) -> None:
        """Have the step copy a block to a slot that was taken for it. The slot stays pinned until it ends."""
        self.spills.append(BlockMove(g, block, slot))
        self._writing.add((g, slot))
        self.counters.spilled_blocks += 1
        self.counters.spilled_bytes += self.block_bytes[g]

    def load(self, g: int, block: int, slot: int) -> None:
        """Have the step copy a slot, which the caller has pinned until it ends, to a block."""
        self.loads.append(BlockMove(g, block, slot))
        self._loading.add((g, block))
        self._load_bytes += self.block_bytes[g]
        self.counters.loaded_blocks += 1
        self.counters.loaded_bytes += self.block_bytes[g]

    def take_moves(self) -> tuple[list[BlockMove], list[BlockMove]]:
        """(spills, loads) of the step. Spills by block: those in a row are copied as one."""
        self.spills.sort(key=lambda move: (move.group, move.block))
        return self.spills, self.loads

    def unpin(self, spills: Sequence[BlockMove], loads: Sequence[BlockMove]) -> None:
        """The step of these moves has ended. What is further back in a sequence counts as older."""
        for move in (*reversed(spills), *reversed(loads)):
            self.slots[move.group].unpin(move.slot)
        self._writing.difference_update((move.group, move.slot) for move in spills)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slot is in exactly one state. O(slots)."""
        for pool in self.slots:
            pool.check_invariants()
        written = [(m.group, m.slot) for m in self.spills]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        assert all(self.slots[g].pins[slot] for g, slot in self._writing)
        filled = [(m.group, m.block) for m in self.loads]
        assert len(set(filled)) == len(filled), "a block is loaded twice in a step"
