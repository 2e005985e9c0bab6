"""Which states of recurrent layers are kept, found and given up.

That they hold what they should is the business of test_scheduler_simulation.py.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.kv.capacity import missing_blocks
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.kv.prefix_tree import common_length
from hetero.kv.states import APART_BLOCKS
from hetero.request import Request
from hetero.sampling.params import SamplingParams

SIZE = 4


class World:
    """A manager with full attention and states; whole sequences are put in and looked up."""

    def __init__(self, num_states: int, num_blocks: int = 400, size: int = SIZE):
        groups = [KVGroup((0,), None, num_blocks), KVGroup((1,), 0, 1 + num_states, recurrent=True)]
        self.kv = KVManager(groups, size)
        self.steps = 0

    def begin(self, tokens: list[int]) -> Request:
        self.step()
        request = Request(f"r{self.steps}", list(tokens), SamplingParams())
        self.kv.match(request)
        assert self.kv.match_tail(request) == []
        self.kv.check_invariants()
        return request

    def step(self) -> None:
        self.steps += 1
        self.kv.begin_step(self.steps)

    def compute(self, request: Request, chunk: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """All tokens, `chunk` at a time. What each step does with states: (source, writes)."""
        used = []
        while left := request.num_tokens - request.num_computed_tokens:
            self.step()
            self.kv.trim(request)
            count = self.kv.allocate(request, min(chunk, left))
            assert count > 0
            state = self.kv.use_state(request, count)
            assert state is not None and state.writes[-1][0] == count
            used.append((state.source, state.writes))
            request.num_computed_tokens += count
            self.kv.commit(request, request.num_computed_tokens)
            self.kv.check_invariants()
        return used

    def put(self, tokens: list[int], chunk: int = 1000, answer: int = 0) -> int:
        """Compute a sequence, with an answer of so many tokens, and leave it in the cache. What was found."""
        request = self.begin(tokens)
        self.compute(request, chunk)
        for i in range(answer):
            request.output_token_ids.append(100 + i)
            self.compute(request, 1)
        self.kv.release(request, cache=True)
        self.kv.check_invariants()
        return request.num_cached_tokens

    def found(self, tokens: list[int]) -> int:
        request = self.begin(tokens)
        self.kv.release(request, cache=False)
        return request.num_cached_tokens


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=8)


@given(sequences, st.integers(1, 5), st.integers(1, 7), st.integers(2, 9), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_any_pool_does_and_nothing_is_found_that_was_not_put(
    put: list[list[int]], size: int, chunk: int, num_states: int, answer: int
) -> None:
    world = World(num_states, size=size)
    for i, tokens in enumerate(put):
        found = world.put(tokens, chunk, answer)
        longest = max((common_length(s, tokens[:-1]) for s in put[:i]), default=0)
        assert found <= longest and found % size == 0
        assert world.kv.available_blocks()[1] == num_states


@given(sequences, st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_with_room_for_all_a_prompt_is_found_up_to_its_last_border(put: list[list[int]], chunk: int) -> None:
    world = World(100)
    for tokens in put:
        world.put(tokens, chunk)
        assert world.found(tokens) == (len(tokens) - 1) // SIZE * SIZE


def test_what_goes_on_from_an_answer_is_found() -> None:
    world = World(8)
    tokens = list(range(10))
    world.put(tokens, answer=7)
    whole = [*tokens, *range(100, 107)]
    assert world.found([*whole, 55]) == 16, "the last border of the answer"
    assert world.found([*tokens, 55, 56]) == 8, "the prompt, to be answered once more"
    assert world.found([*whole[:14], 55]) == 8, "no state was kept in between"


def test_the_second_that_parts_leaves_a_state_for_the_third() -> None:
    world, stem = World(20), list(range(13))
    world.put([*stem, 50, 51, 52, 53, 54])
    assert world.put([*stem, 60, 61, 62, 63, 64]) == 0
    assert world.put([*stem, 70, 71, 72, 73, 74]) == 12
    assert world.put([*stem, 80, 81, 82, 83, 84], chunk=3) == 12


def test_a_long_prompt_leaves_states_on_its_way_while_slots_are_free() -> None:
    apart = APART_BLOCKS * SIZE
    for num_states, found in ((20, 2 * apart), (2, 0)):
        world, tokens = World(num_states, 2000), list(range(3 * apart - 5))
        world.put(tokens, chunk=333)
        assert world.found([*tokens[: 2 * apart + 7], 5]) == found


def test_a_decode_writes_in_turn_to_two_slots_and_asks_for_no_more() -> None:
    world = World(2)
    request = world.begin(list(range(7)))
    used = world.compute(request, 3)
    assert used[0][0] == 0, "it begins with nothing"
    for i in range(20):
        request.output_token_ids.append(i)
        used += world.compute(request, 1)
    assert {slot for _, writes in used for _, slot in writes} == {1, 2}
    for (_, before), (source, _) in itertools.pairwise(used):
        assert source == before[-1][1], "it goes on where it was"


def test_what_another_computes_now_is_waited_for() -> None:
    world, stem = World(20), list(range(40))
    first = world.begin([*stem, 50, 51])
    world.kv.allocate(first, 8)
    world.kv.use_state(first, 8)
    first.num_computed_tokens = 8
    world.kv.commit(first, 8)
    second = Request("second", [*stem, 60, 61], SamplingParams())
    for _ in range(2):
        assert world.kv.match(second) == 0 and world.kv.waits(second)
        world.step()
    world.compute(first, 11)
    world.step()
    assert world.kv.match(second) == 40 and not world.kv.waits(second)
    other = Request("other", [*stem[:5], 60], SamplingParams())
    assert world.kv.match(other) == 0 and not world.kv.waits(other), "nothing that is worth it"


def test_a_state_is_not_begun_with_in_the_step_that_writes_it() -> None:
    world = World(20)
    first, second = world.begin(list(range(9))), Request("second", list(range(9)), SamplingParams())
    assert world.kv.allocate(first, 9) == 9
    world.kv.use_state(first, 9)
    first.num_computed_tokens = 9
    world.kv.commit(first, 9)
    assert world.kv.match(second) == 0 and world.kv.waits(second)
    world.step()
    assert world.kv.match(second) == 8 and not world.kv.waits(second)


def test_guesses_that_came_true_and_are_in_the_cache_are_taken_from_there() -> None:
    """Blocks of what was guessed stand behind the one that was being filled, and go with it."""
    world = World(num_states=12)
    path = list(range(100, 116))
    world.put([*path, 1])
    known = world.begin([*path[:6]])
    world.compute(known, chunk=6)
    world.step()
    assert world.kv.allocate(known, 11, known=False) == 11  # in three blocks, of which one is half full
    known.output_token_ids += [*path[6:], 1]
    world.kv.cut(known, known.num_tokens + 1)
    assert world.kv.match(known) == 10 and known.num_computed_tokens == 16
    assert len(known.block_tables[0]) == 4
    other = world.begin([*path, 1])
    assert other.num_computed_tokens == 16 and other.block_tables[0][1:] == known.block_tables[0][1:]
    world.kv.check_invariants()


def test_what_a_request_lacks_is_a_state_of_its_own() -> None:
    world = World(6)
    request = world.begin([1] * 9)
    assert missing_blocks(world.kv, request, 10, SIZE) == [3, 1]
    world.compute(request, 1000)
    assert missing_blocks(world.kv, request, 10, SIZE) == [0, 0]
    world.kv.release(request, cache=True)
    follower = world.begin([1] * 8 + [2])
    assert follower.num_computed_tokens == 8
    assert missing_blocks(world.kv, follower, 10, SIZE) == [1, 1], "it begins where the cache has one"
