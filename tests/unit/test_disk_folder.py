"""The files of the disk tier: found again, and bounded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from disk_folder_tools import MODEL, OTHER, Clock, file_of, files, get, key_of, open_folder, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale import FULL

from hetero.kv.disk_entry import groups_of, mask_of
from hetero.kv.disk_folder import DISK_BLOCK, TOUCH_SECONDS


def test_masks() -> None:
    assert [mask_of(groups_of(m)) for m in range(8)] == list(range(8))
    assert groups_of(5) == [0, 2] and mask_of([2, 0]) == 5


def test_what_was_put_is_found_after_a_restart(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert not get(folder, 0) and put(folder, 0) and put(folder, 1, mask=1) and get(folder, 0)
    again = open_folder(tmp_path)
    assert get(again, 0) and get(again, 1) and not get(again, 2)
    assert again.mask(key_of(1)) == 1
    assert again.used_bytes == folder.used_bytes == 2 * DISK_BLOCK
    assert not any((tmp_path / "parts").iterdir())
    again.check_invariants()


def test_an_entry_grows_by_groups_and_never_shrinks(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert put(folder, 0, mask=1) and put(folder, 0, mask=3) and put(folder, 0, mask=1)
    assert folder.mask(key_of(0)) == 3 and get(folder, 0)
    assert len(files(tmp_path)) == 1 and folder.stats.stored == 2
    folder.check_invariants()


def test_of_two_files_of_one_block_one_stays(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    put(folder, 0, mask=1)
    small = file_of(tmp_path, 0)
    saved = small.read_bytes()
    put(folder, 0, mask=3)
    small.write_bytes(saved)  # as if the process had ended before it was removed
    os.utime(small, (1, 1))
    again = open_folder(tmp_path)
    assert get(again, 0) and again.mask(key_of(0)) == 3 and files(tmp_path) == [file_of(tmp_path, 0)]
    again.check_invariants()


def test_the_limit_counts_whole_blocks_and_the_longest_unused_goes(tmp_path: Path) -> None:
    clock = Clock()
    folder = open_folder(tmp_path, 3 * DISK_BLOCK, clock=clock)
    for number in range(3):
        clock.now += TOUCH_SECONDS
        assert put(folder, number)
    clock.now += TOUCH_SECONDS
    assert get(folder, 0)  # and so is used after 1 and 2
    assert put(folder, 3)
    assert [get(folder, n) for n in range(4)] == [True, False, True, True]
    clock.now += TOUCH_SECONDS
    folder.touch(key_of(2))
    folder.close()
    again = open_folder(tmp_path, 3 * DISK_BLOCK, clock=clock)  # the order survives
    assert put(again, 4) and put(again, 5)
    assert [n for n in range(6) if get(again, n)] == [2, 4, 5]
    assert again.used_bytes == 3 * DISK_BLOCK == len(files(tmp_path)) * DISK_BLOCK
    assert folder.stats.evicted == 1 and again.stats.evicted == 2
    again.check_invariants()


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number in range(8):
        put(folder, number)
    assert open_folder(tmp_path, 3 * DISK_BLOCK).used_bytes == 3 * DISK_BLOCK
    assert len(files(tmp_path)) == 3
    tiny = open_folder(tmp_path, 100)
    assert not put(tiny, 9) and tiny.used_bytes == 0 and not files(tmp_path)


def test_models_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    clock = Clock()
    first = open_folder(tmp_path, 4 * DISK_BLOCK, MODEL, clock)
    for number in range(3):
        put(first, number)
    first.close()
    clock.now += 1
    second = open_folder(tmp_path, 4 * DISK_BLOCK, OTHER, clock)
    assert not get(second, 0) and second.num_entries == 3
    assert put(second, 0) and put(second, 1)  # the first model's oldest goes
    assert len(files(tmp_path)) == 4 and get(second, 0) and get(second, 1)
    assert [get(first, n) for n in range(3)] == [False, True, True]  # gone is a miss, nothing else
    assert first.stats.damaged == 0
    second.check_invariants()


# -- against a model ---------------------------------------------------------------------------------


@settings(
    max_examples=400 if FULL else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "get", "get", "touch", "restart", "damage", "wait"]),
            st.integers(0, 7),
            st.integers(1, 3),
        ),
        max_size=40,
    )
)
def test_like_a_model_of_it(tmp_path_factory: pytest.TempPathFactory, steps) -> None:
    """`order`: the keys that must be there, the longest unused first, with their groups."""
    path = tmp_path_factory.mktemp("cache")
    clock, limit = Clock(), 5
    folder = open_folder(path, limit * DISK_BLOCK, clock=clock)
    order: dict[int, int] = {}
    for what, number, mask in steps:
        clock.now += 2 * TOUCH_SECONDS
        if what == "put":
            assert put(folder, number, mask)
            if (held := order.get(number, 0)) & mask == mask:
                mask = held
            elif len(order) == limit:  # also for another version of what is there: until it is replaced
                del order[next(iter(order))]
            order.pop(number, None)
            order[number] = mask
        elif what == "get":
            assert get(folder, number) == (number in order)
            if number in order:
                order[number] = order.pop(number)
        elif what == "touch":
            folder.touch(key_of(number))
            if number in order:
                order[number] = order.pop(number)
        elif what == "damage" and number in order:
            with file_of(path, number).open("r+b") as file:
                file.truncate(mask)
            del order[number]
            assert not get(folder, number)
        elif what == "restart":
            folder.close()
            folder = open_folder(path, limit * DISK_BLOCK, clock=clock)
        folder.check_invariants()
        assert {n: m for n in range(8) if (m := folder.mask(key_of(n)))} == order
        assert len(files(path)) == len(order)
    shutil.rmtree(path)
