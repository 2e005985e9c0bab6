"""What drafts are worth: costs, chances, and the choice between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec import policy
from spec.base import Draft
from spec.policy import Acceptance, Policy, RequestAcceptance, StepCost
from spec.verify import verify


def learnt(cost: StepCost, seconds, sizes=range(1, 65), rounds: int = 40) -> StepCost:
    for _ in range(rounds):
        for size in sizes:
            cost.observe(size, seconds(size))
    return cost


def test_costs_are_learnt_and_lie_on_lines_between_what_was_measured():
    cost = learnt(StepCost(), lambda n: 10 + n, sizes=(1, 8, 40))
    assert cost.estimate(1, 60) == pytest.approx(10 + np.arange(1, 61), rel=0.01)


def test_unknown_costs_are_guessed_low_enough_to_be_tried():
    cost = learnt(StepCost(), lambda n: 10.0, sizes=(2,))
    doubling = policy.FREE_TOKENS + 2
    assert cost.estimate(1, 10) == pytest.approx(10 * (policy.FREE_TOKENS + np.arange(1, 11)) / doubling)


def test_a_change_at_one_size_is_expected_at_the_others():
    cost = learnt(StepCost(), lambda n: 1.0 + n, sizes=(1, 16))
    before = cost.estimate(16, 1)[0]
    learnt(cost, lambda n: 20.0, sizes=(1,), rounds=200)
    assert cost.estimate(1, 1)[0] == pytest.approx(20, rel=0.1)
    assert cost.estimate(16, 1)[0] > 2 * before


def test_one_slow_step_says_little():
    cost = learnt(StepCost(), lambda n: 1.0, sizes=(4,))
    cost.observe(4, 100.0)
    assert cost.estimate(4, 1)[0] < 1.3
    fresh = StepCost()
    fresh.observe(4, 100.0)  # built a graph
    fresh.observe(4, 1.0)
    assert fresh.estimate(4, 1)[0] == 1.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-5, 10)), max_size=80), st.integers(1, 500))
def test_costs_stay_sane(steps, first):
    cost = StepCost()
    for size, seconds in steps:
        cost.observe(size, seconds)
        cost.check_invariants()
    estimate = cost.estimate(first, 70)
    assert np.isfinite(estimate).all() and (estimate > 0).all() and (np.diff(estimate) >= -1e-9).all()


CHEAP, DEAR = (lambda n: 1.0 + n / 100), (lambda n: float(n))


def chosen(seconds, chances, room: int = 64) -> list[int]:
    chooser = Policy()
    learnt(chooser.cost, seconds, rounds=3)
    return chooser.choose(chances, room)


def falling(p: float, count: int = 8) -> list[float]:
    return [p**i for i in range(1, count + 1)]


def test_cheap_tokens_are_guessed_and_dear_ones_are_not():
    assert chosen(CHEAP, [falling(0.9)]) == [8]
    assert chosen(DEAR, [falling(0.9)]) == [0]
    assert chosen(CHEAP, [falling(0.001)]) == [0]


def test_the_likelier_draft_is_the_longer_one_and_room_is_kept():
    long, short = chosen(lambda n: 10.0 + n, [falling(0.97), falling(0.5)])
    assert long > short >= 0
    assert sum(chosen(CHEAP, [falling(0.9)] * 20, room=30)) == 30
    assert chosen(CHEAP, [falling(0.9)], room=0) == [0] and chosen(CHEAP, [], room=5) == []


def test_a_step_of_many_gets_shorter_drafts_than_one_of_few():
    knee = lambda n: 8.0 + max(0, n - 8)  # noqa: E731  flat, then by the token
    assert chosen(knee, [falling(0.6)])[0] > 3
    assert sum(chosen(knee, [falling(0.6)] * 16)) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 0.98), max_size=12), min_size=1, max_size=8),
    st.integers(0, 40),
    st.floats(0.0, 1.0),
)
def test_the_choice_is_the_best_of_all(rates, room, slope):
    """Against trying every number of the likeliest guesses."""
    chances = [np.cumprod(r).tolist() for r in rates]
    chooser = Policy()
    learnt(chooser.cost, lambda n: 1 + slope * n, rounds=2)
    counts = chooser.choose(chances, room)
    assert len(counts) == len(chances) and sum(counts) <= room
    assert all(n <= len(c) for n, c in zip(counts, chances, strict=True))

    def rate(gain: float, k: int) -> float:
        return (len(chances) + gain) / chooser.cost.estimate(len(chances) + k, 1)[0]

    ranked = sorted((c for each in chances for c in each), reverse=True)[:room]
    best = max(rate(sum(ranked[:k]), k) for k in range(len(ranked) + 1))
    got = sum(sum(c[:n]) for c, n in zip(chances, counts, strict=True))
    assert rate(got, sum(counts)) >= best / policy.MARGIN - 1e-9


def test_few_shapes():
    chooser = Policy(few_shapes=True)
    learnt(chooser.cost, CHEAP, rounds=3)
    assert chooser.choose([falling(0.9, n) for n in (0, 1, 2, 3, 6, 7, 20)], 64) == [0, 1, 1, 3, 3, 7, 15]


def test_what_does_not_pay_is_tried_again_now_and_then():
    chooser = Policy()
    learnt(chooser.cost, DEAR, rounds=3)
    tries = [sum(chooser.choose([falling(0.9)], 64)) for _ in range(3 * policy.RETRY)]
    assert 2 <= sum(n > 0 for n in tries) <= 3
    assert not any(sum(chooser.choose([[0.1, 0.01]], 64)) for _ in range(3 * policy.RETRY))


def test_a_request_that_starts_to_repeat_is_noticed_without_drafts():
    shared = Acceptance(1)
    for _ in range(400):  # others' short matches are wrong
        shared.observe(0, 2, False)
    request = RequestAcceptance(shared)
    for _ in range(30):
        request.propose(0, Draft([1, 2, 3, 4], 2))
        request.observe([9])
        request.check_invariants()
    assert request.chances(4) == []
    for _ in range(60):
        request.propose(0, Draft([1, 2, 3, 4], 40))
        request.observe([1])
        request.check_invariants()
        shared.check_invariants()
    assert request.chances(4)[0] > 0.8
    assert len(request.chances(2)) == 2 and request.chances(0) == []


def test_guesses_behind_a_wrong_one_are_not_held_against_it():
    shared = Acceptance(2)
    before = shared.rate(0, 4)
    request = RequestAcceptance(shared)
    request.propose(1, Draft([1, 2, 3], 4))
    request.observe([1, 7, 3, 3])
    assert shared.rate(0, 4) == before  # another proposer
    assert sum(shared._trials[1]) == sum(Acceptance(2)._trials[1]) + 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 70),
            st.lists(st.integers(0, 2), max_size=8),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_chances_stay_probabilities(rounds):
    shared, requests = Acceptance(2), []
    for i, (proposer, draft, length, tokens) in enumerate(rounds):
        if i % 20 == 0:
            requests.append(RequestAcceptance(shared))
        request = requests[i % len(requests)]
        request.propose(proposer, Draft(draft, length if draft else 0))
        chances = request.chances(5)
        assert len(chances) <= min(5, len(draft))
        assert all(policy.UNLIKELY <= c <= policy.MOST_LIKELY for c in chances)
        assert chances == sorted(chances, reverse=True)
        request.observe(tokens)
        request.check_invariants()
        shared.check_invariants()


def test_verify_takes_tokens_until_a_guess_is_wrong():
    texts = {0: [5, 6, 7, 8], 1: [5, 5, 5, 5], 2: [1, 2, None], 3: [None], 4: [4]}
    calls = []

    def sample(which, row):
        calls.append((list(which), row))
        return [texts[i][row] for i in which]

    assert verify([[5, 6, 7], [5, 9], [1, 2, 3, 4], [1], []], sample) == [3, 1, 2, 0, 0]
    assert calls == [([0, 1, 2, 3, 4], 0), ([0, 1, 2], 1), ([0, 2], 2), ([0], 3)]


def test_what_lies_next_to_each_other_differs_by_chance():
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 1.0)
        cost.observe(9, 5.0)
    cost.observe(10, 5.0)
    cost.observe(10, 5.0)
    steps = np.diff(cost.estimate(9, 4))
    assert (steps >= 0.25 - 1e-9).all(), "half of what a token costs between 1 and 9"
    assert cost.is_settled(9) and not cost.is_settled(10)


def test_a_guess_behind_right_ones_rests_on_a_longer_match():
    shared = Acceptance(1)
    seen = []
    shared.observe = lambda proposer, length, right: seen.append((length, right))  # type: ignore[method-assign]
    request = RequestAcceptance(shared)
    request.propose(0, Draft([1, 2, 3, 4], 5))
    request.observe([1, 2])
    request.observe([9, 4])
    assert seen == [(5, True), (6, True), (7, False)], "nothing is compared behind a wrong one"
