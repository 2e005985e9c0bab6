"""Texts for the store of served text, and what it proposes after them."""

from __future__ import annotations

import numpy as np

from hetero.speculation import Speculation
from spec.base import Draft, Proposer
from spec.policy import Acceptance, StepCost
from spec.store import Store

VOCAB = 50_000


def unique(seed: int, length: int) -> list[int]:
    """Text in which no token comes twice."""
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


def after(store: Store, context: list[int], max_tokens: int = 8, scope: str = "") -> Draft:
    proposer: Proposer = store.proposer(scope)
    proposer.extend(context)
    return proposer.propose(max_tokens)


class _Credulous(Acceptance):
    """Believes every guess, whatever comes of it."""

    def rate(self, proposer, match_length):
        return 0.0  # nothing was expected, so nothing disappoints

    def rates(self, proposer, match_length, count):
        return [1.0] * count

    def observe(self, proposer, match_length, right):
        return


def compute_all(speculation: Speculation) -> Speculation:
    """Have every guess computed, whatever it costs and however often they were wrong."""
    speculation._acceptance = _Credulous(2)
    speculation._policy.choose = _share
    return speculation


def _share(chances: list[list[float]], room: int) -> list[int]:
    counts = []
    for each in chances:
        counts.append(min(len(each), room))
        room -= counts[-1]
    return counts


def costs(fixed: float, slope: float) -> StepCost:
    """As if steps of n tokens had taken fixed + slope * n seconds."""
    cost = StepCost()
    for size in (*range(1, 65), 128, 256):
        for _ in range(3):
            cost.observe(size, fixed + slope * size)
    return cost
