"""Finding what is computed already, and taking it over: blocks as they are, host memory by loads.

path     d d d d h h d h     d: a block on the device, h: in host memory only
usable   | | | | | | | |     lengths at which every windowed group has all that the next position attends
first choice ^       ^ ^     the longest without loads; with loads, what saves most time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetero.batch import BlockCopy
from hetero.kv.block_pool import SCRATCH_BLOCK
from hetero.kv.prefix_tree import Node
from hetero.kv.states import should_wait

if TYPE_CHECKING:
    from hetero.kv.cursor import Cursor
    from hetero.kv.manager import KVManager


class _Path:
    """The nodes that spell a request's next tokens, from block number `first` of its tables on.

    `absent[g]` and `idle[g]` are the positions of the nodes that group g has in host memory only, and
    whose block is idle: ascending.
    """

    def __init__(self, first: int, num_groups: int):
        self.first = first
        self.nodes: list[Node] = []
        self.usable: list[int] = []  # numbers of nodes, ascending
        self.absent: list[list[int]] = [[] for _ in range(num_groups)]
        self.idle: list[list[int]] = [[] for _ in range(num_groups)]
        self.soon = False  # the step being scheduled writes a state that could be begun with

    def loads_more_than(self, nbytes: int, block_bytes: Sequence[int]) -> bool:
        """Whether it has a length of use beyond what is on the device, and so much to load."""
        firsts = [absent[0] for absent in self.absent if absent]
        if not firsts or not self.usable or self.usable[-1] <= min(firsts):
            return False
        return sum(len(a) * size for a, size in zip(self.absent, block_bytes, strict=True)) > nbytes


def match(kv: KVManager, cursor: Cursor, load: bool, kept: int) -> int:
    """Adopt nodes that continue the request; see KVManager.match."""
    path = _walk(kv, cursor, load)
    count = path.usable[-1] if path.usable else 0
    if any(path.absent):
        count = _choose(kv, cursor, path, kept)
    before = cursor.request.num_computed_tokens
    if count:
        _adopt(kv, cursor, path.nodes[:count])
    if kv.recurrent:
        if len(path.nodes) > count:  # others went this way too, and left no state there
            cursor.marks.add(path.first + len(path.nodes) - 1)
        if path.soon or should_wait(kv, cursor):
            cursor.waits = kv.step_id
    return cursor.request.num_computed_tokens - before


def _walk(kv: KVManager, cursor: Cursor, load: bool) -> _Path:
    """The path, as far as it can be adopted; no further than a step can load, if it is of use up to there."""
    request, size = cursor.request, kv.block_size
    first = request.num_computed_tokens // size
    path = _Path(first, len(kv.groups))
    held = list(cursor.held)  # where the unbroken run of blocks and slots up to here begins
    full = [g for g, group in enumerate(kv.groups) if group.window is None]
    node = cursor.node
    for i in range(first, (request.num_tokens - 1) // size):
        child = node.children.get(tuple(request.token_ids(i * size, (i + 1) * size)))
        if child is None:
            break
        for g, block in enumerate(child.blocks):
            if g == kv.state_group and block is not None and child.step_id >= kv.step_id:
                path.soon, held[g] = True, i + 1
            elif block is None:
                if load and child.slots[g] is not None:
                    path.absent[g].append(i - first)
                else:
                    held[g] = i + 1
            elif load and kv.pools[g].is_idle(block):
                path.idle[g].append(i - first)
        path.nodes.append(child)
        if kv.covers(held, (i + 1) * size):
            path.usable.append(i + 1 - first)
        elif any(held[g] > i for g in full):
            break  # nothing behind a hole in these is of use
        if path.loads_more_than(kv.host.load_bytes_left, kv.host.block_bytes):
            break
        node = child
    return path


def _choose(kv: KVManager, cursor: Cursor, path: _Path, kept: int) -> int:
    """How many of the path's nodes are worth adopting, as far as blocks and the step's budget go.

    Where only the budget does not, the request has to wait for a later step. `kept` blocks of each
    group are left.
    """
    request, size, host = cursor.request, kv.block_size, kv.host
    done = request.num_computed_tokens
    counts = {k: list(_moves(kv, path, k)) for k in path.usable}
    sizes = {
        k: sum(n * b for n, b in zip(moves, host.block_bytes, strict=True)) for k, moves in counts.items()
    }
    gains = {k: host.costs.gain((path.first + k) * size - done, sizes[k]) for k in path.usable}
    here = max((k for k in path.usable if not any(counts[k])), default=0)
    least = gains.get(here, 0.0)
    best = max(path.usable, key=lambda k: gains[k], default=0)
    if best <= here or gains[best] <= least:
        if path.usable and path.usable[-1] > here:
            host.costs.doubt()
        return here
    worth = [k for k in path.usable if here < k <= best and gains[k] > least]

    def has_room(k: int) -> bool:
        return _has_room(kv, cursor, path, k, [n + kept for n in counts[k]])

    for k in reversed(worth):
        if sizes[k] <= host.load_bytes_left and has_room(k):
            return k
    shortest = next(filter(has_room, worth), here)
    if shortest > here and host.loads:
        cursor.waits = kv.step_id
        return here
    return shortest


def _moves(kv: KVManager, path: _Path, count: int) -> Iterator[int]:
    """Per group, how many loads the adoption of `count` nodes takes."""
    for g, absent in enumerate(path.absent):
        yield _between(absent, _first_held(kv, g, path.first, count), count)


def _first_held(kv: KVManager, g: int, first: int, count: int) -> int:
    """Of `count` nodes from block number `first` on, the first whose tokens are still attended in group g."""
    length = (first + count) * kv.block_size
    return max(0, kv.groups[g].first_needed(length) // kv.block_size - first)


def _between(positions: Sequence[int], low: int, high: int) -> int:
    return max(0, bisect_left(positions, high) - bisect_left(positions, low))


def _has_room(kv: KVManager, cursor: Cursor, path: _Path, count: int, wanted: Sequence[int]) -> bool:
    """Whether so many blocks can be had beside those that are adopted where they are."""
    for g, (pool, table) in enumerate(zip(kv.pools, cursor.request.block_tables, strict=True)):
        low = _first_held(kv, g, path.first, count)
        room = pool.num_available - _between(path.idle[g], low, count)
        going = table[path.first :]  # the block that was being filled
        if low or kv.groups[g].window is not None:
            end = kv.groups[g].first_needed((path.first + count) * kv.block_size) // kv.block_size
            going = going + table[cursor.held[g] : min(end, path.first)]
        room += sum(1 for block in going if block != SCRATCH_BLOCK and pool.ref_counts[block] == 1)
        if wanted[g] > room:
            return False
    return True


def _adopt(kv: KVManager, cursor: Cursor, nodes: Sequence[Node]) -> None:
    """Take over the nodes' blocks; those that are in host memory only are loaded by this step.

    All that is there is held before any block is taken: making room may drop the nodes themselves,
    which does no harm then.
    """
    request, size = cursor.request, kv.block_size
    first = request.num_computed_tokens // size
    length = (first + len(nodes)) * size
    plans: list[list[tuple[int, Node, int | None, int | None]]] = []
    loaded: set[int] = set()
    for g, (pool, table) in enumerate(zip(kv.pools, request.block_tables, strict=True)):
        while first < len(table):  # what was being filled, or guessed: somebody has it whole
            pool.release(table.pop())
            cursor.tail = 0
        plan = []
        for k in range(_first_held(kv, g, first, len(nodes)), len(nodes)):
            node = nodes[k]
            block, slot = node.blocks[g], node.slots[g]
            if block is not None:
                pool.acquire(block)
                if kv.host.is_loading(g, block):
                    cursor.waits = kv.step_id
            elif slot is not None:
                kv.host.slots[g].pin(slot)
                loaded.add(k)
            plan.append((k, node, block, slot))
        plans.append(plan)
    kv.count_loaded(request, [nodes[k] for k in sorted(loaded)])
    kv.advance(request, length)
    cursor.node, cursor.depth = nodes[-1], first + len(nodes)
    for g, (table, plan) in enumerate(zip(request.block_tables, plans, strict=True)):
        table += [SCRATCH_BLOCK] * (len(nodes) - len(plan))
        for _, node, block, slot in plan:
            table.append(_load(kv, cursor, g, node, slot) if block is None else block)
    kv.trim(request)


def _load(kv: KVManager, cursor: Cursor, g: int, node: Node, slot: int | None) -> int:
    """A fresh block that this step fills from a pinned slot; it becomes the node's."""
    assert slot is not None, "the path has either"
    pool = kv.pools[g]
    block = kv.take(g, cursor.request)
    pool.acquire(block)  # for the load, until the step ends
    kv.pin_load(g, block)
    kv.host.load(g, block, slot)
    node.below = False  # from here on it is known here as well
    cursor.waits = kv.step_id
    if kv.tree.attached(node) and node.blocks[g] is None:
        pool.keep(block, node)
        node.blocks[g] = block
        node.step_id = max(node.step_id, kv.step_id)
    return block


def copy_tail(kv: KVManager, cursor: Cursor) -> list[BlockCopy]:
    """Copies of a cached block's beginning that the request goes on from; see KVManager.match_tail."""
    request = cursor.request
    start, limit = request.num_computed_tokens, request.num_tokens - 1
    if start % kv.block_size or start >= limit:
        return []
    wanted = tuple(request.token_ids(start, min(start + kv.block_size, limit)))
    found = kv.tree.closest(cursor.node, wanted)
    if found is None or found[0].step_id >= kv.step_id:
        return []
    node, length = found
    if length == kv.block_size:
        return []  # a whole block that could not be matched: a copy would leave no room for a token
    held = [cursor.depth + 1 if b is None else h for h, b in zip(cursor.held, node.blocks, strict=True)]
    if not kv.covers(held, start + length):
        return []
    sources = [block for block in node.blocks if block is not None]
    for pool, block in zip(kv.pools, sources, strict=True):
        pool.acquire(block)
    if not all(kv.available_blocks()):
        for pool, block in zip(kv.pools, sources, strict=True):
            pool.release(block)
        return []
    copies = []
    for g, source in enumerate(sources):
        target = kv.take(g, request)
        request.block_tables[g].append(target)
        copies.append(kv.pin(g, source, target))
    kv.advance(request, start + length)
    return copies
