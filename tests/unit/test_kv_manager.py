"""What is found in the cache, what is copied, and what goes first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.kv.capacity import missing_blocks
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.kv.prefix_tree import common_length
from hetero.request import Request
from hetero.sampling.params import SamplingParams

SIZE = 4


class World:
    """A manager with whole sequences put in and looked up, one step each."""

    def __init__(self, *groups: tuple[int | None, int], size: int = SIZE, in_place: int = 0):
        self.kv = KVManager([KVGroup((g,), w, n) for g, (w, n) in enumerate(groups)], size, in_place)
        self.steps = 0

    def begin(self, tokens: list[int]) -> Request:
        """A request over `tokens`, matched as far as possible."""
        self.steps += 1
        request = Request(f"r{self.steps}", list(tokens), SamplingParams())
        self.kv.begin_step(self.steps)
        self.kv.match(request)
        copies = self.kv.match_tail(request)
        self.kv.check_invariants()
        self.kv.unpin(copies)
        return request

    def compute(self, request: Request, chunk: int = 1000) -> None:
        """All tokens, as far as there is room, `chunk` at a time."""
        while left := request.num_tokens - request.num_computed_tokens:
            count = self.kv.allocate(request, min(chunk, left))
            if count == 0:
                break
            self.kv.commit(request, request.num_computed_tokens + count)
            self.kv.check_invariants()
            request.num_computed_tokens += count
            self.kv.trim(request)
        self.kv.check_invariants()

    def end(self, request: Request) -> None:
        self.kv.release(request, cache=True)
        self.kv.check_invariants()

    def put(self, tokens: list[int], chunk: int = 1000) -> int:
        """Compute a sequence and leave it in the cache. How much of it was found there."""
        request = self.begin(tokens)
        self.compute(request, chunk)
        self.end(request)
        return request.num_cached_tokens

    def found(self, tokens: list[int]) -> int:
        request = self.begin(tokens)
        self.kv.release(request, cache=False)
        return request.num_cached_tokens


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=8)


@given(sequences, st.integers(1, 5), st.integers(1, 7), st.sampled_from([0, 1, 4]))
@settings(max_examples=150, deadline=None)
def test_with_room_for_all_the_longest_common_beginning_is_found(
    put: list[list[int]], size: int, chunk: int, in_place: int
) -> None:
    world = World((None, 400), size=size, in_place=in_place)
    seen: list[list[int]] = []
    for tokens in put:
        longest = max((common_length(s, tokens[:-1]) for s in seen), default=0)
        assert world.put(tokens, chunk) == longest
        seen.append(tokens)


@given(sequences, st.integers(1, 4), st.sampled_from([1, 2, 3, 5, 9]), st.integers(6, 24))
@settings(max_examples=150, deadline=None)
def test_windows_and_tight_pools_never_break_an_invariant(
    put: list[list[int]], size: int, window: int, num_blocks: int
) -> None:
    for groups in ([(None, num_blocks), (window, num_blocks)], [(window, num_blocks)]):
        world = World(*groups, size=size)
        for i, tokens in enumerate(put):
            found = world.put(tokens, chunk=2)
            longest = max((common_length(s, tokens[:-1]) for s in put[:i]), default=0)
            assert found <= longest
        assert world.kv.available_blocks() == [num_blocks - 1] * len(groups)


def test_the_last_token_is_always_computed() -> None:
    world = World((None, 50))
    assert world.put(list(range(8))) == 0
    assert world.found(list(range(8))) == 7
    assert world.found(list(range(9))) == 8
    assert world.found([0]) == 0


def test_a_tail_is_copied_not_shared() -> None:
    world = World((None, 50))
    world.put(list(range(6)))
    world.steps += 1
    world.kv.begin_step(world.steps)
    request = Request("copy", [0, 1, 2, 3, 4, 9, 9], SamplingParams())
    assert world.kv.match(request) == 4
    (copy,) = world.kv.match_tail(request)
    assert request.num_computed_tokens == 5 and request.block_tables[0][1] == copy.dst != copy.src
    assert world.kv.num_pinned == 1
    world.compute(request)
    world.kv.unpin([copy])
    world.end(request)
    assert world.found([0, 1, 2, 3, 4, 5, 0]) == 6, "the copied tail is still there"
    assert world.found([0, 1, 2, 3, 4, 9, 9]) == 6


def test_blocks_of_the_same_step_are_shared_but_not_copied() -> None:
    world = World((None, 50))
    first = world.begin(list(range(8)))
    assert world.kv.allocate(first, 8) == 8
    world.kv.commit(first, 8)
    second = Request("second", [0, 1, 2, 3, 4, 5, 9], SamplingParams())
    assert world.kv.match(second) == 4 and world.kv.match_tail(second) == []
    world.kv.begin_step(world.steps + 1)
    assert len(world.kv.match_tail(second)) == 1


def test_a_block_being_filled_is_replaced_by_a_whole_one() -> None:
    world = World((None, 50))
    slow, fast = world.begin(list(range(12))), world.begin(list(range(12)))
    for request, count in ((slow, 2), (fast, 12)):
        world.kv.allocate(request, count)
        world.kv.commit(request, count)
        request.num_computed_tokens = count
    assert world.kv.match(slow) == 6
    assert slow.block_tables[0] == fast.block_tables[0][:2]
    world.kv.check_invariants()


def test_least_recently_used_tails_go_first() -> None:
    world = World((None, 9))
    a, b, c = ([k] * 8 for k in (1, 2, 3))
    for tokens in (a, b, c):
        world.put(tokens)
    assert world.put([*a, 1]) == 8, "used again; two blocks were free"
    world.put([9] * 8)  # one free block, then the tail of b
    assert [world.found([*tokens, 0]) for tokens in (a, b, c)] == [8, 4, 8]
    held = world.begin([*c, 0])
    world.compute(held)
    big = world.begin([7] * 40)
    world.compute(big)
    assert big.num_computed_tokens == 20, "what a live request holds stays"
    world.end(big)
    world.end(held)
    assert world.found([*c, 5]) == 8


def test_a_released_window_stays_usable_until_it_is_needed() -> None:
    world = World((None, 20), (6, 12))
    tokens = list(range(32))
    request = world.begin(tokens)
    world.compute(request, chunk=4)
    held = [b for b in request.block_tables[1] if b]
    assert len(held) == 2 and len(request.block_tables[1]) == 8
    world.end(request)
    assert world.found([*tokens[:20], 99]) == 20, "blocks outside the window are still cached"
    world.put([50 + k for k in range(28)], chunk=4)
    assert world.found([*tokens[:13], 99]) == 0, "their windows are gone"
    assert world.found([*tokens, 99]) == 32, "the newest blocks are not"
    matched = world.begin([*tokens, 99])
    assert matched.block_tables[1][:6] == [0] * 6 and all(matched.block_tables[1][6:])


def test_capacity_is_an_answer() -> None:
    assert World((None, 5)).kv.max_tokens() == 16
    assert World((None, 5), (6, 4)).kv.max_tokens() == 16
    assert World((None, 5), (6, 3)).kv.max_tokens() == 8, "the window may lie across three blocks"
    assert World((6, 4)).kv.max_tokens() > 10**9
    world = World((None, 4))
    request = world.begin(list(range(20)))
    assert missing_blocks(world.kv, request, 20, 4) == [5]
    assert world.kv.allocate(request, 20) == 12
    assert missing_blocks(world.kv, request, 20, 4) == [2] and world.kv.available_blocks() == [0]
    request.num_computed_tokens = 12
    assert world.kv.allocate(request, 1) == 0
    world.kv.release(request, cache=False)
    world.kv.release(request, cache=False)
    assert world.kv.available_blocks() == [3]


def test_the_end_of_a_sequence_that_another_goes_on_from_is_kept_once() -> None:
    world = World((None, 50))
    world.put([*range(10)])
    nodes, idle = world.kv.tree.num_nodes, world.kv.pools[0].num_idle
    world.put([*range(9)])
    assert (world.kv.tree.num_nodes, world.kv.pools[0].num_idle) == (nodes, idle)
    world.put([*range(11)])
    assert world.found([*range(12)]) == 11
