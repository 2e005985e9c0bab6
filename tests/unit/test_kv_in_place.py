"""Requests that are alone lie in one piece, whatever they share with the cache."""

from __future__ import annotations

import pytest
from test_kv_manager import World

from tests.bench.blocks import simulate

SYSTEM = list(range(100, 110))  # two and a half blocks
TURN = [1, 2, 3, 4, 5, 6, 7]


def one_piece(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table)))


@pytest.fixture
def world() -> World:
    return World((None, 200), in_place=1)


def test_the_next_turn_goes_on_in_the_same_block(world: World) -> None:
    world.put(SYSTEM + TURN)
    request = world.begin(SYSTEM + TURN + [8, 9])
    assert request.num_cached_tokens == 17 and world.kv.num_pinned == 0
    world.compute(request)
    assert one_piece(request.block_tables[0])
    world.end(request)
    assert world.found(SYSTEM + TURN + [8, 9, 10]) == 19


def test_whole_blocks_with_room_behind_them_stay_where_they_are(world: World) -> None:
    world.put([*SYSTEM, 1, 2])
    request = world.begin([*SYSTEM, 1, 2, 3, 4, 5])
    assert request.num_cached_tokens == 12 and request.block_tables[0][:3] == [1, 2, 3]
    world.compute(request)
    assert one_piece(request.block_tables[0])


def test_a_conversation_behind_a_shared_beginning_takes_that_along(world: World) -> None:
    world.put(SYSTEM + TURN)
    request = world.begin(SYSTEM + [50] * 9)
    assert request.num_cached_tokens == len(SYSTEM)
    world.compute(request)
    (table,) = request.block_tables
    assert one_piece(table) and table[0] > 5
    world.end(request)
    assert world.found(SYSTEM + TURN + [8]) == 17 and world.found(SYSTEM + [50] * 9 + [8]) == 19
    # whoever comes back to the first conversation is moved together again
    back = world.begin(SYSTEM + TURN + [8])
    world.compute(back)
    assert one_piece(back.block_tables[0])


def test_where_nothing_can_be_moved_the_next_tokens_take_the_place_of_others() -> None:
    world = World((None, 16), in_place=9)  # each of which may need one more
    world.put([*SYSTEM, 1])
    request = world.begin([*SYSTEM, 50, 51])
    assert request.num_cached_tokens == 10 and request.block_tables[0] == [1, 2, 3]
    world.compute(request)
    assert request.block_tables[0] == [1, 2, 3]
    world.end(request)
    assert world.found([*SYSTEM, 1, 2]) == 10


def test_a_beginning_that_others_are_using_stays_with_them() -> None:
    world = World((None, 200), in_place=2)
    first = world.begin(SYSTEM + TURN)
    world.compute(first)
    table = list(first.block_tables[0])
    second = world.begin(SYSTEM + [50] * 9)
    world.compute(second)
    assert first.block_tables[0] == table and one_piece(second.block_tables[0])
    assert not set(table) & set(second.block_tables[0])
    world.end(first)
    assert world.found(SYSTEM + TURN) == 16


def test_with_more_requests_than_can_be_attended_in_place_blocks_are_shared(world: World) -> None:
    first = world.begin(SYSTEM + TURN)
    world.compute(first)
    second = world.begin(SYSTEM + [50] * 9)
    world.compute(second)
    assert first.block_tables[0][:2] == second.block_tables[0][:2]


def test_a_request_that_never_computed_gives_the_tail_back(world: World) -> None:
    world.put(SYSTEM + TURN)
    for _ in range(2):
        assert world.found(SYSTEM + TURN + [8]) == 17


def test_what_a_failure_made_doubtful_is_not_given_back(world: World) -> None:
    world.put(SYSTEM + TURN)
    request = world.begin(SYSTEM + TURN + [8])
    world.kv.clear_cache()
    world.kv.release(request, cache=False)
    world.kv.check_invariants()
    assert world.found(SYSTEM + TURN + [8]) == 0


def test_a_full_pool_makes_room_in_a_row() -> None:
    world = World((None, 41), in_place=1)
    for i in range(12):
        world.put([i] * 13)
    request = world.begin([99] * 60)
    world.compute(request)
    assert one_piece(request.block_tables[0])


def test_without_a_device_that_needs_it_nothing_is_moved() -> None:
    world = World((None, 200))
    world.put(SYSTEM + TURN)
    request = world.begin(SYSTEM + [50] * 9)
    assert request.block_tables[0][:2] == [1, 2]
    assert len(world.kv.match_tail(request)) == 0


def test_a_single_users_conversations_are_always_in_one_piece() -> None:
    counts = simulate(users=1, num_blocks=1025, requests=40, context=2048)
    assert counts.tokens > 1000 and counts.in_row == counts.tokens
