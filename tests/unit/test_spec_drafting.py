"""How long the guesses of a draft model should be, what it may catch up with, and when it is tried."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_tools import costs

from spec.drafting import RETRY, TRIALS, Trials, best_length, catch_up_tokens, tokens_per_second


@given(
    st.lists(st.tuples(st.floats(0.1, 0.98), st.integers(0, 12)), min_size=1, max_size=6),
    st.floats(0.001, 1),
    st.floats(0, 0.3),
    st.integers(0, 40),
    st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_the_length_is_the_best_of_all(drafts, small, slope, catch_up, room) -> None:
    chances = [[rate ** (i + 1) for i in range(n)] for rate, n in drafts]
    large, little = costs(1, slope), costs(small, small / 20)
    size = len(chances)

    def rate(k: int) -> float:
        width = sum(min(k, len(each)) for each in chances)
        gain = sum(sum(each[:k]) for each in chances)
        took = large.estimate(size + width, 1)[0] + little.estimate(size + catch_up, 1)[0]
        return (size + gain) / (took + (k - 1) * little.estimate(size, 1)[0])

    allowed = [k for k in range(1, 13) if sum(min(k, len(each)) for each in chances) <= room]
    allowed = [k for k in allowed if k <= max(map(len, chances))]
    base = tokens_per_second(large, chances, [0] * size)
    got = best_length(base, size, (0.0, 0), chances, catch_up, room, large, little)
    best = max(map(rate, allowed), default=0.0)
    if got:
        assert got in allowed and rate(got) == pytest.approx(best) and best > base
    else:
        assert best <= 1.031 * base


def test_a_dear_draft_model_is_not_asked_and_a_cheap_one_for_more() -> None:
    chances = [[0.8 ** (i + 1) for i in range(16)]]
    large = costs(1, 0.01)
    base = tokens_per_second(large, chances, [0])
    lengths = [
        best_length(base, 1, (0.0, 0), chances, 0, 64, large, costs(small, 0)) for small in (0.01, 0.1, 0.9)
    ]
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_catching_up_takes_a_quarter_of_a_step() -> None:
    assert catch_up_tokens(1.0, 1, 512, costs(0.1, 0.01)) == pytest.approx(25, abs=3)
    assert catch_up_tokens(1.0, 1, 10, costs(0.1, 0.01)) == 10
    assert catch_up_tokens(0.0, 1, 512, costs(0.1, 0.01)) == 0


def test_trials_grow_seldom_until_one_pays() -> None:
    trials, made = Trials(), []
    for turn in range(4000):
        if trials.due:
            trials.made()
            made.append(turn)
        trials.decline()
        trials.check_invariants()
    assert made[:TRIALS] == list(range(TRIALS))
    gaps = np.diff(made[TRIALS:])
    assert len(gaps) >= 3 and (gaps[1:] >= 2 * gaps[:-1] - 2).all()
    trials.paid()
    for _ in range(RETRY):
        assert not trials.due
        trials.decline()
    assert trials.due
