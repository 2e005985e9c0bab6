"""Keeping a request in one piece when it begins with what is cached.

A device without a kernel for block tables reads a sequence where it lies if its blocks follow each other,
and copies it at each step if they do not. Sharing is what breaks a sequence up:

    pool     A A A B B B b . . . . .      A: a system prompt, B: a conversation behind it, b: its tail
             A A A B B B B B B b . .      next turn of B: takes b over and goes on (continue_tail)
             . . . B B B b . A A A C      a conversation C behind A: moves A to where it can grow
                                          (move_matched); the first A stays if somebody else is at it
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hetero.batch import BlockCopy
from hetero.kv.block_pool import SCRATCH_BLOCK
from hetero.kv.leaving import detach, prune
from hetero.kv.prefix_tree import Node
from hetero.request import Request

if TYPE_CHECKING:
    from hetero.kv.cursor import Cursor
    from hetero.kv.manager import KVManager

LIKELY_ANSWER = 512  # tokens for which a request gets space to grow, unless it asks for fewer


def place_matched(kv: KVManager, cursor: Cursor) -> list[BlockCopy] | None:
    """Find a place for a request in which blocks were matched, and in which it can grow.

    Returns the copies for that; None when the request goes on in the block behind the matched ones.
    """
    if continue_tail(kv, cursor, whole=True):
        return None
    copies = move_matched(kv, cursor)
    if not copies and continue_tail(kv, cursor, whole=False):
        return None
    return copies


def continue_tail(kv: KVManager, cursor: Cursor, whole: bool) -> bool:
    """Let the request write on in the block that has its next tokens, right behind the matched blocks.

    `whole`: only if nothing is lost, that is, all of a tail is matched and there is room behind it. Else
    what the cache has in that block leaves as if it were reclaimed. The block is out of the tree until it is
    full; a request that is released before puts it back.
    """
    request, size = cursor.request, kv.block_size
    start, limit = request.num_computed_tokens, request.num_tokens - 1
    if start % size or start >= limit:
        return False
    found = kv.tree.closest(cursor.node, tuple(request.token_ids(start, min(start + size, limit))))
    if found is None:
        return False
    node, length = found
    if length == size or node.step_id >= kv.step_id or (whole and length < len(node.tokens)):
        return False
    for g, (pool, table, block) in enumerate(zip(kv.pools, request.block_tables, node.blocks, strict=True)):
        if block is None or not pool.is_idle(block):
            return False
        if block != table[-1] + 1 if any(table) else not whole:  # with none before it, a copy is as good
            return False
        if whole and not (in_row(table) and pool.free_behind(block) + 1 >= likely_blocks(kv, g, request)):
            return False
    for pool, table, block in zip(kv.pools, request.block_tables, node.blocks, strict=True):
        assert block is not None
        pool.acquire(block)
        table.append(block)
    for g in range(len(kv.pools)):
        if kv.tree.attached(node) and node.blocks[g] is not None:
            detach(kv, node, g)
    prune(kv, cursor.node)
    cursor.tail = length
    kv.advance(request, start + length)
    return True


def move_matched(kv: KVManager, cursor: Cursor) -> list[BlockCopy]:
    """Copies that bring the matched blocks to a place where the request can grow; [] where they can stay.

    The cache's entries move along unless somebody else references their blocks.
    """
    path = _path(cursor)
    if not path or any(node.step_id >= kv.step_id for node in path):
        return []
    copies = []
    for g, (pool, table) in enumerate(zip(kv.pools, cursor.request.block_tables, strict=True)):
        first = cursor.held[g]
        blocks = table[first:]
        if len(table) != len(path) or not blocks:
            continue
        for i, target in enumerate(_new_place(kv, cursor, g, blocks), first):
            source, node = table[i], path[i]
            table[i] = target
            copies.append(kv.pin(g, source, target))
            if kv.tree.attached(node) and node.blocks[g] == source and pool.ref_counts[source] == 1:
                pool.forget(source)
                pool.keep(target, node)
                node.blocks[g], node.step_id = target, kv.step_id
    return copies


def _path(cursor: Cursor) -> list[Node]:
    """The nodes from below the root to the cursor's."""
    path, node = [], cursor.node
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _new_place(kv: KVManager, cursor: Cursor, g: int, blocks: list[int]) -> list[int]:
    """As many fresh blocks in a row, with room behind them; [] when these are well where they are.

    Also when there is no such place, or when the pool would be left without room for the others.
    """
    pool, room, count = kv.pools[g], likely_blocks(kv, g, cursor.request), len(blocks)
    stays = in_row(blocks)
    if stays and pool.free_behind(blocks[-1]) >= room:
        return []
    if pool.num_available < count + room + len(kv.pools) * kv.in_place:
        return []
    behind = range(blocks[-1] + 1, min(blocks[-1] + 1 + room, pool.num_blocks))
    if not (stays and len(behind) == room and all(pool.is_free(b) or pool.is_idle(b) for b in behind)):
        clear_run(kv, g, count + room)
    return pool.allocate_run(count, count + room) or []


def in_row(table: list[int]) -> bool:
    """Whether the blocks follow each other, those that a window has passed left out."""
    return all(b == a + 1 for a, b in pairwise(table) if a != SCRATCH_BLOCK)


def make_way(kv: KVManager, g: int, after: int | None, room: int) -> None:
    """Give up cached blocks so that the next block can be had behind `after`, or else `room` in a row."""
    pool = kv.pools[g]
    if after is not None and pool.is_idle(after + 1):
        kv.reclaim(g, after + 1)
    elif after is None or not pool.is_free(after + 1):
        clear_run(kv, g, room)


def clear_run(kv: KVManager, g: int, room: int) -> None:
    """Give up what was not used for longest until `room` blocks are free in a row.

    Or until that cost four times as many blocks: then others are in the way.
    """
    pool = kv.pools[g]
    most = pool.num_free + 4 * room
    while pool.longest_run < room and pool.num_free < most:
        idle = pool.oldest_idle()
        if idle is None:
            return
        kv.reclaim(g, idle)


def likely_blocks(kv: KVManager, g: int, request: Request) -> int:
    """Blocks that a request will likely still ask for in group `g`, at least 1.

    For its answer no more than an eighth of the pool: that is not worth what is cached there.
    """
    size, pool = kv.block_size, kv.pools[g]
    answer = min(request.params.max_tokens or LIKELY_ANSWER, LIKELY_ANSWER, size * pool.num_usable // 8)
    return max(1, -(-(request.num_tokens + answer) // size) - len(request.block_tables[g]))
