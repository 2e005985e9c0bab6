"""The split of layers: always whole and within memory, and the best there is by its own model."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero.plan.split import (
    SLACK,
    Costs,
    Goal,
    Memory,
    Part,
    best_split,
    can_place,
    even_split,
    memory_split,
    overfull,
    parts_of,
    rate,
    stage_bytes,
    stage_seconds,
)

OBJECTIVES = ("latency", "throughput", "balanced")
TOLERANCE = 1 + 2 * SLACK


def make_costs(layers: np.ndarray, ends: np.ndarray) -> Costs:
    return Costs(layers, *ends)


@st.composite
def problems(draw, most_devices: int, most_layers: int, pooled: bool = False):
    """(costs by number of stages, memory, goal, ordered): unequal layers and devices, tight memory."""
    d, n = draw(st.integers(1, most_devices)), draw(st.integers(1, most_layers))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    speed = rng.choice([1.0, 2.0, 5.0, 20.0], d)[:, None]
    shape = rng.uniform(0.5, 1.5, n) if draw(st.booleans()) else np.ones(n)
    base = make_costs(speed * shape, rng.uniform(0, 3, (4, d)) * speed[:, 0])
    fixed_part = draw(st.sampled_from([0.0, 0.5, 1.0]))  # of a step, whatever its batch

    def costs(stages: int) -> Costs:
        scale = fixed_part + (1 - fixed_part) / stages
        return Costs(*(scale * a for a in (base.layers, base.first, base.last, base.enter, base.leave)))

    sizes = rng.integers(1, 20, n)
    tight = draw(st.sampled_from([0.5, 1.2, 10.0]))
    room = (rng.uniform(0.3, 2.0, d) * tight * sizes.sum() / d).astype(int) + 5
    pools = tuple(range(d))
    if pooled:
        pools = tuple(int(p) for p in rng.integers(0, 2, d))
        room = 2 * np.resize(room, 2)[list(pools)]
    memory = Memory(
        sizes, int(rng.integers(0, 5)), int(rng.integers(0, 9)), rng.integers(0, 4, d), room, pools
    )
    if draw(st.booleans()):
        memory = replace(memory, last_cut=draw(st.integers(0, n - 1)))
    goal = Goal(draw(st.sampled_from(OBJECTIVES)), draw(st.integers(1, 9)), draw(st.integers(0, 3)))
    return costs, memory, goal, draw(st.booleans())


def all_splits(memory: Memory, ordered: bool):
    """Every way to put the layers on devices, by brute force."""
    devices, layers = len(memory.limits), len(memory.layers)
    for count in range(devices if ordered else 1, min(devices, layers) + 1):
        orders = [tuple(range(devices))] if ordered else itertools.permutations(range(devices), count)
        for order in orders:
            for inner in itertools.combinations(range(1, layers), count - 1):
                ends = [0, *inner, layers]
                if memory.last_cut is None or ends[-2] <= memory.last_cut:
                    yield tuple(Part(d, ends[i], ends[i + 1]) for i, d in enumerate(order))


def check(split, memory: Memory, ordered: bool) -> None:
    layers = len(memory.layers)
    assert [i for p in split.parts for i in range(p.first, p.last)] == list(range(layers))
    assert all(p.first < p.last for p in split.parts)
    assert memory.last_cut is None or split.parts[-1].first <= memory.last_cut
    devices = [p.device for p in split.parts]
    assert len(set(devices)) == len(devices)
    if ordered:
        assert devices == list(range(len(memory.limits)))
    assert overfull(split.parts, memory) == {}


@settings(max_examples=150, deadline=None)
@given(problems(4, 7))
def test_the_best_split_is_that_of_brute_force(problem):
    costs, memory, goal, ordered = problem
    fitting = [p for p in all_splits(memory, ordered) if not overfull(p, memory)]
    split = best_split(costs, memory, goal, ordered)
    assert can_place(memory, ordered) == bool(fitting)
    if not fitting:
        assert split is None
        return
    check(split, memory, ordered)
    best = min(rate(p, costs, goal).score for p in fitting)
    assert split.score <= best * TOLERANCE
    assert split.seconds == pytest.approx(stage_seconds(split.parts, costs(len(split.parts))))


@settings(max_examples=80, deadline=None)
@given(problems(6, 40, pooled=True))
def test_shared_memories_are_never_overfull(problem):
    costs, memory, goal, ordered = problem
    split = best_split(costs, memory, goal, ordered)
    if split is not None:
        check(split, memory, ordered)


@settings(max_examples=80, deadline=None)
@given(problems(6, 40, pooled=True))
def test_never_worse_than_the_even_split_or_the_one_by_memory(problem):
    costs, memory, goal, ordered = problem
    devices, layers = len(memory.limits), len(memory.layers)
    assume(devices <= memory.pieces)
    split = best_split(costs, memory, goal, ordered)
    for parts in (even_split(memory), memory_split(memory)):
        assert memory.last_cut is None or parts[-1].first <= memory.last_cut
        assert [p.device for p in parts] == list(range(devices))
        assert parts[0].first == 0 and parts[-1].last == layers
        if not overfull(parts, memory):
            assert split is not None and split.score <= rate(parts, costs, goal).score


@settings(max_examples=60, deadline=None)
@given(problems(5, 20), st.integers(0, 4), st.floats(0.1, 1.0))
def test_a_faster_device_never_makes_it_slower(problem, device: int, factor: float):
    costs, memory, goal, ordered = problem
    device %= len(memory.limits)

    def faster(stages: int) -> Costs:
        scale = np.ones(len(memory.limits))
        scale[device] = factor
        c = costs(stages)
        return Costs(
            c.layers * scale[:, None], c.first * scale, c.last * scale, c.enter * scale, c.leave * scale
        )

    before, after = (best_split(c, memory, goal, ordered) for c in (costs, faster))
    assert (before is None) == (after is None)
    assert before is None or after.score <= before.score * TOLERANCE


@settings(max_examples=60, deadline=None)
@given(problems(5, 20), st.integers(0, 4), st.integers(1, 100))
def test_more_memory_never_makes_it_slower(problem, device: int, more: int):
    costs, memory, goal, ordered = problem
    limits = memory.limits.copy()
    limits[device % len(limits)] += more
    before = best_split(costs, memory, goal, ordered)
    after = best_split(costs, replace(memory, limits=limits), goal, ordered)
    if before is not None:
        assert after is not None and after.score <= before.score * TOLERANCE


def two_devices(second: float, last: tuple[float, float], leave: float, goal: Goal):
    """Costs of 12 layers in proportion to the batch: 1 each on the first device, `second` on the other."""
    zero = np.zeros(2)

    def costs(stages: int) -> Costs:
        share = goal.batch(stages) / goal.requests
        layers = share * np.array([[1.0] * 12, [second] * 12])
        return Costs(layers, zero, share * np.array(last), zero, np.array([leave, leave]))

    return costs


def test_a_slow_device_gets_fewer_layers_and_may_be_left_out():
    memory = Memory(np.ones(12, int), 0, 0, np.zeros(2, int), np.array([100, 100]), (0, 1))

    def parts(objective: str, requests: int, ordered: bool):
        goal = Goal(objective, requests)
        return best_split(two_devices(3.0, (2.0, 6.0), 0.0, goal), memory, goal, ordered).parts

    assert parts("throughput", 8, True) == (Part(0, 0, 11), Part(1, 11, 12))  # 11 and 3 + 6
    assert parts("latency", 1, False) == (Part(0, 0, 12),)
    assert parts("throughput", 8, False) == (Part(1, 0, 3), Part(0, 3, 12))  # 9, and 9 + 2 with the head


def test_balanced_lies_between_latency_and_throughput():
    """One request alone asks for the least sum, many for the least bottleneck."""
    memory = Memory(np.ones(12, int), 0, 0, np.zeros(2, int), np.array([100, 100]), (0, 1))

    def split(objective: str, requests: int, ordered: bool):
        goal = Goal(objective, requests)
        return best_split(two_devices(1.5, (0.0, 0.0), 0.6, goal), memory, goal, ordered)

    assert len(split("balanced", 1, False).parts) == 1
    assert len(split("balanced", 64, False).parts) == 2
    totals = [split(name, 64, True).total for name in ("throughput", "balanced", "latency")]
    assert totals == sorted(totals, reverse=True)


def test_what_costs_nothing_ends_the_search_too():
    """A bound of no seconds at all cannot be approached by halving ratios."""
    zero = np.zeros(2)
    costs = Costs(np.array([[0.0] * 6, [1.0] * 6]), zero, np.array([5.0, 0.0]), zero, zero)
    memory = Memory(np.ones(6, int), 0, 0, np.zeros(2, int), np.array([100, 100]), (0, 1))
    split = best_split(lambda stages: costs, memory, Goal("balanced", 2), False)
    assert split.parts == (Part(0, 0, 5), Part(1, 5, 6)) and split.seconds == (0.0, 1.0)
    nothing = Costs(np.zeros((2, 6)), zero, zero, zero, zero)
    assert best_split(lambda stages: nothing, memory, Goal("throughput", 2), False).score == 0


def test_bytes_of_a_split():
    memory = Memory(np.array([1, 2, 3, 4]), 10, 100, np.array([1000, 2000]), np.array([1015, 2200]), (0, 1))
    parts = parts_of([3, 1])
    assert stage_bytes(parts, memory) == (1016, 2104)
    assert overfull(parts, memory) == {0: 1}
    assert parts_of([0, 4]) == (Part(1, 0, 4),)


def test_eight_devices_and_a_hundred_layers_do_not_take_long():
    rng = np.random.default_rng(1)
    speed = rng.uniform(1, 10, 8)
    costs = make_costs(speed[:, None] * rng.uniform(0.9, 1.1, (1, 100)), rng.uniform(0, 5, (4, 8)))
    memory = Memory(np.full(100, 10), 50, 80, np.full(8, 5), rng.integers(150, 900, 8), tuple(range(8)))
    for objective in OBJECTIVES:
        started = time.process_time()
        split = best_split(lambda stages: costs, memory, Goal(objective, 64), False)
        assert time.process_time() - started < 10  # a fifth of a second here; enumeration would take ages
        check(split, memory, False)
