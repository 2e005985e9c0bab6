"""The block pool and the prefix tree against models that are too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero.kv.block_pool import BlockPool
from hetero.kv.free_runs import FreeRuns
from hetero.kv.prefix_tree import Node, PrefixTree, common_length


class PoolMachine(RuleBasedStateMachine):
    """A pool beside plain dictionaries."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.refs: dict[int, int] = {}
        self.owners: dict[int, object] = {}
        self.idle: list[int] = []  # oldest first

    @rule(room=st.integers(1, 9), data=st.data())
    def allocate(self, room: int, data: st.DataObject) -> None:
        after = data.draw(st.none() | st.sampled_from(sorted(self.refs))) if self.refs else None
        free = set(range(1, self.pool.num_blocks)) - set(self.refs) - set(self.idle)
        block = self.pool.allocate(after, room)
        assert (block is None) == (not free)
        if block is not None:
            assert block in free and (block == after + 1 if after is not None and after + 1 in free else True)
            self.refs[block] = 1

    @precondition(lambda self: self.refs or self.idle)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.refs, *self.idle])))
        self.pool.acquire(block)
        self.refs[block] = self.refs.get(block, 0) + 1
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release(block)
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            if block in self.owners:
                self.idle.append(block)

    @precondition(lambda self: set(self.refs) - set(self.owners))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.refs) - set(self.owners))))
        self.owners[block] = object()
        self.pool.keep(block, self.owners[block])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.forget(block)
        del self.owners[block]
        if block in self.idle:
            self.idle.remove(block)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_invariants()
        assert pool.num_idle == len(self.idle) and pool.oldest_idle() == (self.idle[0] if self.idle else None)
        assert pool.num_free == pool.num_usable - len(self.idle) - len(self.refs)
        assert pool.num_available == pool.num_free + pool.num_idle
        for block in range(pool.num_blocks):
            assert pool.ref_counts[block] == self.refs.get(block, 0)
            assert pool.owner(block) is self.owners.get(block)


class RunsMachine(RuleBasedStateMachine):
    """Runs beside a set."""

    @initialize(size=st.integers(1, 20), start=st.integers(0, 20))
    def start(self, size: int, start: int) -> None:
        self.size, self.members = size, set(range(min(start, size), size))
        self.runs = FreeRuns(size)
        if self.members:
            self.runs.put_all(start)

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.size - 1))
        if number in self.members:
            with pytest.raises(ValueError):
                self.runs.put(number)
        else:
            self.runs.put(number)
            self.members.add(number)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        number, first = data.draw(st.integers(0, self.size - 1)), data.draw(st.integers(0, self.size - 1))
        run = set(range(first, number + 1))
        if run and run <= self.members and first - 1 not in self.members:
            self.runs.take(number, first)
            self.members.remove(number)
        else:
            with pytest.raises(ValueError):
                self.runs.take(number, first)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def take_somewhere(self, data: st.DataObject) -> None:
        first, end = self.runs.long_run()
        assert end - first >= self.runs.longest
        number = data.draw(st.integers(first, end - 1))
        self.runs.take(number, first)
        self.members.remove(number)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "runs"):
            return
        self.runs.check_invariants()
        assert len(self.runs) == len(self.members) and bool(self.runs) == bool(self.members)
        assert {n for n in range(self.size) if n in self.runs} == self.members
        longest = length = 0
        for number in range(self.size):
            length = length + 1 if number in self.members else 0
            longest = max(longest, length)
        assert self.runs.longest <= longest < 2 * self.runs.longest or longest == self.runs.longest == 0


class TreeMachine(RuleBasedStateMachine):
    """A tree beside a dictionary of whole prefixes."""

    SIZE = 3

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(self.SIZE)
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE).map(tuple)

    def full(self) -> list[tuple[int, ...]]:
        return sorted(p for p in self.nodes if len(p) % self.SIZE == 0)

    @rule(tokens=tokens, data=st.data())
    def insert(self, tokens: tuple[int, ...], data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.full()))
        if prefix + tokens in self.nodes:
            with pytest.raises(ValueError):
                self.tree.insert(self.nodes[prefix], tokens, [1], 0)
        else:
            self.nodes[prefix + tokens] = self.tree.insert(self.nodes[prefix], tokens, [1], 0)

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(sorted(self.nodes)[1:]))
        node = self.nodes[prefix]
        # A tail "ab" is no ancestor of "abc": that is a sibling.
        full = len(prefix) % self.SIZE == 0
        below = {p for p in self.nodes if p == prefix or (full and p[: len(prefix)] == prefix)}
        gone = self.tree.drop(node)
        assert {id(n) for n in gone} == {id(self.nodes[p]) for p in below} and len(gone) == len(below)
        assert not any(self.tree.attached(n) for n in gone)
        for p in below:
            del self.nodes[p]

    @rule(tokens=tokens, data=st.data())
    def closest(self, tokens: tuple[int, ...], data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.full()))
        children = [n for p, n in self.nodes.items() if n.parent is self.nodes[prefix]]
        longest = max((common_length(n.tokens, tokens) for n in children), default=0)
        found = self.tree.closest(self.nodes[prefix], tokens)
        assert (found[1] if found else 0) == longest
        if found:
            assert found[0] in children and common_length(found[0].tokens, tokens) == longest

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def shorter_tail(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)[1:]))]
        assert node.parent is not None
        tails = [t for t in node.parent.children if t != node.tokens and node.tokens[: len(t)] == t]
        found = self.tree.shorter_tail(node)
        assert found is None or found.tokens in tails
        # While each insertion takes the shorter tail away, there is at most one, and it is found.
        if len(tails) == 1 and not any(tails[0] < t < node.tokens for t in node.parent.children):
            assert found is not None

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        assert {id(n) for n in self.tree.nodes()} == {id(n) for p, n in self.nodes.items() if p}


TestPool = PoolMachine.TestCase
TestTree = TreeMachine.TestCase
TestRuns = RunsMachine.TestCase
TestPool.settings = TestTree.settings = TestRuns.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def test_misuse_of_blocks_is_an_error() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    assert block is not None
    for wrong in (lambda: pool.forget(block), lambda: pool.release(0), lambda: pool.keep(0, object())):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(KeyError):
        pool.acquire(2 if block == 1 else 1)
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_a_sequence_grows_in_a_row_and_others_get_room_of_their_own() -> None:
    pool = BlockPool(65)
    first = [pool.allocate(None, 8)]
    second = [pool.allocate(None, 8)]
    assert first == [1] and second == [33]  # the middle of what was left
    for _ in range(20):
        first.append(pool.allocate(first[-1]))
        second.append(pool.allocate(second[-1]))
    assert first == list(range(1, 22)) and second == list(range(33, 54))


def test_a_sequence_that_is_too_long_for_half_a_run_begins_at_its_front() -> None:
    pool = BlockPool(65)
    pool.allocate()
    assert pool.allocate(None, 40) == 2


def test_an_empty_set_has_no_run() -> None:
    with pytest.raises(IndexError):
        FreeRuns(4).long_run()
