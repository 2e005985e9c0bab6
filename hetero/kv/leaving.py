"""What becomes of cached blocks when theirs are needed: to host memory, or out of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero.kv.prefix_tree import Node

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager

CHANCES = 8  # slots that are looked at for one that can go


def detach(kv: KVManager, node: Node, g: int) -> None:
    """Take a node's block of group `g` from it. Its content goes to host memory where that takes it.

    Otherwise, in a group without a window, the node leaves the cache with all behind it. The block is
    free afterwards unless it is referenced.
    """
    kv.host.counters.left_device += 1
    if node.slots[g] is None:
        spill(kv, node, g)
        if not kv.tree.attached(node):
            return  # it has left with what had to go for it
    slot = node.slots[g]
    if slot is None and kv.groups[g].window is None:
        drop(kv, node)
        return
    block = node.blocks[g]
    assert block is not None, "only what has a block can lose it"
    kv.pools[g].forget(block)
    node.blocks[g] = None
    if slot is not None:
        kv.host.slots[g].refile(slot)
    prune(kv, node)


def spill(kv: KVManager, node: Node, g: int) -> bool:
    """Have the step copy a node's block to a slot of its own, if that is of use and one can be had.

    Slots are made free for it; the node itself may leave the cache with one of those.
    """
    host, block = kv.host, node.blocks[g]
    if not host.slots[g].num_slots or len(node.tokens) < kv.block_size or node.step_id >= kv.step_id:
        return False
    window = kv.groups[g].window
    if window is not None and not near_an_end(node, kv.span_blocks(window)):
        return False
    if host.costs.gain(kv.block_size, sum(host.block_bytes)) <= 0:
        host.costs.doubt()
        return False
    slot = take_slot(kv, g)
    if slot is None:
        return False
    pool = host.slots[g]
    if not kv.tree.attached(node):
        pool.unpin(slot)
        return False
    assert block is not None, "only what has a block can be copied"
    pool.keep(slot, node)
    node.slots[g] = slot
    host.spill(g, block, slot)
    return True


def take_slot(kv: KVManager, g: int) -> int | None:
    """A slot, pinned once and nobody's; for it something may leave host memory. None when all are needed."""
    pool = kv.host.slots[g]
    for _ in range(CHANCES):
        slot = pool.take()
        if slot is not None:
            return slot
        oldest = pool.oldest()
        if oldest is None:
            return None
        owner = pool.owner(oldest)
        assert owner is not None, "what is not pinned has an owner"
        victim = owner
        if owner.blocks[g] is None and kv.groups[g].window is None:
            while victim.children:
                victim = next(reversed(victim.children.values()))
        at_end = victim.slots[g]
        if at_end is None or pool.pins[at_end]:
            pool.refile(oldest)  # somebody is at what follows it
        else:
            lose_slot(kv, victim, g)
    return None


def lose_slot(kv: KVManager, node: Node, g: int) -> None:
    """Take a node's slot of group `g`, which no move pins, from it."""
    slot = node.slots[g]
    assert slot is not None, "only what has a slot can lose it"
    kv.host.counters.left_host += 1
    kv.host.slots[g].forget(slot)
    node.slots[g] = None
    if node.blocks[g] is None and kv.groups[g].window is None:
        drop(kv, node)
    else:
        prune(kv, node)


def drop(kv: KVManager, node: Node) -> None:
    """Take a node and all behind it out of the cache, host memory included."""
    for gone in kv.tree.drop(node):
        for g, (block, slot) in enumerate(zip(gone.blocks, gone.slots, strict=True)):
            if block is not None:
                kv.pools[g].forget(block)
            if slot is not None:
                kv.host.slots[g].forget(slot)


def prune(kv: KVManager, node: Node) -> None:
    """Take a node that holds nothing out of the tree, and its parents that then hold nothing."""
    while node.parent is not None and node.is_empty:
        parent = node.parent
        kv.tree.drop(node)
        node = parent


def near_an_end(node: Node, num_blocks: int) -> bool:
    """Whether within so many nodes a sequence or a prompt ends, or the tree branches."""
    for _ in range(num_blocks):
        if node.is_end or len(node.children) != 1:
            return True
        (child,) = node.children.values()
        if len(child.tokens) < len(node.tokens):  # a tail
            return True
        node = child
    return False
