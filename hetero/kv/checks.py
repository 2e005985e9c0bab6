"""What must hold between the KV manager's tables, pins, tree and pools."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hetero.kv.block_pool import SCRATCH_BLOCK
from hetero.kv.prefix_tree import Node
from hetero.kv.states import check_states

if TYPE_CHECKING:
    from hetero.kv.cursor import Cursor
    from hetero.kv.manager import KVManager


def check_manager(kv: KVManager) -> None:
    """Raise AssertionError unless all agree. O(everything)."""
    kv.tree.check_invariants()
    kv.host.check_invariants()
    if kv.below is not None:
        kv.below.check_invariants()
    references = Counter(kv._pins)
    for cursor in kv._cursors.values():
        _check_tables(kv, cursor)
        for g, table in enumerate(cursor.request.block_tables):
            references.update((g, block) for block in table if block != SCRATCH_BLOCK)
    assert kv.num_pinned == sum(kv._pins.values())
    owned: dict[tuple[int, int], Node] = {}
    slots: dict[tuple[int, int], Node] = {}
    for node in kv.tree.nodes():
        assert not node.is_empty, "an empty leaf"
        for g, (kept, slot) in enumerate(zip(node.blocks, node.slots, strict=True)):
            somewhere = kept is not None or slot is not None
            assert somewhere or kv.groups[g].window is not None, "a hole in a full group"
            if kept is not None:
                assert (g, kept) not in owned, f"block {kept} of group {g} is in two nodes"
                owned[g, kept] = node
            if slot is not None:
                assert len(node.tokens) == kv.block_size, "a tail in host memory"
                assert (g, slot) not in slots, f"slot {slot} of group {g} is in two nodes"
                slots[g, slot] = node
    for g, places in enumerate(kv.host.slots):
        for slot in range(places.num_slots):
            assert places.owner(slot) is slots.get((g, slot)), f"slot {slot} of group {g}"
    for g, pool in enumerate(kv.pools):
        pool.check_invariants()
        for block in range(pool.num_blocks):
            assert pool.ref_counts[block] == references[g, block], f"group {g} block {block}"
            assert pool.owner(block) is owned.get((g, block))


def _check_tables(kv: KVManager, cursor: Cursor) -> None:
    request = cursor.request
    assert len(request.block_tables) == len(kv.groups)
    assert cursor.tail == 0 or all(len(table) > cursor.depth for table in request.block_tables)
    for g, table in enumerate(request.block_tables):
        if g == kv.state_group:
            check_states(kv, cursor)
            continue
        assert len(table) * kv.block_size >= request.num_computed_tokens
        needed = kv.groups[g].first_needed(cursor.trimmed) // kv.block_size
        assert cursor.held[g] >= min(needed, len(table)), "a block outside the window is held"
        assert cursor.held[g] <= needed, "a block inside the window was given back"
        for i, block in enumerate(table):
            assert (block == SCRATCH_BLOCK) == (i < cursor.held[g]), f"hole at {i} in group {g}"
