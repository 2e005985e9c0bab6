"""Block tables of live requests over the pools of all KV groups, and the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from hetero.batch import BlockCopy, BlockMove, StateUse, Step
from hetero.kv import states
from hetero.kv.below import Below
from hetero.kv.block_pool import SCRATCH_BLOCK, BlockPool
from hetero.kv.checks import check_manager
from hetero.kv.cursor import Cursor
from hetero.kv.groups import KVGroup
from hetero.kv.host_tier import HostTier
from hetero.kv.in_place import likely_blocks, make_way, place_matched
from hetero.kv.leaving import detach, drop, prune
from hetero.kv.matching import copy_tail, match
from hetero.kv.prefix_tree import Node, PrefixTree
from hetero.kv.states import PER_REQUEST
from hetero.request import Request


class KVManager:
    """Decides which block holds what. Not thread-safe; the scheduler is its only user.

    A full block is committed to the tree when the step that computes it is scheduled: steps run
    in order on every stage and a layer stores all K/V of a batch before any of its tokens
    attends, so whoever is scheduled later, or in the same step, may already attend it. A copy of
    a block runs *before* its step computes, so its source must be from an earlier step.

    A node of the tree has in every group without a window a block, or a slot in host memory, or both:
    when it loses the last of them, it goes with its subtree. What a windowed group has comes and goes
    one by one. How blocks move to host memory and back is told in host_tier.py; the moves of the step
    being scheduled gather in `host`. Capacity is an answer: a count that may be 0, never an exception.

    `in_place`: up to so many requests at a time are attended where they lie, if the blocks of each follow
    each other. While there are no more, that is worth a copy, or something cached: see in_place.py.
    """

    def __init__(
        self, groups: Sequence[KVGroup], block_size: int, in_place: int = 0, host: HostTier | None = None
    ):
        self.groups = tuple(groups)
        self.in_place = in_place
        self.block_size = block_size
        self.pools = [BlockPool(g.num_blocks) for g in self.groups]
        self.host = host or HostTier([0] * len(self.groups))
        self.below: Below | None = None  # a further tier, told what happens here
        self._windowed = any(g.window is not None for g in self.groups)
        self.state_group = len(self.groups) - 1 if self.groups[-1].recurrent else None
        self.tree = PrefixTree(block_size)
        self.num_pinned = 0  # references held by copies and loads whose step has not ended
        self._pins: Counter[tuple[int, int]] = Counter()
        self._cursors: dict[str, Cursor] = {}
        self._step_id = 0

    @property
    def step_id(self) -> int:
        return self._step_id

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.state_group is not None

    @property
    def num_kv_groups(self) -> int:
        """Groups without that of recurrent layers."""
        return len(self.groups) - self.recurrent

    def cursors_before(self, cursor: Cursor) -> Iterator[Cursor]:
        """Those of requests that are here for longer."""
        return takewhile(lambda other: other is not cursor, self._cursors.values())

    def begin_step(self, step_id: int) -> None:
        """What is matched and committed from here on belongs to step `step_id` (ascending)."""
        self._step_id = step_id
        self.host.begin_step()

    # -- capacity ----------------------------------------------------------------------------

    def max_tokens(self) -> int:
        """The longest sequence whose KV fits when it is alone (a window bounds what it needs)."""
        fits = 2**31 - 1
        for group, pool in zip(self.groups, self.pools, strict=True):
            least = PER_REQUEST if group.recurrent else self.span_blocks(group.window or 0)
            if group.window is None or pool.num_usable < least:
                fits = min(fits, pool.num_usable * self.block_size)
        return fits

    def available_blocks(self) -> list[int]:
        """Per group, blocks that can be had without taking any from a live request."""
        return [pool.num_available for pool in self.pools]

    def num_left_out(self, request: Request, g: int) -> int:
        """Blocks at the beginning of the request's table that are not held, since a window has passed."""
        return self._cursors[request.request_id].held[g]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, or begin to."""
        return -(-num_tokens // self.block_size)

    def span_blocks(self, span: int) -> int:
        return self.num_blocks(span - 1) + 1  # enough for `span` positions wherever they begin

    # -- finding what is computed already ------------------------------------------------------

    def match(self, request: Request, *, load: bool = True, kept: int = 0) -> int:
        """Adopt the longest usable run of whole blocks in the tree that continues the request.

        Moves `num_computed_tokens` and returns by how much. Never covers the last token. Usable
        is a length at which every windowed group still has all that the next position attends.
        With `load` also over what is in host memory only, as far as that is worth it: see `waits`.
        Loads leave `kept` blocks of each group for others.
        """
        cursor = self._cursor(request)
        return 0 if request.needs_every_row else match(self, cursor, load, kept)

    def waits(self, request: Request) -> bool:
        """Whether the request must not be computed in this step: it has matched what is only being loaded,
        or there is more to load than the step may."""
        cursor = self._cursors.get(request.request_id)
        return cursor is not None and cursor.waits == self._step_id

    def match_tail(self, request: Request) -> list[BlockCopy]:
        """Extend the match inside a block: take a fresh block per group and have the equal
        beginning of a cached one copied there (the sources stay referenced until `unpin`).

        Call after `match`, and only for a request that then computes in this step; after a match
        `allocate` has room for at least one token. No match, or no blocks: an empty list. Where it
        pays to have a request in one piece, whole blocks that were matched may be copied too. With
        recurrent layers never: see states.py.
        """
        if self.recurrent or request.needs_every_row:
            return []
        cursor, moved = self._cursor(request), []
        if not cursor.placed and self.wants_one_piece():
            cursor.placed = True
            placed = place_matched(self, cursor)
            if placed is None:
                return []
            moved = placed
        return moved + copy_tail(self, cursor)

    def pin(self, g: int, source: int, target: int) -> BlockCopy:
        """A copy that takes over a reference to its source."""
        self._pins[g, source] += 1
        self.num_pinned += 1
        return BlockCopy(g, source, target)

    def pin_load(self, g: int, block: int) -> None:
        """A load takes over a reference to its target."""
        self._pins[g, block] += 1
        self.num_pinned += 1

    def unpin(self, copies: Iterable[BlockCopy], loads: Iterable[BlockMove] = ()) -> None:
        """The step that makes these copies and loads has ended: their blocks may go."""
        blocks = [(copy.group, copy.src) for copy in copies]
        for g, block in (*blocks, *((load.group, load.block) for load in loads)):
            self.pools[g].release(block)
            self.num_pinned -= 1
            self._pins[g, block] -= 1
            if not self._pins[g, block]:
                del self._pins[g, block]

    def take_moves(self, idle: bool) -> tuple[list[BlockMove], list[BlockMove]]:
        """Spills and loads of the step being scheduled, once all requests have their share of it.

        `idle`: no request is in it.
        """
        if self.below is not None:
            self.below.plan(idle)
        return self.host.take_moves()

    def end_step(self, step: Step, good: bool) -> None:
        """A step has ended: what its copies and moves have pinned may go. Not `good`: it failed."""
        self.unpin(step.copies, step.loads)
        self.host.unpin(step.spills, step.loads)
        if self.below is not None:
            self.below.ended(step, good)

    def blocks_come_free(self) -> bool:
        """Whether there are blocks that nothing but a step in flight still holds."""
        return any(self.pools[g].ref_counts[block] == pins for (g, block), pins in self._pins.items())

    def covers(self, held: Sequence[int], length: int) -> bool:
        """Whether blocks from number held[g] on are all that position `length` attends in each group."""
        return all(
            first * self.block_size <= group.first_needed(length)
            for first, group in zip(held, self.groups, strict=True)
        )

    def advance(self, request: Request, num_computed: int) -> None:
        """The request continues from `num_computed` on: the tokens before were found in the cache."""
        if request.num_preemptions == 0:  # later it would be what the request itself computed
            prompt = len(request.prompt_token_ids)
            found = min(num_computed, prompt) - min(request.num_computed_tokens, prompt)
            request.num_cached_tokens += found
        request.num_computed_tokens = num_computed
        self.trim(request)

    def count_loaded(self, request: Request, nodes: Iterable[Node]) -> None:
        """Take note that these nodes are found in a lower tier, for a request that begins."""
        if request.num_preemptions == 0:
            for node in nodes:
                tier = "disk" if node.below else "host"
                request.tier_tokens[tier] = request.tier_tokens.get(tier, 0) + self.block_size

    # -- blocks for what is to be computed ------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int, kept: int = 0, *, known: bool = True) -> int:
        """Blocks for the next `num_tokens` tokens, or for as many of them as there is room for.

        Returns that number. Reclaims idle blocks, the longest unused first; leaves `kept` for others. Also
        slots for the states of recurrent layers, unless the tokens are not `known` but guessed.
        """
        cursor = self._cursor(request)
        computed, tables = request.num_computed_tokens, request.block_tables[: self.num_kv_groups]
        for pool, table in zip(self.pools, tables, strict=False):
            if len(table) * self.block_size < computed + num_tokens:  # not so in most steps of a decode
                room = len(table) + max(0, pool.num_available - kept)
                num_tokens = min(num_tokens, room * self.block_size - computed)
        if self.recurrent and known and num_tokens > 0 and not states.reserve(self, cursor, num_tokens, kept):
            return 0
        for g, table in enumerate(tables):
            for _ in range(self.num_blocks(computed + num_tokens) - len(table)):
                table.append(self.take(g, request))
        return num_tokens

    def cut(self, request: Request, num_tokens: int) -> None:
        """Give back what lies behind the first `num_tokens` tokens. No step in flight may use it."""
        keep = self.num_blocks(num_tokens)
        for pool, table in zip(self.pools, request.block_tables[: self.num_kv_groups], strict=False):
            while len(table) > keep:
                pool.release(table.pop())

    def use_state(self, request: Request, num_tokens: int) -> StateUse | None:
        """The states of recurrent layers that the step with the next `num_tokens` tokens uses."""
        if not self.recurrent:
            return None
        return states.use_state(self, self._cursors[request.request_id], num_tokens)

    def trim(self, request: Request) -> None:
        """Give back the blocks that no position from `num_computed_tokens` on attends.

        Steps in flight may still attend them: on every stage they do so before any later step writes.
        """
        if not self._windowed:
            return
        cursor = self._cursors[request.request_id]
        cursor.trimmed = request.num_computed_tokens
        for g, group in enumerate(self.groups):
            if group.recurrent:
                states.trim(self, cursor)
                continue
            table = request.block_tables[g]
            needed = min(group.first_needed(request.num_computed_tokens) // self.block_size, len(table))
            for i in range(cursor.held[g], needed):
                if table[i] != SCRATCH_BLOCK:
                    self.pools[g].release(table[i])
                    table[i] = SCRATCH_BLOCK
            cursor.held[g] = max(cursor.held[g], needed)

    def take(self, g: int, request: Request) -> int:
        """A block to go behind the request's last one, best if also in the pool. There must be one."""
        pool, table = self.pools[g], request.block_tables[g]
        after = table[-1] if table and table[-1] != SCRATCH_BLOCK else None
        if after is not None and pool.is_free(after + 1):  # as in most steps of a decode
            return pool.allocate_behind(after)
        room = likely_blocks(self, g, request)
        if self.wants_one_piece():
            make_way(self, g, after, room)
        block = pool.allocate(after, room)
        if block is None:
            idle = pool.oldest_idle()
            assert idle is not None, "the caller checked that a block is available"
            self.reclaim(g, idle)
            block = pool.allocate(after, room)
            assert block is not None
        return block

    def wants_one_piece(self) -> bool:
        """Whether requests are so few now that each should lie in one piece."""
        return len(self._cursors) <= self.in_place

    def reclaim(self, g: int, block: int) -> None:
        """Free an idle block; see leaving.detach for what becomes of the content."""
        detach(self, self.pools[g].owner(block), g)

    # -- the cache -------------------------------------------------------------------------------

    def commit(self, request: Request, num_tokens: int) -> None:
        """Enter the full blocks of the first `num_tokens` tokens into the tree. All of these
        tokens must be known for good (no unverified drafts) and computed or scheduled."""
        cursor = self._cursors[request.request_id]
        if cursor.depth == num_tokens // self.block_size:
            return
        if not self.tree.attached(cursor.node):
            cursor.node, cursor.depth = cursor.root, 0
        size = self.block_size
        prompt = (len(request.prompt_token_ids) - 1) // size  # from there it may be asked again
        cursor.node.is_end |= 0 < cursor.depth == prompt
        for i in range(cursor.depth, num_tokens // size):
            tokens = tuple(request.token_ids(i * size, (i + 1) * size))
            cursor.node = self._enter(cursor.node, tokens, request, i, self._step_id)
            cursor.depth, cursor.tail = i + 1, 0
            cursor.node.is_end |= i + 1 == prompt
        prune(self, cursor.node)

    def _enter(self, parent: Node, tokens: tuple[int, ...], request: Request, i: int, step_id: int) -> Node:
        node = parent.children.get(tokens)
        if node is None:
            node = self.tree.insert(parent, tokens, [None] * len(self.groups), step_id)
            shorter = self.tree.shorter_tail(node)
            if shorter is not None:
                drop(self, shorter)
        for g, table in enumerate(request.block_tables):
            if g == self.state_group and not states.is_wanted(self, self._cursors[request.request_id], i):
                continue
            # An entry that is there stays: it may be in use, and this request's block is as good.
            if node.blocks[g] is None and table[i] != SCRATCH_BLOCK:
                self.pools[g].keep(table[i], node)
                node.blocks[g] = table[i]
                node.step_id = max(node.step_id, step_id)
                if (slot := node.slots[g]) is not None:
                    self.host.slots[g].refile(slot)
        return node

    def release(self, request: Request, *, cache: bool) -> None:
        """Give back all blocks of a request that is in no step in flight.

        With `cache` its computed tokens stay in the tree, the last, partly filled block
        included (not so with recurrent layers), until the blocks are needed.
        """
        cursor = self._cursors.get(request.request_id)
        if cursor is None:
            return
        if cache:
            computed = request.num_computed_tokens
            self.commit(request, computed)
            start = computed - computed % self.block_size
            tail = tuple(request.token_ids(start, computed))
            if self.recurrent:
                states.keep_border(self, cursor)
            elif tail and self.tree.attached(cursor.node):
                found = self.tree.closest(cursor.node, tail)
                if found is None or found[1] < len(tail):
                    prune(self, self._enter(cursor.node, tail, request, cursor.depth, 0))
            if self.below is not None and self.tree.attached(cursor.node):
                self.below.left(cursor.node)
        elif cursor.tail and self.tree.attached(cursor.node):  # as if it had not been taken
            tail = tuple(request.token_ids(cursor.depth * self.block_size, request.num_computed_tokens))
            prune(self, self._enter(cursor.node, tail[: cursor.tail], request, cursor.depth, 0))
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            for block in reversed(table):  # tails become reclaimable first
                if block != SCRATCH_BLOCK:
                    pool.release(block)
        request.block_tables = []
        del self._cursors[request.request_id]

    def clear_cache(self) -> None:
        """Forget all prefixes, in host memory too; live requests keep their blocks."""
        for root in self.tree.roots.values():
            for node in list(root.children.values()):
                drop(self, node)
        for cursor in self._cursors.values():
            cursor.tail = 0
        if self.below is not None:
            self.below.cleared()

    def _cursor(self, request: Request) -> Cursor:
        cursor = self._cursors.get(request.request_id)
        if cursor is None:
            root = self.tree.root_of(request.cache_scope)
            cursor = Cursor(request, root, len(self.groups))
            self._cursors[request.request_id] = cursor
            request.block_tables = [[] for _ in self.groups]
        elif not self.tree.attached(cursor.node):
            self.commit(request, request.num_computed_tokens)
        return cursor

    def check_invariants(self) -> None:
        """Raise AssertionError unless tables, pins, tree and pools agree. O(everything)."""
        check_manager(self)
