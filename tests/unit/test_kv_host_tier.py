"""Blocks that leave for host memory and come back: what goes, what returns, who waits."""

from __future__ import annotations

import pytest
from host_world import SIZE, A, B, C, World
from simulated_below import Quiet

from hetero.batch import Step
from hetero.kv.below import copy_out, hold, insert, let_go, reserve
from hetero.kv.costs import DOUBT, LOAD_SECONDS, MIN_TOKENS, MoveCosts
from hetero.kv.manager import KVManager
from hetero.kv.prefix_tree import Node, chain_key


def test_what_left_comes_back_instead_of_being_computed() -> None:
    world = World(blocks=5, slots=20)
    world.kv.host.block_bytes = (3,)
    for tokens in (A, B):
        assert world.put(tokens).num_cached_tokens == 0
    assert world.moves() == (4, 0)
    request = world.put(A)
    assert request.num_cached_tokens == 16 and request.tier_tokens == {"host": 16}
    assert world.moves() == (8, 4)
    counters = world.kv.host.counters
    assert (counters.spilled_blocks, counters.loaded_blocks) == (8, 4)
    assert counters.left_device == 8 + 2, "the ends, which are no whole blocks, are lost"
    assert (counters.spilled_bytes, counters.loaded_bytes) == (8 * 3, 4 * 3)
    computed = [sum(step.num_scheduled_tokens) for step in world.steps[-2:]]
    assert computed == [0, 1], "a step of moves alone, then the last token"
    assert world.s.counters.tokens_from() == {"device": 0, "host": 16, "computed": 17 + 17 + 1}


def test_a_block_that_has_a_slot_leaves_without_a_copy() -> None:
    world = World(blocks=5, slots=20)
    for tokens in (A, B, A, B, A):
        world.put(tokens)
    assert world.moves() == (8, 12), "each went to host memory once"
    assert world.kv.host.counters.left_host == 0


def test_without_slots_nothing_moves() -> None:
    world = World(blocks=5, slots=0)
    for tokens in (A, B, A):
        assert world.put(tokens).num_cached_tokens == 0
    assert world.moves() == (0, 0)


def test_the_ends_of_what_is_longest_unused_leave_first() -> None:
    world = World(blocks=5, slots=6)
    for tokens in (A, B, C):
        world.put(tokens)
    # four slots of B, and what is left of A: its beginning
    assert world.kv.host.counters.left_host == 2
    assert world.put(A).num_cached_tokens == 8
    assert world.kv.tree.root.children.keys() >= {(1,) * 4}


def test_slots_whose_block_is_back_are_given_up_first() -> None:
    world = World(blocks=5, slots=8)
    for tokens in (A, B, A):  # A is back on the device, its slots are spare; B went to the others
        world.put(tokens)
    assert world.kv.host.slots[0].num_spare == 4
    world.put(C)  # A leaves without a copy
    world.put([4] * 16 + [9])  # C needs slots: those of B left longest ago
    assert world.put(A).num_cached_tokens == 16


def test_loading_requests_hold_their_blocks_and_are_not_computed() -> None:
    world = World(blocks=12, slots=20)
    world.put(A)
    stream = world.add([5] * 3, max_tokens=30)
    world.step()
    for tokens in (B, C):
        world.put(tokens)
    request = world.add(A, max_tokens=2)
    step = world.step()
    assert step.loads and step.requests == [stream], "others go on"
    assert not request.in_flight and request.num_computed_tokens == 16 and len(request.block_tables[0]) == 4
    assert world.step().requests == [stream, request]


def test_whoever_matches_what_is_being_loaded_waits_with_it() -> None:
    world = World(blocks=6, slots=20)
    for tokens in (A, B):
        world.put(tokens)
    first, second = world.add(A), world.add([*A[:16], 8])
    step = world.step()
    assert len(step.loads) == 3 and not step.requests
    assert first.block_tables[0][:4] == second.block_tables[0][:4], "loaded once, shared"
    assert world.step().requests == [first, second]


def test_an_aborted_load_ends_in_peace() -> None:
    world = World(blocks=5, slots=20)
    for tokens in (A, B):
        world.put(tokens)
    request = world.add(A)
    step = world.s.schedule()
    assert step is not None and step.loads and world.s.abort(request.request_id) is request
    assert world.kv.num_pinned == 4 and world.kv.blocks_come_free(), "nothing but the load holds them"
    world.s.check_invariants()
    world.end(step)
    assert (
        world.kv.num_pinned == 0 and not world.kv.blocks_come_free() and not any(world.kv.host.slots[0].pins)
    )
    assert world.put(A).tier_tokens == {}, "it is on the device by now"


def test_after_a_failure_host_memory_is_not_trusted_either() -> None:
    world = World(blocks=5, slots=20)
    for tokens in (A, B):
        world.put(tokens)
    world.add(A)
    step = world.s.schedule()
    assert step is not None and step.loads
    world.end(step, failed=True)
    assert world.kv.tree.num_nodes == 0 and world.kv.host.slots[0].num_free == 20
    while world.s.has_work:
        world.step()
    assert world.s.counters.cached_tokens == 0


def test_a_budget_bounds_what_a_step_loads() -> None:
    world = World(blocks=20, slots=40)
    for tokens in (A, B):
        world.put(tokens)
    world.put([4] * 76)
    world.kv.host.costs = costs = MoveCosts()
    costs.observe(100, LOAD_SECONDS * 50, 0, 0)  # two blocks a step
    costs.observe(0, 0, MIN_TOKENS, 10.0)
    a, b = world.add(A), world.add(B)
    loads = [len(world.step().loads) for _ in range(4)]
    assert loads == [2, 2, 2, 2], "at most so many, until all is there"
    while world.s.has_work:
        world.step()
    assert a.num_cached_tokens == b.num_cached_tokens == 16


def test_what_is_quicker_to_compute_is_not_loaded() -> None:
    world = World(blocks=5, slots=20)
    for tokens in (A, B):
        world.put(tokens)
    world.kv.host.costs.observe(1, 10.0, 0, 0)
    world.kv.host.costs.observe(0, 0, MIN_TOKENS, float(MIN_TOKENS))
    before = world.kv.host.costs.byte_seconds
    assert world.put(A).num_cached_tokens == 0
    assert before * DOUBT**20 < world.kv.host.costs.byte_seconds < before, "tried again some day"


def test_costs_are_what_was_measured_last() -> None:
    costs = MoveCosts()
    for _ in range(50):
        costs.observe(1000, 1e-3, 100, 0.2)
    assert costs.byte_seconds == pytest.approx(1e-6, rel=1e-3)
    assert costs.token_seconds == pytest.approx(2e-3, rel=1e-3)
    assert costs.gain(16, 1000) == pytest.approx(16 * 2e-3 - 1e-3, rel=1e-3)
    costs.observe(0, 5.0, 1, 5.0)
    assert costs.token_seconds == pytest.approx(2e-3, rel=1e-3), "one token tells nothing about prompts"


def test_a_preempted_request_comes_back_by_loads() -> None:
    world = World(blocks=12, slots=30)
    old, new = world.add([1] * 20, max_tokens=26), world.add([2] * 20, max_tokens=26)
    while new.num_preemptions == 0:
        world.step()
    known = new.num_tokens
    while old.finish_reason is None:
        assert world.step().requests == [old]
    step = world.step()
    assert step.loads and not step.requests, "what it had computed is loaded"
    assert known - new.num_computed_tokens <= SIZE
    while world.s.has_work:
        world.step()
    assert len(old.output_token_ids) == len(new.output_token_ids) == 26


def test_of_a_window_only_the_ends_are_kept() -> None:
    world = World(blocks=24, slots=60, window=6)
    long = [k % 7 for k in range(64)]
    world.put([*long, 9])
    for k in (50, 60):
        world.put([k] * 64 + [9])
    spilled = [sum(1 for s in world.steps for m in s.spills if m.group == g) for g in (0, 1)]
    assert 0 < spilled[1] < spilled[0] // 2
    assert world.put([*long, 9]).num_cached_tokens == 64


def test_scopes_find_only_their_own() -> None:
    world = World(blocks=30, slots=30)
    assert world.put(A, scope="x").num_cached_tokens == 0
    assert world.put(A, scope="y").num_cached_tokens == 0
    assert world.put(A).num_cached_tokens == 0
    assert [world.put(A, scope=scope).num_cached_tokens for scope in ("x", "y", "")] == [16] * 3


def test_keys_name_whole_prefixes() -> None:
    world = World(blocks=30, slots=0)
    tree = world.kv.tree
    keys = set()
    for scope in ("", "x"):
        for tokens in ([1] * 8, [2] * 4 + [1] * 4):
            world.put([*tokens, 9], scope=scope)
        first = tree.root_of(scope).children[(1,) * 4]
        second = first.children[(1,) * 4]
        assert tree.key(second) == chain_key(tree.key(first), (1,) * 4) and len(tree.key(first)) == 16
        keys |= {tree.key(node) for node in tree.nodes() if len(node.tokens) == 4}
    assert len(keys) == 8
    dropped = next(iter(tree.root.children.values()))
    dropped.chain_key = None
    tree.drop(dropped)
    with pytest.raises(ValueError):
        tree.key(dropped)


class Listener(Quiet):
    def __init__(self, kv: KVManager):
        self.kv, self.nodes, self.spills, self.todo = kv, [], 0, []
        kv.below = self

    def left(self, node: Node) -> None:
        self.nodes.append(node)

    def ended(self, step: Step, good: bool) -> None:
        self.spills += good * len(step.spills)

    def plan(self, idle: bool) -> None:
        while self.todo:
            assert copy_out(self.kv, self.todo.pop())

    def cleared(self) -> None:
        self.nodes.clear()


def test_a_tier_below_copies_out_and_inserts() -> None:
    world = World(blocks=12, slots=8)
    listener = Listener(world.kv)
    world.put(A)
    (node,) = listener.nodes
    assert node.parent is not None and node.tokens == (1,) * 4
    listener.todo = [node, node.parent]
    world.add([5])
    step = world.s.schedule()
    assert step is not None and hold(world.kv, node) == {}, "it is only being written"
    world.steps.append(step)
    world.end(step)
    assert world.moves() == (2, 0) and listener.spills == 2 and node.blocks[0] and node.slots[0] is not None
    held = hold(world.kv, node)
    assert held == {0: node.slots[0]} and world.kv.host.slots[0].pins[held[0]] == 1
    let_go(world.kv, held)

    slots = reserve(world.kv, [0])
    assert slots is not None
    new = insert(world.kv, world.kv.tree.root, (8,) * 4, slots)
    let_go(world.kv, slots)
    world.kv.check_invariants()
    assert new is not None
    assert insert(world.kv, node, (8,) * 4, {}) is None, "in a full group nothing would hold it"
    assert world.put([8] * 4 + [9]).tier_tokens == {"disk": 4}
    world.kv.clear_cache()
    assert listener.nodes == [] and insert(world.kv, node, (8,) * 4, {}) is None
    all_slots = [reserve(world.kv, [0]) for _ in range(9)]
    assert all_slots[-1] is None and None not in all_slots[:-1]


def test_what_somebody_is_at_stays_and_the_next_gives_way() -> None:
    world = World(blocks=8, slots=4)
    ends = []
    for token in (1, 2):
        node: Node | None = world.kv.tree.root
        for _ in range(2):
            slots = reserve(world.kv, [0])
            assert node is not None and slots is not None
            node = insert(world.kv, node, (token,) * SIZE, slots)
            let_go(world.kv, slots)
        assert node is not None
        ends.append(node)
    held = hold(world.kv, ends[0])
    slot = ends[1].slots[0]
    assert reserve(world.kv, [0]) == {0: slot} and not world.kv.tree.attached(ends[1])
    assert ends[0].slots == [held[0]]
