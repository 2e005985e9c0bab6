"""The threads of the disk tier: slots out to files and back, without the engine's thread waiting for it."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from disk_folder_tools import MODEL, Clock, key_of

from hetero.kv import disk_folder, disk_tier
from hetero.kv.disk_folder import DISK_BLOCK, TOUCH_SECONDS, DiskFolder
from hetero.kv.disk_tier import DiskTier, Fetched, Stored

STAGES = (
    (96, 40),
    (64, 0),
)  # bytes of a slot of two KV groups in two stages; the second has no layer of group 1
SLOTS = 12


class Host:
    """Slots of two stages as plain arrays."""

    def __init__(self) -> None:
        self.arenas = [[np.zeros((SLOTS, nbytes), np.uint8) for nbytes in sizes] for sizes in STAGES]

    def parts(self, group: int, slot: int) -> list[np.ndarray]:
        return [arena[group][slot] for arena in self.arenas if arena[group].size]

    def fill(self, group: int, slot: int, number: int) -> None:
        for i, part in enumerate(self.parts(group, slot)):
            part[:] = np.random.default_rng([number, group, i]).integers(0, 256, part.nbytes, np.uint8)

    def holds(self, group: int, slot: int, number: int) -> bool:
        right = Host()
        right.fill(group, 0, number)
        pairs = zip(self.parts(group, slot), right.parts(group, 0), strict=True)
        return all((a == b).all() for a, b in pairs)


def open_tier(path: Path, host: Host, **options) -> DiskTier:
    return DiskTier(DiskFolder(path, 1 << 30, MODEL), 2, host.parts, **options)


def results(tier: DiskTier, count: int) -> list[Stored | Fetched]:
    found: list[Stored | Fetched] = []
    while len(found) < count:
        assert tier.wait(10), "nothing happens"
        found += tier.poll()
        tier.check_invariants()
    assert len(found) == count
    return found


def test_blocks_go_out_and_come_back_after_a_restart(tmp_path: Path) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    for number in range(4):
        for group in (0, 1):
            host.fill(group, number, number)
    assert all(tier.store(key_of(n), {0: n, 1: n} if n % 2 else {0: n}) for n in range(4))
    assert results(tier, 4) == [Stored(key_of(n), True) for n in range(4)]
    tier.close()

    host = Host()
    tier = open_tier(tmp_path, host)
    assert [tier.mask(key_of(n)) for n in range(5)] == [1, 3, 1, 3, 0]
    job = tier.fetch([(key_of(n), {0: 11 - n, 1: 11 - n}) for n in range(5)])
    assert results(tier, 1) == [Fetched(job, (1, 3, 1, 3, 0))]
    for n in range(4):
        assert host.holds(0, 11 - n, n)
        assert host.holds(1, 11 - n, n) == (n % 2 == 1)
    job = tier.fetch([(key_of(1), {0: 0})])  # only one of its groups is asked for
    assert results(tier, 1) == [Fetched(job, (1,))] and host.holds(0, 0, 1)
    job = tier.fetch([])
    assert results(tier, 1) == [Fetched(job, ())] and tier.num_pending == 0
    tier.close()
    tier.close()


def test_a_bad_file_among_good_ones_is_a_miss(tmp_path: Path) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    for number in range(6):
        host.fill(0, number, number)
        tier.store(key_of(number), {0: number})
    results(tier, 6)
    for number, what in ((1, "flip"), (3, "cut"), (4, "gone")):
        (path,) = tmp_path.glob(f"*/??/{key_of(number).hex()}.1")
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data if what == "flip" else data[:50])
        if what == "gone":
            path.unlink()
    job = tier.fetch([(key_of(n), {0: 11 - n}) for n in range(6)])
    assert results(tier, 1) == [Fetched(job, (1, 0, 1, 0, 0, 1))]
    assert [tier.mask(key_of(n)) for n in range(6)] == [1, 0, 1, 0, 0, 1]
    assert tier.folder.stats.damaged == 2
    assert tier.store(key_of(1), {0: 1}) and results(tier, 1) == [Stored(key_of(1), True)]
    tier.close()


def test_a_file_that_was_given_a_name_with_more_groups_is_a_miss(tmp_path: Path) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    tier.store(key_of(0), {0: 0})
    results(tier, 1)
    tier.close()
    (path,) = tmp_path.glob("*/??/*.1")
    path.rename(path.with_suffix(".f1"))
    tier = open_tier(tmp_path, host)
    assert tier.mask(key_of(0)) == 0
    job = tier.fetch([(key_of(0), {0: 0})])
    assert results(tier, 1) == [Fetched(job, (0,))]
    tier.close()


class Gate:
    """Holds the writer where it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = disk_folder.write_entry

        def slow(*args) -> int:
            written = write(*args)
            self.reached.set()
            assert self.open.wait(10)
            return written

        monkeypatch.setattr(disk_folder, "write_entry", slow)


def test_what_waits_is_bounded_and_reading_does_not_wait_for_it(tmp_path: Path, monkeypatch) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    host.fill(0, 0, 0)
    tier.store(key_of(0), {0: 0})
    results(tier, 1)
    gate = Gate(monkeypatch)
    monkeypatch.setattr(disk_tier, "MAX_STORES", 3)
    assert [tier.store(key_of(n), {0: n}) for n in (0, 1, 1, 2, 3, 4)] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    assert tier.num_dropped == 3 and not tier.wants(key_of(5), 1)
    assert gate.reached.wait(10)
    job = tier.fetch([(key_of(0), {0: 9})])
    assert results(tier, 1) == [Fetched(job, (1,))] and host.holds(0, 9, 0)
    gate.open.set()
    assert {each.ok for each in results(tier, 3)} == {True}
    assert tier.wants(key_of(4), 1) and not tier.wants(key_of(1), 1)
    tier.close()


def test_doubtful_blocks_are_not_kept_not_even_the_one_being_written(tmp_path: Path, monkeypatch) -> None:
    host = Host()
    gate = Gate(monkeypatch)
    tier = open_tier(tmp_path, host)
    for number in range(3):
        tier.store(key_of(number), {0: number})
    assert gate.reached.wait(10)
    tier.forget_stores()
    gate.open.set()
    assert results(tier, 3) == [Stored(key_of(n), False) for n in range(3)]
    assert tier.folder.num_entries == 0 and not list(tmp_path.glob("parts/*"))
    assert tier.store(key_of(0), {0: 0}) and results(tier, 1) == [Stored(key_of(0), True)]
    tier.close()


def test_a_store_reads_the_memory_that_it_was_given(tmp_path: Path, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    host = Host()
    tier = open_tier(tmp_path, host)
    for number in range(2):
        host.fill(0, number, number)
        tier.store(key_of(number), {0: number})
    assert gate.reached.wait(10)
    host.arenas = Host().arenas  # the stage was lost and came back empty
    gate.open.set()
    results(tier, 2)
    job = tier.fetch([(key_of(n), {0: n}) for n in range(2)])
    assert results(tier, 1) == [Fetched(job, (1, 1))] and host.holds(0, 1, 1)
    tier.close()


def test_a_cancelled_job_is_reported_and_what_had_not_begun_is_a_miss(tmp_path: Path, monkeypatch) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    for number in range(8):
        host.fill(0, number, number)
        tier.store(key_of(number), {0: number})
    results(tier, 8)
    reading, go_on = threading.Semaphore(0), threading.Event()
    read = disk_folder.read_entry

    def slow(*args) -> None:
        reading.release()
        assert go_on.wait(10)
        read(*args)

    monkeypatch.setattr(disk_folder, "read_entry", slow)
    job = tier.fetch([(key_of(n), {0: 11}) for n in range(8)])
    for _ in range(disk_tier.READERS):
        assert reading.acquire(timeout=10)
    tier.cancel(job)
    assert tier.poll() == [] and not tier.wait(0)
    go_on.set()
    (fetched,) = results(tier, 1)
    assert isinstance(fetched, Fetched) and sum(fetched.masks) == disk_tier.READERS
    tier.close()


def test_whoever_waits_is_told(tmp_path: Path) -> None:
    told = threading.Event()
    tier = open_tier(tmp_path, Host(), on_done=told.set)
    assert not tier.wait(0) and not told.is_set()
    tier.store(key_of(0), {0: 0})
    assert told.wait(10) and tier.wait(10)
    tier.close()


def test_closing_writes_what_waits_but_not_for_ever(tmp_path: Path, monkeypatch) -> None:
    host = Host()
    tier = open_tier(tmp_path, host)
    for number in range(SLOTS):
        tier.store(key_of(number), {0: number})
    tier.close()
    tier = open_tier(tmp_path, host)
    assert all(tier.mask(key_of(n)) for n in range(SLOTS))

    gate = Gate(monkeypatch)
    tier.store(key_of(100), {0: 0})
    tier.store(key_of(101), {0: 0})
    assert gate.reached.wait(10)
    threading.Timer(0.2, gate.open.set).start()
    tier.close(seconds=0.01)
    assert not tier.mask(key_of(100)) and not tier.mask(key_of(101))


def test_a_full_disk_takes_nothing_for_a_while(tmp_path: Path, monkeypatch) -> None:
    def full(*args) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = open_tier(tmp_path, Host())
    monkeypatch.setattr(disk_folder, "write_entry", full)
    assert tier.store(key_of(0), {0: 0})
    assert results(tier, 1) == [Stored(key_of(0), False)]
    assert not tier.wants(key_of(1), 1) and not tier.store(key_of(1), {0: 1})
    tier.close()


def test_an_error_of_ours_ends_one_block_and_no_thread(tmp_path: Path, monkeypatch) -> None:
    def broken(*args) -> int:
        raise ZeroDivisionError

    tier = open_tier(tmp_path, Host())
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "write_entry", broken)
        tier.store(key_of(0), {0: 0})
        assert results(tier, 1) == [Stored(key_of(0), False)]
    assert tier.store(key_of(0), {0: 0}) and results(tier, 1) == [Stored(key_of(0), True)]
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "read_entry", broken)
        job = tier.fetch([(key_of(0), {0: 0})])
        assert results(tier, 1) == [Fetched(job, (0,))]
    tier.close()


def test_everything_at_once(tmp_path: Path) -> None:
    """Stores, fetches, doubts and cancellations in random order; what comes back is what was stored."""
    rng = random.Random(5)
    host = Host()
    tier = open_tier(tmp_path, host)
    slots, numbers = set(range(SLOTS)), {}  # free ones; what is in the hands of the tier
    deadline = time.monotonic() + 20
    seen = {"stored": 0, "fetched": 0}

    def take_in() -> None:
        for each in tier.poll():
            kind, number, slot = numbers.pop(each.key if isinstance(each, Stored) else each.job)
            seen[kind] += isinstance(each, Stored) and each.ok
            if isinstance(each, Fetched):
                for group in (0, 1):
                    if each.masks[0] >> group & 1:
                        seen[kind] += 1
                        assert host.holds(group, slot, number)
            slots.add(slot)

    for _ in range(600):
        take_in()
        assert time.monotonic() < deadline
        what, number = rng.choice(["store", "store", "fetch", "cancel", "doubt"]), rng.randrange(30)
        if what == "doubt" and rng.random() < 0.1:
            tier.forget_stores()
        if what == "cancel" and (jobs := [j for j in numbers if isinstance(j, int)]):
            tier.cancel(rng.choice(jobs))
        if what not in ("store", "fetch"):
            continue
        while not slots:
            assert tier.wait(10)
            take_in()
        slot = slots.pop()
        groups = rng.choice([(0,), (0, 1)])
        if what == "store":
            for group in groups:
                host.fill(group, slot, number)
            if tier.store(key_of(number), dict.fromkeys(groups, slot)):
                numbers[key_of(number)] = ("stored", number, slot)
            else:
                slots.add(slot)
        else:
            job = tier.fetch([(key_of(number), dict.fromkeys(groups, slot))])
            numbers[job] = ("fetched", number, slot)
        tier.check_invariants()
    while tier.num_pending:
        tier.wait(10)
        take_in()
    assert len(slots) == SLOTS and not numbers and min(seen.values()) > 10
    tier.close()


def test_what_was_of_use_stays_longer(tmp_path: Path) -> None:
    clock, host = Clock(), Host()
    tier = DiskTier(DiskFolder(tmp_path, 3 * DISK_BLOCK, MODEL, clock), 2, host.parts)
    for number in range(4):
        clock.now += 2 * TOUCH_SECONDS
        if number == 3:
            tier.touch([key_of(0)])
        assert tier.store(key_of(number), {0: number})
        assert results(tier, 1) == [Stored(key_of(number), True)]
    assert [tier.mask(key_of(n)) for n in range(4)] == [1, 0, 1, 1]
    tier.close()
