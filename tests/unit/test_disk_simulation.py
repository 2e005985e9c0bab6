"""Tiny crowded worlds with a disk below host memory, over restarts: nobody attends what is not theirs."""

from __future__ import annotations

from collections import Counter

import pytest
from scale import FULL
from simulation import simulate_lives

SEEDS_PER_TEST = 30
totals: Counter[str] = Counter()


@pytest.mark.parametrize("start", range(0, 5000 if FULL else 60, SEEDS_PER_TEST))
def test_every_request_ends_as_if_alone(start: int) -> None:
    for seed in range(start, start + SEEDS_PER_TEST):
        try:
            first, *later = simulate_lives(seed)
        except Exception as error:
            error.add_note(f"replay: simulation.simulate_lives({seed})")
            raise
        totals["in the first life"] += first.from_below
        for out in later:
            totals["after a restart"] += out.from_below
            totals["loads"] += out.loads
            totals["spills"] += out.spills
            totals.update(out.reasons.values())


def test_the_worlds_were_not_boring() -> None:
    if len(totals) == 0:
        pytest.skip("runs after the simulations")
    assert min(totals[what] for what in ("after a restart", "loads", "spills")) > 100, totals
