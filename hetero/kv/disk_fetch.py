"""A new request waits while the disk has more of its prompt than memory has.

    prompt      | 0  1  2  3  4  5  6 ...        blocks
    in memory   | x  x  x
    on the disk | x  x     x  x  x               fetched: 3, 4, 5, into slots in host memory

What was fetched enters the tree as nodes that have slots only, from where requests load it like all that is
in host memory. Only the request waits: steps go on. Others that lack the same blocks wait for the same job.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero.kv.below import insert, let_go, reserve
from hetero.kv.disk_entry import groups_of
from hetero.kv.disk_tier import DiskTier, Fetched
from hetero.kv.prefix_tree import Node, Tokens, chain_key
from hetero.request import Request

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager

MIN_BLOCKS = 2  # fewer are computed in the time that it takes to wait
HOLD_SECONDS = 10.0  # after which a request is computed, whatever the disk is doing
BYTE_SECONDS = 1e-9  # until something was fetched
MEMORY = 0.8  # of what was measured before counts with each new measurement
DOUBT = 0.95  # a refusal makes the disk this much faster: after a slow spell it is tried again
MAX_LOOKS = 3  # of one request


@dataclass(slots=True)
class _Place:
    """A block of a prompt: which groups are in memory, and which on the disk."""

    tokens: Tokens
    key: bytes
    node: Node | None
    here: int
    there: int


@dataclass(slots=True)
class _Job:
    scope: str
    places: list[_Place]
    fetched: list[tuple[int, dict[int, int]]]  # number of the place, slot by group: pinned, nobody's
    nbytes: int
    started: float
    void: bool = False  # nothing that is cached is trusted any more
    waiting: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Held:
    request: Request
    job: int
    until: float
    looks: int = 1


class DiskFetch:
    """Requests that wait for the disk. For the scheduler's thread."""

    def __init__(self, kv: KVManager, tier: DiskTier, clock: Callable[[], float] = time.monotonic):
        self.kv, self.tier, self._clock = kv, tier, clock
        self._held: dict[str, _Held] = {}
        self._ready: list[Request] = []
        self._jobs: dict[int, _Job] = {}
        self._fetching: dict[bytes, int] = {}  # first key of a job
        self._always = sum(1 << g for g, group in enumerate(kv.groups) if group.window is None)
        self._measured = (1.0, BYTE_SECONDS)  # bytes, seconds

    @property
    def held(self) -> list[Request]:
        return [held.request for held in self._held.values()]

    def hold(self, request: Request) -> bool:
        """Whether a new request should wait, and if so begin to fetch what it waits for."""
        job = self._look(request)
        if job is None:
            return False
        self._held[request.request_id] = _Held(request, job, self._clock() + HOLD_SECONDS)
        self._jobs[job].waiting.add(request.request_id)
        return True

    def cancel(self, request_id: str) -> Request | None:
        """Hold a request no longer; None when it is not held."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        job = self._jobs.get(held.job)
        if job is not None:
            job.waiting.discard(request_id)
            if not job.waiting:
                self.tier.cancel(held.job)
        return held.request

    def release(self) -> list[Request]:
        """The requests that need not wait any longer, in their order of arrival."""
        now = self._clock()
        for held in [h for h in self._held.values() if h.until < now]:
            self.cancel(held.request.request_id)
            self._ready.append(held.request)
        ready, self._ready = self._ready, []
        return ready

    def done(self, results: Iterable[Fetched]) -> None:
        """Take in what was fetched."""
        for result in results:
            job = self._jobs.pop(result.job)
            self._fetching = {key: number for key, number in self._fetching.items() if number != result.job}
            self._enter(job, result.masks)
            if not job.void and any(result.masks):
                nbytes, seconds = self._measured
                took = self._clock() - job.started
                self._measured = nbytes * MEMORY + job.nbytes, seconds * MEMORY + took
            for held in [h for h in self._held.values() if h.request.request_id in job.waiting]:
                self._go_on(held, job.void)

    def _go_on(self, held: _Held, void: bool) -> None:
        """Another may have been faster with the first blocks: then there may be more to fetch."""
        again = None if void or held.looks >= MAX_LOOKS else self._look(held.request)
        if again is None:
            del self._held[held.request.request_id]
            self._ready.append(held.request)
        else:
            held.job, held.looks = again, held.looks + 1
            self._jobs[again].waiting.add(held.request.request_id)

    def forget(self) -> None:
        """Nothing that is cached is trusted: what is being fetched is thrown away when it comes."""
        for number, job in self._jobs.items():
            job.void = True
            self.tier.cancel(number)
        self._fetching.clear()

    # -- looking -------------------------------------------------------------------------------------

    def _look(self, request: Request) -> int | None:
        """A job that fetches what memory lacks, new or under way; None when nothing is worth fetching."""
        places = self._walk(request)
        ends = self._ends(places)
        if not ends:
            return None
        here, usable = ends
        pinned = self._pin(places)
        try:
            for end in usable:
                wanted = self._wanted(places, end)
                if not wanted or not self._is_worth_it(end - here, wanted):
                    return None
                first = places[wanted[0][0]].key
                if first in self._fetching:
                    return self._fetching[first]
                slots = self._reserve(wanted)
                if slots is not None:
                    return self._fetch(request, places[:end], slots)
            return None
        finally:
            for g, slot in pinned:
                self.kv.host.slots[g].unpin(slot)

    def _walk(self, request: Request) -> list[_Place]:
        kv, size = self.kv, self.kv.block_size
        node: Node | None = kv.tree.root_of(request.cache_scope)
        assert node is not None
        key = kv.tree.key(node)
        places: list[_Place] = []
        for i in range((request.num_tokens - 1) // size):
            tokens = tuple(request.token_ids(i * size, (i + 1) * size))
            node = node.children.get(tokens) if node is not None else None
            here = 0
            if node is None:
                key = chain_key(key, tokens)
            else:
                key = kv.tree.key(node)
                for g, (block, slot) in enumerate(zip(node.blocks, node.slots, strict=True)):
                    here |= (block is not None or slot is not None) << g
            there = self.tier.mask(key)
            if (here | there) & self._always != self._always or not here | there:
                break
            places.append(_Place(tokens, key, node, here, there))
        return places

    def _ends(self, places: Sequence[_Place]) -> tuple[int, list[int]] | None:
        """How many blocks are usable as it is, and greater numbers with what is on the disk, descending."""
        kv = self.kv
        here, usable = 0, []
        now, then = [0] * len(kv.groups), [0] * len(kv.groups)  # where unbroken runs up to here begin
        for i, place in enumerate(places, 1):
            for g in range(len(kv.groups)):
                if not place.here >> g & 1:
                    now[g] = i
                if not (place.here | place.there) >> g & 1:
                    then[g] = i
            if kv.covers(now, i * kv.block_size):
                here = i
            if kv.covers(then, i * kv.block_size):
                usable.append(i)
        usable = [end for end in usable if end >= here + MIN_BLOCKS]
        return (here, self._that_fit(places, usable)) if usable else None

    def _that_fit(self, places: Sequence[_Place], usable: Sequence[int]) -> list[int]:
        """Of these numbers of blocks the greatest for which there are slots, then some to fall back on."""
        pools, sums = self.kv.host.slots, []
        for g in range(len(pools)):
            missing = (not place.here >> g & 1 for place in places)
            sums.append([0, *itertools.accumulate(missing)])
        fitting: list[int] = []
        for end in reversed(usable):
            needs = [s[end] - s[self._first(g, end)] for g, s in enumerate(sums)]
            fits = all(need <= pool.num_slots for need, pool in zip(needs, pools, strict=True))
            if fits and (not fitting or end <= fitting[-1] // 2):
                fitting.append(end)
        return fitting

    def _first(self, g: int, end: int) -> int:
        """The first block that is attended in group g from block `end` on."""
        return self.kv.groups[g].first_needed(end * self.kv.block_size) // self.kv.block_size

    def _wanted(self, places: Sequence[_Place], end: int) -> list[tuple[int, list[int]]]:
        """Of the first `end` blocks, the numbers and groups that are to be fetched."""
        firsts = [self._first(g, end) for g in range(len(self.kv.groups))]
        wanted = []
        for i, place in enumerate(places[:end]):
            groups = [g for g in groups_of(place.there & ~place.here) if i >= firsts[g]]
            if groups:
                wanted.append((i, groups))
        return wanted

    def _is_worth_it(self, blocks: int, wanted: Sequence[tuple[int, list[int]]]) -> bool:
        costs, (nbytes, seconds) = self.kv.host.costs, self._measured
        gain = costs.gain(blocks * self.kv.block_size, needed := self._bytes(wanted))
        if costs.is_guess or needed * seconds / nbytes < gain:
            return True
        self._measured = nbytes, seconds * DOUBT
        return False

    def _bytes(self, wanted: Iterable[tuple[int, Iterable[int]]]) -> int:
        return sum(self.kv.host.block_bytes[g] for _, groups in wanted for g in groups)

    def _pin(self, places: Sequence[_Place]) -> list[tuple[int, int]]:
        """Keep what is there already, while room is made for the rest."""
        pinned = []
        for place in places:
            if place.node is not None:
                for g, slot in enumerate(place.node.slots):
                    if slot is not None:
                        self.kv.host.slots[g].pin(slot)
                        pinned.append((g, slot))
        return pinned

    def _reserve(self, wanted: Sequence[tuple[int, list[int]]]) -> list[tuple[int, dict[int, int]]] | None:
        taken: list[tuple[int, dict[int, int]]] = []
        for i, groups in wanted:
            slots = reserve(self.kv, groups)
            if slots is None:
                for _, before in taken:
                    let_go(self.kv, before)
                return None
            taken.append((i, slots))
        return taken

    def _fetch(self, request: Request, places: list[_Place], taken: list[tuple[int, dict[int, int]]]) -> int:
        number = self.tier.fetch([(places[i].key, slots) for i, slots in taken])
        nbytes = self._bytes(taken)
        self._jobs[number] = _Job(request.cache_scope, places, taken, nbytes, self._clock())
        self._fetching[places[taken[0][0]].key] = number
        return number

    # -- taking in -----------------------------------------------------------------------------------

    def _enter(self, job: _Job, masks: Sequence[int]) -> None:
        """Give nodes what was fetched for them, as far as an unbroken path of nodes leads to them."""
        found = {i: (slots, mask) for (i, slots), mask in zip(job.fetched, masks, strict=True)}
        node: Node | None = None if job.void else self.kv.tree.root_of(job.scope)
        for i, place in enumerate(job.places):
            slots, mask = found.get(i, ({}, 0))
            good = {g: slot for g, slot in slots.items() if mask >> g & 1}
            if node is not None and good:
                node = insert(self.kv, node, place.tokens, good)
            elif node is not None:
                node = node.children.get(place.tokens)
            let_go(self.kv, slots)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each held request waits for a job, and jobs have their slots pinned."""
        for held in self._held.values():
            assert held.request.request_id in self._jobs[held.job].waiting
        for job in self._jobs.values():
            for _, slots in job.fetched:
                for g, slot in slots.items():
                    pool = self.kv.host.slots[g]
                    assert pool.pins[slot] > 0 and pool.owner(slot) is None


__all__ = ["DiskFetch"]
