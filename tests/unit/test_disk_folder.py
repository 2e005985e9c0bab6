"""The files of the disk tier: found again, bounded, and never believed when something happened to them."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale import FULL

from hetero.kv import disk_folder
from hetero.kv.disk_entry import HEADER_BYTES, VERSION, groups_of, mask_of
from hetero.kv.disk_folder import DISK_BLOCK, PAUSE_SECONDS, TOUCH_SECONDS, DiskFolder
from hetero.kv.prefix_tree import chain_key

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
MODEL, OTHER = b"m" * 16, b"o" * 16
SIZES = (700, 300)  # bytes of a block in each of two KV groups
LARGE = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> bytes:
    return chain_key(bytes(16), [number])


def content(number: int, mask: int) -> list[np.ndarray]:
    return [np.random.default_rng([number, g]).integers(0, 256, SIZES[g], np.uint8) for g in groups_of(mask)]


def put(folder: DiskFolder, number: int, mask: int = 3) -> bool:
    return folder.put(key_of(number), mask, content(number, mask))


def get(folder: DiskFolder, number: int) -> bool:
    """Whether the block was there. What comes back is what was put, or nothing."""
    mask = folder.mask(key_of(number))
    if not mask:
        return False
    parts = [np.zeros(SIZES[g], np.uint8) for g in groups_of(mask)]
    if not folder.get(key_of(number), mask, parts):
        return False
    for part, right in zip(parts, content(number, mask), strict=True):
        np.testing.assert_array_equal(part, right)
    return True


def open_folder(path: Path, limit: int = LARGE, model: bytes = MODEL, clock=time.time) -> DiskFolder:
    folder = DiskFolder(path, limit, model, clock)
    folder.scan()
    return folder


def files(path: Path) -> list[Path]:
    """All entries, of all models."""
    return sorted(p for p in path.glob("*/??/*") if p.is_file())


def file_of(path: Path, number: int, model: bytes = MODEL) -> Path:
    (found,) = path.glob(f"{model.hex()}/??/{key_of(number).hex()}.*")
    return found


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


# -- damage ------------------------------------------------------------------------------------------


def test_flipped_bits_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    folder = open_folder(tmp_path)
    put(folder, 0)
    put(folder, 1)
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    at = list(range(8 * HEADER_BYTES)) if FULL else rng.sample(range(8 * HEADER_BYTES), 60)
    at += rng.sample(range(8 * HEADER_BYTES, 8 * len(good)), 1000 if FULL else 140)
    for bit in at:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert folder.mask(key_of(0)) and not get(folder, 0), f"bit {bit}"
        assert not path.exists() and not folder.mask(key_of(0)), "it stays"
        path.write_bytes(good)
        folder.scan()
    assert get(folder, 0) and get(folder, 1)
    assert folder.stats.damaged == len(at)
    assert len(caplog.records) == 1, "one warning, not one for each"
    folder.check_invariants()


def damages(good: bytes, foreign: dict[str, bytes]) -> dict[str, bytes]:
    whole = len(good)
    found = {
        "empty": b"",
        "zeroed": bytes(whole),
        "zeroed at the end": good[:-256] + bytes(256),
        "zeroed at the start": bytes(HEADER_BYTES) + good[HEADER_BYTES:],
        "longer": good + b"\0",
        "random": random.Random(2).randbytes(whole),
        "twice": good * 2,
        "next version": good[:8] + (VERSION + 1).to_bytes(4, "little") + good[12:],
    }
    cuts = [1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, whole // 2, whole - 1]
    found |= {f"cut at {cut}": good[:cut] for cut in cuts}
    return found | foreign


def test_damaged_and_foreign_files_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    other = open_folder(tmp_path, model=OTHER)
    put(other, 0)
    folder = open_folder(tmp_path, clock=clock)
    for number in range(3):
        put(folder, number)
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    foreign = {
        "of another model": file_of(tmp_path, 0, OTHER).read_bytes(),
        "of other tokens": file_of(tmp_path, 1).read_bytes(),
    }
    for what, bad in damages(good, foreign).items():
        clock.now += 2 * disk_folder.WARN_SECONDS
        caplog.clear()
        path.write_bytes(bad)
        fresh = open_folder(tmp_path, clock=clock)
        assert fresh.mask(key_of(0)), what
        assert not get(fresh, 0), what
        assert not path.exists() and len(caplog.records) == 1 and str(path) in caplog.text, what
        assert get(fresh, 1) and get(fresh, 2), what
        fresh.check_invariants()
        assert put(fresh, 0) and get(fresh, 0), what
    assert get(other, 0), "another model's entry was harmed"


def test_what_is_not_an_entry_is_left_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, 4 * DISK_BLOCK)
    put(folder, 0)
    folder.close()
    shard = file_of(tmp_path, 0).parent
    strangers = [tmp_path / "notes.txt", shard / "readme", shard / f"{'0' * 32}.zz", tmp_path / "parts" / "x"]
    strangers += [shard / f"{'f' * 32}.1"]  # its name belongs elsewhere
    for path in strangers:
        path.write_bytes(b"mine")
    (shard / f"{shard.name}{'0' * 30}.1").mkdir()
    if sys.platform != "win32":
        (shard / f"{shard.name}{'1' * 30}.1").symlink_to(tmp_path / "notes.txt")
    again = open_folder(tmp_path, 4 * DISK_BLOCK)
    for number in range(1, 9):
        assert put(again, number)
    assert again.used_bytes == 4 * DISK_BLOCK
    assert all(path.read_bytes() == b"mine" for path in strangers)


def test_a_folder_that_is_removed_under_it_comes_back(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "cache")
    put(folder, 0)
    shutil.rmtree(tmp_path / "cache")
    assert not get(folder, 0)
    assert put(folder, 1) and get(folder, 1)


def test_an_unusable_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        DiskFolder(tmp_path / "file", LARGE, MODEL)


# -- a full disk -------------------------------------------------------------------------------------


def test_a_full_disk_stops_writing_for_a_while(tmp_path: Path, monkeypatch, caplog) -> None:
    clock = Clock()
    folder = open_folder(tmp_path, clock=clock)
    put(folder, 0)
    write = disk_folder.write_entry
    tried = []

    def full(path: Path, *args) -> int:
        tried.append(path)
        path.write_bytes(b"heteroKV as far as it went")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_folder, "write_entry", full)
    assert not put(folder, 1) and not put(folder, 2) and len(tried) == 1
    assert folder.is_paused and get(folder, 0), "reading goes on"
    clock.now += PAUSE_SECONDS
    assert not folder.is_paused and not put(folder, 3) and len(tried) == 2
    assert not any((tmp_path / "parts").iterdir())
    monkeypatch.setattr(disk_folder, "write_entry", write)
    assert not put(folder, 4)
    clock.now += PAUSE_SECONDS
    assert put(folder, 4) and get(folder, 4)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2 and all("No space left" in w for w in warnings), warnings
    assert folder.stats.failed == 2
    folder.check_invariants()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        folder = open_folder(tmp_path)
        stored = [number for number in range(100) if put(folder, number)]
        assert 5 < len(stored) < 100 and folder.is_paused
        assert all(get(folder, number) for number in stored)
        assert not any((tmp_path / "parts").iterdir())
        again = open_folder(tmp_path)
        assert again.num_entries == len(stored) and all(get(again, number) for number in stored)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- others ------------------------------------------------------------------------------------------


def test_two_servers_write_at_once_within_one_limit(tmp_path: Path) -> None:
    limit = 160 * DISK_BLOCK
    two = [open_folder(tmp_path, limit), open_folder(tmp_path, limit)]
    most, over = [0], []

    def work(folder: DiskFolder, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000 if FULL else 250):
            number = rng.randrange(300)
            if not get(folder, number):
                assert put(folder, number)
            if rng.random() < 0.2:
                most[0] = max(most[0], len(files(tmp_path)))

    def guarded(folder: DiskFolder, seed: int) -> None:
        try:
            work(folder, seed)
        except BaseException as exc:
            over.append(exc)

    threads = [threading.Thread(target=guarded, args=(f, i)) for i, f in enumerate(two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over, over
    assert 100 < most[0] <= 160
    assert all(folder.stats.damaged == folder.stats.failed == 0 for folder in two)
    third = open_folder(tmp_path, limit)
    assert all(get(third, n) for n in range(300) if third.mask(key_of(n)))


def test_a_server_that_ended_takes_no_room(tmp_path: Path) -> None:
    first = open_folder(tmp_path, 64 * DISK_BLOCK)
    put(first, 0)
    assert len(list((tmp_path / "servers").iterdir())) == 1
    first.close()
    clock = Clock()
    clock.now = time.time()
    crashed = open_folder(tmp_path, 64 * DISK_BLOCK, clock=clock)
    put(crashed, 1)
    clock.now += 10 * TOUCH_SECONDS
    last = open_folder(tmp_path, 64 * DISK_BLOCK, clock=clock)
    for number in range(64):
        put(last, number)
    assert last.used_bytes == 64 * DISK_BLOCK
    assert len(list((tmp_path / "servers").iterdir())) == 1


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
from test_disk_folder import open_folder, put, DISK_BLOCK
folder = open_folder(Path({path!r}), 40 * DISK_BLOCK)
number = {start}
while True:
    put(folder, number, 1 + number % 3)
    number += 1
    if number == {start} + 3:
        print("ready", flush=True)
"""


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """A process that writes as fast as it can is killed, over and over, in one folder."""
    rng = random.Random(3)
    seen = 0
    for kill in range(300 if FULL else 6):
        start = rng.randrange(1000)
        code = WRITER.format(folders=FOLDERS, path=str(tmp_path), start=start)
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.04)
        child.kill()
        child.wait()
        child.stdout.close()
        folder = open_folder(tmp_path, 40 * DISK_BLOCK)
        assert not any((tmp_path / "parts").iterdir()), "left behind"
        known = [n for n in range(1, 5000) if folder.mask(key_of(n))] if kill % 10 == 0 else []
        known += [n for n in range(start, start + 400) if folder.mask(key_of(n))]
        assert all(get(folder, n) for n in known)
        assert folder.stats.damaged == 0 and len(files(tmp_path)) <= 40
        folder.check_invariants()
        seen += len(known)
    assert seen > 5


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
