"""Thousands of tiny crowded worlds, each replayable from its seed.

HETERO_TEST_SCALE=full plays 20,000 of them.
"""

from __future__ import annotations

from collections import Counter

import pytest
from scale import FULL
from simulation import Outcome, simulate

from hetero.request import FinishReason

SEEDS = 20_000 if FULL else 1500
SEEDS_PER_TEST = SEEDS // 10
totals: Counter[str] = Counter()


def _run(seed: int) -> Outcome:
    try:
        return simulate(seed)
    except Exception as error:
        error.add_note(f"replay: simulation.simulate({seed})")
        raise


@pytest.mark.parametrize("start", range(0, SEEDS, SEEDS_PER_TEST))
def test_every_request_ends_as_if_alone(start: int) -> None:
    for seed in range(start, start + SEEDS_PER_TEST):
        out = _run(seed)
        totals["preemptions"] += out.preemptions
        totals["cached"] += out.cached
        totals["copies"] += out.copies
        totals["embedded"] += out.embedded
        totals["right guesses"] += out.accepted
        totals["wrong guesses"] += out.drafted - out.accepted
        totals["spills"] += out.spills
        totals["loads"] += out.loads
        totals["from host"] += out.from_host
        totals["from below"] += out.from_below
        totals.update(out.reasons.values())
        if out.recurrent:
            totals["found with states"] += out.cached
            totals["right guesses with states"] += out.accepted
            totals["preemptions with states"] += out.preemptions


def test_the_worlds_were_not_boring() -> None:
    if len(totals) == 0:
        pytest.skip("runs after the simulations")
    guesses, tiers = ("right guesses", "wrong guesses"), ("spills", "loads", "from host")
    for what in ("preemptions", "cached", "copies", "embedded", *guesses, *tiers, *FinishReason):
        assert totals[what] > 300, totals
    assert totals["from below"] > 50, totals
    assert min(totals["found with states"], totals["right guesses with states"]) > 300, totals
    assert totals["preemptions with states"] > 20, totals


def test_a_seed_replays() -> None:
    a, b = simulate(7), simulate(7)
    assert (a.steps, a.computed, a.copies, a.reasons) == (b.steps, b.computed, b.copies, b.reasons)
