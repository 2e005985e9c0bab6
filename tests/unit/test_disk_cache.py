"""The disk tier as the scheduler sees it: what is fetched, who waits for it and how long, what is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from host_world import SIZE, A, B, World

from hetero.kv.below import insert, let_go, reserve
from hetero.kv.costs import MIN_TOKENS
from hetero.kv.disk_cache import DiskCache
from hetero.kv.disk_entry import mask_of
from hetero.kv.disk_fetch import HOLD_SECONDS, MAX_LOOKS, DiskFetch
from hetero.kv.disk_tier import Fetched, Stored
from hetero.kv.prefix_tree import chain_key
from hetero.request import FinishReason, Request
from hetero.stats import DiskStats

LONG = [k for k in range(8) for _ in range(SIZE)] + [9]  # eight blocks, and a token that is computed


class Disk:
    """What DiskTier does, when a test says so. It writes at once."""

    def __init__(self) -> None:
        self.folder = SimpleNamespace(is_paused=False)
        self.masks: dict[bytes, int] = {}
        self.jobs: list[list[tuple[bytes, Mapping[int, int]]]] = []
        self.cancelled: list[int] = []
        self.touched: list[bytes] = []
        self.full = False
        self.done: list[Stored | Fetched] = []

    def mask(self, key: bytes) -> int:
        return self.masks.get(key, 0)

    def wants(self, key: bytes, mask: int) -> bool:
        return not self.full and self.mask(key) & mask != mask

    def store(self, key: bytes, slots: Mapping[int, int]) -> bool:
        self.masks[key] = self.mask(key) | mask_of(slots)
        self.done.append(Stored(key, True))
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys

    def fetch(self, entries: Sequence[tuple[bytes, Mapping[int, int]]]) -> int:
        self.jobs.append(list(entries))
        return len(self.jobs) - 1

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)

    def end(self, job: int, found: bool = True) -> None:
        masks = tuple(mask_of(slots) if found else 0 for _, slots in self.jobs[job])
        self.done.append(Fetched(job, masks))

    def poll(self) -> list[Stored | Fetched]:
        done, self.done = self.done, []
        return done

    def forget_stores(self) -> None:
        return

    def stats(self) -> DiskStats:
        return DiskStats()

    def check_invariants(self) -> None:
        return


class DiskWorld(World):
    """A World with such a disk, and a clock for those who wait."""

    def __init__(self, blocks: int, slots: int):
        super().__init__(blocks, slots)
        self.disk, self.now = Disk(), 0.0
        self.cache = DiskCache(self.kv, self.disk)  # type: ignore[arg-type]
        self.cache._fetch = DiskFetch(self.kv, self.disk, lambda: self.now)  # type: ignore[arg-type]
        self.kv.below = self.cache

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        keys, key = [], self.kv.tree.key(self.kv.tree.root)
        for i in range(len(tokens) // SIZE):
            key = chain_key(key, tuple(tokens[i * SIZE : (i + 1) * SIZE]))
            keys.append(key)
        return keys

    def on_disk(self, tokens: Sequence[int]) -> list[bool]:
        return [key in self.disk.masks for key in self.keys(tokens)]

    def put_on_disk(self, tokens: Sequence[int]) -> None:
        self.disk.masks |= dict.fromkeys(self.keys(tokens), 1)

    def run(self) -> None:
        """Until there is nothing to do."""
        while (step := self.s.schedule()) is not None:
            self.steps.append(step)
            self.end(step)
            self.cache.check_invariants()

    def held(self, tokens: Sequence[int]) -> Request:
        request = self.add(list(tokens))
        assert self.s.held == [request] and self.s.schedule() is None
        return request


def test_what_the_disk_has_is_fetched_and_loaded() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    request = world.held(A)
    other = world.put(B)
    assert other.finish_reason is not None and request.finish_reason is None, "only one waits"
    assert [key for key, _ in world.disk.jobs[0]] == world.keys(A)
    world.disk.end(0)
    world.run()
    assert request.tier_tokens == {"disk": 16} and request.finish_reason is FinishReason.LENGTH
    assert world.put(A).num_cached_tokens == 16 and len(world.disk.jobs) == 1


def test_a_single_block_is_computed() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A[:SIZE])
    assert world.put(A).num_cached_tokens == 0 and not world.disk.jobs


def test_of_those_that_wait_for_a_job_the_last_to_leave_cancels_it() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    first, second = world.held(A), world.add(A)
    assert world.s.held == [first, second] and len(world.disk.jobs) == 1
    world.s.abort(first.request_id)
    assert world.disk.cancelled == []
    world.s.abort(second.request_id)
    assert world.disk.cancelled == [0] and world.s.held == []
    world.disk.end(0, found=False)
    world.run()
    assert world.kv.host.slots[0].num_free == 8


def test_nobody_waits_for_ever() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    request = world.held(A)
    world.now += HOLD_SECONDS
    assert world.s.schedule() is None
    world.now += 1
    world.run()
    assert request.finish_reason is FinishReason.LENGTH and request.num_cached_tokens == 0
    assert world.disk.cancelled == [0]


def test_misses_are_looked_for_a_few_times() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    request = world.held(A)
    for job in range(MAX_LOOKS):
        assert world.s.held == [request] and len(world.disk.jobs) == job + 1
        world.disk.end(job, found=False)
        world.run()
    assert request.finish_reason is FinishReason.LENGTH and request.num_cached_tokens == 0
    assert len(world.disk.jobs) == MAX_LOOKS


def test_the_beginning_does_not_go_for_what_follows() -> None:
    """Two of eight blocks are in host memory, which has room for six: half of the prompt is fetched."""
    world = DiskWorld(blocks=12, slots=6)
    parent = world.kv.tree.root
    for i in range(2):
        slots = reserve(world.kv, [0])
        assert slots is not None
        node = insert(world.kv, parent, tuple(LONG[i * SIZE : (i + 1) * SIZE]), slots)
        assert node is not None
        let_go(world.kv, slots)
        parent = node
    world.put_on_disk(LONG)
    request = world.held(LONG)
    assert [key for key, _ in world.disk.jobs[0]] == world.keys(LONG)[2:4]
    world.disk.end(0)
    world.run()
    assert request.num_cached_tokens == 16 and request.finish_reason is FinishReason.LENGTH


def test_a_slow_disk_is_not_asked_for_a_while() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    world.held(A)
    world.now += 5.0
    world.disk.end(0)
    world.run()
    world.kv.clear_cache()
    world.kv.host.costs.observe(0, 0, MIN_TOKENS, 0.1 * MIN_TOKENS)
    refused = 0
    while not world.s.held and refused < 100:  # four seconds, against less than two for computing it
        request = world.add(A)
        world.run()
        refused += request.finish_reason is not None
        world.kv.clear_cache()
    assert 10 < refused < 30 and len(world.disk.jobs) == 2


def test_after_a_failure_what_is_being_fetched_is_thrown_away() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put_on_disk(A)
    request = world.held(A)
    world.kv.clear_cache()
    assert world.disk.cancelled == [0]
    world.disk.end(0)
    world.run()
    assert request.finish_reason is FinishReason.LENGTH and request.num_cached_tokens == 0
    assert world.put(A).num_cached_tokens == 16, "it is in memory now"


# -- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_whatever_ends_goes_to_the_disk_through_however_few_slots(slots: int) -> None:
    world = DiskWorld(blocks=8, slots=slots)
    world.put(A)
    assert world.cache.has_more and world.cache.stats().waiting > 0
    world.run()
    assert world.on_disk(A) == [True] * 4
    assert world.moves()[0] == 4 and world.cache.stats().waiting == 0 and not world.cache.has_more
    world.put([*A[:8], 8, 8])
    world.run()
    assert world.moves()[0] == 4, "what the disk has is not copied again"
    assert world.disk.touched == world.keys(A)[:2]


def test_while_the_disk_takes_nothing_nothing_is_copied() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.disk.full = True
    world.put(A)
    world.run()
    assert world.moves() == (0, 0) and world.cache.has_more and not world.cache.has_work
    world.disk.folder.is_paused = True
    assert not world.cache.has_more
    world.disk.folder.is_paused = world.disk.full = False
    world.put(B)
    world.run()
    assert all(world.on_disk(A) + world.on_disk(B))


def test_after_a_failure_nothing_is_written() -> None:
    world = DiskWorld(blocks=8, slots=8)
    world.put(A)
    world.kv.clear_cache()
    world.run()
    assert not world.disk.masks and world.moves() == (0, 0)
