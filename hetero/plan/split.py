"""Which consecutive layers go to which device: dynamic programming over sets of devices and layers placed.

Pure: seconds and bytes in, a split and its reasons out. A stage's seconds are those of one step of
one micro-batch. With stages of seconds t, their sum S = sum(t) and the slowest B = max(t), `n`
requests in `m` micro-batches (m steps in flight) get one token each in a cycle of

    C = max(S, m * B)        the first micro-batch is back, and the slowest stage has served all m

and an objective is seconds per token, (w * C + (1 - w) * S) / n, with

    throughput   w = 1
    latency      w = 0, at n = 1: one request alone
    balanced     w = 1 - 1 / m: what waits for the slowest stage is m - 1 of m micro-batches, so one
                 request (m = 1) asks for the least sum, and many for the least bottleneck

`capacity` is the caller's: he looks for the most KV tokens that can be placed, then asks for throughput.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

SLACK = 1e-3  # a split is at most this share worse than the best one
TIE = 1e-6  # weight of the sum where only the bottleneck counts: of equals, the quicker for one request


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step of one micro-batch on each of D devices.

    `layers` float64 [D, L]. `first` (embedding) and `last` (output head), `enter` (taking in rows of
    the stage before) and `leave` (handing rows on): float64 [D].
    """

    layers: np.ndarray
    first: np.ndarray
    last: np.ndarray
    enter: np.ndarray
    leave: np.ndarray


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a stage needs, and those there are.

    `layers` int64 [L]: weights and KV of a layer. `first`, `last`: on top of that at the ends.
    `fixed`, `limits` int64 [D]: of any stage on a device, and what may be used there. Devices with the
    same number in `pools` share one memory; the largest of their limits is that of all together. No part can
    begin behind layer `last_cut` (None: anywhere).
    """

    layers: np.ndarray
    first: int
    last: int
    fixed: np.ndarray
    limits: np.ndarray
    pools: tuple[int, ...]
    last_cut: int | None = None

    @property
    def pieces(self) -> int:
        """The most parts into which the layers can be cut."""
        return len(self.layers) if self.last_cut is None else self.last_cut + 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What is minimised (see the module). `depth`: steps in flight, 0 for as many as stages."""

    objective: str
    requests: int
    depth: int = 0

    def micro_batches(self, stages: int) -> int:
        return max(1, min(self.depth or stages, self.requests))

    def batch(self, stages: int) -> int:
        """Requests in a micro-batch, when all are busy."""
        return -(-self.requests // self.micro_batches(stages))

    def score(self, stages: int, slowest: float, total: float) -> float:
        """Seconds per token. Grows with both arguments."""
        m = self.micro_batches(stages)
        weight = {"latency": 0.0, "balanced": 1.0 - 1.0 / m}.get(self.objective, 1.0 - TIE)
        return (weight * max(total, m * slowest) + (1.0 - weight) * total) / self.requests


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [first, last) on device `device`."""

    device: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Split:
    """Parts in stage order, the seconds of each, and the score (seconds per token) of the whole."""

    parts: tuple[Part, ...]
    seconds: tuple[float, ...]
    score: float

    @property
    def slowest(self) -> float:
        return max(self.seconds)

    @property
    def total(self) -> float:
        return sum(self.seconds)


CostsOf = Callable[[int], Costs]  # by the number of stages: micro-batches shrink as stages are added


def best_split(costs: CostsOf, memory: Memory, goal: Goal, ordered: bool) -> Split | None:
    """The split with the least score, within SLACK; None when nothing fits.

    `ordered`: every device takes part, in the order given. Else the order is free and a device may be
    left out. Where several devices share a memory that binds, the search is no longer exhaustive: it
    tries some ways to divide that memory.
    """
    found = _search(costs, memory, goal, ordered)
    if found is None:
        return None
    candidates = [found]
    if overfull(found.parts, memory):
        for limits in _divisions(memory, found.parts):
            other = _search(costs, replace(memory, limits=limits), goal, ordered)
            if other is not None:
                candidates.append(other)
    if len(memory.limits) <= memory.pieces:
        for parts in (even_split(memory), memory_split(memory)):
            candidates.append(rate(parts, costs, goal))
    fitting = [c for c in candidates if not overfull(c.parts, memory)]
    return min(fitting, key=lambda c: c.score, default=None)


def can_place(memory: Memory, ordered: bool) -> bool:
    """Whether some split fits; quicker than finding the best."""
    devices, layers = len(memory.limits), len(memory.layers)
    if len(set(memory.pools)) == devices:  # then one sweep over all sets of devices can tell
        most = min(devices, memory.pieces)
        if ordered and devices > memory.pieces:
            return False
        width = np.tri(layers + 1, dtype=bool)
        return _Sweep(np.where(_fits(memory) & ~width, 0.0, np.inf), most, ordered).feasible()
    zero = np.zeros(devices)
    nothing = Costs(np.zeros((devices, layers)), zero, zero, zero, zero)
    return best_split(lambda stages: nothing, memory, Goal("latency", 1), ordered) is not None


def rate(parts: Sequence[Part], costs: CostsOf, goal: Goal) -> Split:
    """A given split, with its seconds and its score."""
    seconds = stage_seconds(parts, costs(len(parts)))
    return Split(tuple(parts), seconds, goal.score(len(parts), max(seconds), sum(seconds)))


def stage_seconds(parts: Sequence[Part], costs: Costs) -> tuple[float, ...]:
    """Seconds of each part in a step."""
    table = _table(costs)
    return tuple(float(table[p.device, p.first, p.last]) for p in parts)


def stage_bytes(parts: Sequence[Part], memory: Memory) -> tuple[int, ...]:
    """Bytes that each part needs on its device."""
    last = len(memory.layers)
    return tuple(
        int(memory.layers[p.first : p.last].sum())
        + int(memory.fixed[p.device])
        + (memory.first if p.first == 0 else 0)
        + (memory.last if p.last == last else 0)
        for p in parts
    )


def overfull(parts: Sequence[Part], memory: Memory) -> dict[int, int]:
    """Bytes that are missing, by pool; empty when everything fits."""
    used: dict[int, int] = {}
    limit: dict[int, int] = {}
    missing: dict[int, int] = {}
    for part, nbytes in zip(parts, stage_bytes(parts, memory), strict=True):
        pool, own = memory.pools[part.device], int(memory.limits[part.device])
        used[pool] = used.get(pool, 0) + nbytes
        limit[pool] = max(limit.get(pool, 0), own)
        missing[pool] = max(missing.get(pool, 0), nbytes - own)
    missing = {pool: max(missing[pool], used[pool] - limit[pool]) for pool in used}
    return {pool: nbytes for pool, nbytes in missing.items() if nbytes > 0}


def parts_of(counts: Sequence[int]) -> tuple[Part, ...]:
    """Parts of the given layer counts, on the devices in order; a device with no layers has no part."""
    ends = list(itertools.accumulate(counts, initial=0))
    return tuple(Part(d, ends[d], ends[d + 1]) for d in range(len(counts)) if counts[d])


def even_split(memory: Memory) -> tuple[Part, ...]:
    """Equal numbers of layers, where these can be cut so; the first devices have the odd ones."""
    devices = len(memory.limits)
    share, rest = divmod(len(memory.layers), devices)
    return _cut_at([(d + 1) * share + min(d + 1, rest) for d in range(devices)], memory)


def memory_split(memory: Memory) -> tuple[Part, ...]:
    """Numbers of layers by the memory that each device offers (a shared one in equal parts), at least one."""
    members = [memory.pools.count(pool) for pool in memory.pools]
    weights = np.maximum(memory.limits / np.array(members), 1.0)
    ends = np.rint(np.cumsum(weights) / weights.sum() * len(memory.layers)).astype(int)
    return _cut_at(ends.tolist(), memory)


def _cut_at(ends: Sequence[int], memory: Memory) -> tuple[Part, ...]:
    """Parts that end near these layers: with one layer each at least, and where they can."""
    devices, cuts = min(len(ends), memory.pieces), [0]
    for d in range(devices - 1):
        cuts.append(min(max(ends[d], cuts[d] + 1), memory.pieces - (devices - 1 - d)))
    return parts_of(np.diff([*cuts, len(memory.layers)]).tolist())


def _table(costs: Costs) -> np.ndarray:
    """[D, L + 1, L + 1]: seconds of layers [i, j) on each device; inf where j <= i."""
    devices, layers = costs.layers.shape
    sums = np.concatenate([np.zeros((devices, 1)), np.cumsum(costs.layers, axis=1)], axis=1)
    table = sums[:, None, :] - sums[:, :, None]
    table[:, 0, :] += costs.first[:, None]
    table[:, 1:, :] += costs.enter[:, None, None]
    table[:, :, layers] += costs.last[:, None]
    table[:, :, :layers] += costs.leave[:, None, None]
    table[:, np.tri(layers + 1, dtype=bool)] = np.inf
    return table


def _fits(memory: Memory) -> np.ndarray:
    """bool [D, L + 1, L + 1]: whether layers [i, j) find room on each device."""
    layers = len(memory.layers)
    sums = np.concatenate([[0], np.cumsum(memory.layers)])
    need = sums[None, :] - sums[:, None]
    need[0, :] += memory.first
    need[:, layers] += memory.last
    fits = need[None] + memory.fixed[:, None, None] <= memory.limits[:, None, None]
    fits[:, :, memory.pieces : layers] = False  # where no other part can begin
    return fits


def _search(costs: CostsOf, memory: Memory, goal: Goal, ordered: bool) -> Split | None:
    """The best over all numbers of stages, where no two devices share a memory."""
    devices = len(memory.limits)
    fits = _fits(memory)
    best: Split | None = None
    for stages in range(devices if ordered else 1, min(devices, memory.pieces) + 1):
        table = np.where(fits, _table(costs(stages)), np.inf)
        best = _Sweep(table, stages, ordered).minimise(goal, best)
    return best


class _Sweep:
    """All ways to put the layers on exactly `stages` devices, by dynamic programming."""

    def __init__(self, table: np.ndarray, stages: int, ordered: bool):
        self._table, self._stages, self._ordered = table, stages, ordered
        devices = len(table)
        if ordered:
            self._masks = [(1 << s + 1) - 1 for s in range(stages)]
        else:
            self._masks = [m for m in range(1, 1 << devices) if m.bit_count() <= stages]
        self._ends = [m for m in self._masks if m.bit_count() == stages]

    def feasible(self) -> bool:
        """Whether the layers find room on so many devices, or on fewer where these may be left out."""
        best, _ = self._run(self._table, np.maximum)
        masks = self._ends if self._ordered else self._masks
        return any(np.isfinite(best[mask][-1]) for mask in masks)

    def minimise(self, goal: Goal, best: Split | None) -> Split | None:
        """The split with the least score, or `best` when none beats it by more than SLACK.

        Splits on the front of (bottleneck, sum) are found by the least sum under a bound on the
        bottleneck. An interval of bounds is halved as long as its lower corner could still win.
        """
        _, low = self._run(self._table, np.maximum)
        if not np.isfinite(low):
            return best
        quick = self._least_sum(np.inf)
        ends = [quick, self._least_sum(low)]
        scored = [Split(p, s, goal.score(self._stages, max(s), sum(s))) for p, s in ends]
        best = min([*scored, *([best] if best else [])], key=lambda split: split.score)
        open_intervals: list[tuple[float, float, float, float]] = []  # lower bound; bounds; least sum

        def add(lower: float, upper: float, least: float) -> None:
            if upper > lower * (1 + SLACK):
                bound = goal.score(self._stages, lower, least)
                heapq.heappush(open_intervals, (bound, lower, upper, least))

        add(low, max(quick[1]), sum(quick[1]))
        while open_intervals and open_intervals[0][0] < best.score * (1 - SLACK):
            _, lower, upper, least = heapq.heappop(open_intervals)
            middle = (lower * upper) ** 0.5 or upper / 2
            parts, seconds = self._least_sum(middle)
            split = Split(parts, seconds, goal.score(self._stages, max(seconds), sum(seconds)))
            best = min(best, split, key=lambda s: s.score)
            add(lower, max(seconds), sum(seconds))
            add(middle, upper, least)
        return best

    def _least_sum(self, bound: float) -> tuple[tuple[Part, ...], tuple[float, ...]]:
        """The parts, and their seconds, with the least sum where none takes more than `bound`."""
        table = np.where(self._table <= bound, self._table, np.inf)
        best, _ = self._run(table, np.add)
        mask, end = min(self._ends, key=lambda m: best[m][-1]), table.shape[1] - 1
        parts: list[Part] = []
        while mask:
            options = [(best[mask ^ 1 << d][:end] + table[d, :end, end], d) for d in self._last_of(mask)]
            sums, device = min(options, key=lambda option: option[0].min())
            start = int(sums.argmin())
            parts.append(Part(device, start, end))
            mask, end = mask ^ 1 << device, start
        parts.reverse()
        return tuple(parts), tuple(float(table[p.device, p.first, p.last]) for p in parts)

    def _run(self, table: np.ndarray, combine: np.ufunc) -> tuple[dict[int, np.ndarray], float]:
        """For each set of devices, the least value of placing the first l layers on them; and of all."""
        width = table.shape[1]
        start = np.full(width, np.inf)
        start[0] = 0.0
        best = {0: start}
        scratch = np.empty((width, width))
        for mask in self._masks:
            row = np.full(width, np.inf)
            for device in self._last_of(mask):
                combine(best[mask ^ 1 << device][:, None], table[device], out=scratch)
                np.minimum(row, scratch.min(axis=0), out=row)
            best[mask] = row
        return best, min(float(best[mask][-1]) for mask in self._ends)

    def _last_of(self, mask: int) -> Iterator[int]:
        """The devices of a set that can hold its last layers."""
        if self._ordered:
            yield mask.bit_length() - 1
            return
        for device in range(mask.bit_length()):
            if mask >> device & 1:
                yield device


def _divisions(memory: Memory, parts: Sequence[Part]) -> Iterator[np.ndarray]:
    """Limits that divide each shared memory among its devices: as `parts` use it, evenly, and unevenly."""
    used = dict(zip((p.device for p in parts), stage_bytes(parts, memory), strict=True))
    shared = [d for d in range(len(memory.pools)) if memory.pools.count(memory.pools[d]) > 1]

    def divided(weights: Sequence[float]) -> np.ndarray:
        limits = memory.limits.copy()
        for d in shared:
            whole = sum(weights[e] for e in shared if memory.pools[e] == memory.pools[d])
            limits[d] = int(memory.limits[d] * weights[d] / whole) if whole else 0
        return limits

    count = len(memory.pools)
    yield divided([used.get(d, 0) for d in range(count)])
    yield divided([1.0] * count)
    for favourite in shared:
        for weight in (3.0, 9.0, 1e12):
            yield divided([weight if d == favourite else 1.0 for d in range(count)])


__all__ = [
    "Costs",
    "Goal",
    "Memory",
    "Part",
    "Split",
    "best_split",
    "can_place",
    "even_split",
    "memory_split",
    "overfull",
    "parts_of",
    "rate",
    "stage_bytes",
    "stage_seconds",
]
