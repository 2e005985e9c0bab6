"""How many tokens a draft model should guess: by what its steps cost, and what its guesses were worth.

Guesses of a model are not free before they are verified. With n requests in a step, m of them guessed for,
k tokens each, a step's tokens per second are

    (n + G + P(1) + .. + P(k)) / (s(n + K + m k) + d(m + c) + (k - 1) d(m))

    s, d: seconds of a step of so many tokens of the large and of the small model (StepCost)
    G, K: expected and computed guesses of others, who cost nothing     P(j): sum of m probabilities
    c: tokens that the small model has to catch up

and k is where that is largest, 0 unless it is MARGIN more than with what is guessed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .policy import MARGIN, StepCost

TRIALS = 8  # at first, to learn what guesses are worth
TRIAL_TOKENS = 4
RETRY = 128  # decisions against guessing, after which it is tried once; doubles each time
LONGEST_RETRY = 4096
CATCH_UP = 0.25  # of a step's time, at most, for what the small model does not know yet


def tokens_per_second(cost: StepCost, chances: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """Of a step with a token for each request and `counts[i]` guesses, right with `chances[i]`."""
    gain = sum(sum(each[:count]) for each, count in zip(chances, counts, strict=True))
    return (len(chances) + gain) / float(cost.estimate(len(chances) + sum(counts), 1)[0])


def best_length(
    base: float,
    num_requests: int,
    others: tuple[float, int],
    chances: Sequence[Sequence[float]],
    catch_up: int,
    room: int,
    large: StepCost,
    small: StepCost,
) -> int:
    """How many tokens to guess for each request that `chances` are of; 0 for none.

    `base`: tokens per second without. `others`: expected and computed guesses of the rest of `num_requests`.
    `room`: guesses that a step may have in all.
    """
    longest = max(map(len, chances), default=0)
    if not longest:
        return 0
    sums, widths = np.zeros(longest), np.zeros(longest)
    for each in chances:
        sums[: len(each)] += each
        widths[: len(each)] += 1
    gains, width = others[0] + np.cumsum(sums), others[1] + np.cumsum(widths).astype(int)
    longest = int(np.searchsorted(width, room, side="right"))
    if not longest:
        return 0
    verifying = large.estimate(num_requests, room + 1)[width[:longest]]
    first, later = small.estimate(len(chances) + catch_up, 1)[0], small.estimate(len(chances), 1)[0]
    seconds = verifying + first + later * np.arange(longest)
    rates = (num_requests + gains[:longest]) / seconds
    best = int(np.argmax(rates))
    return best + 1 if rates[best] >= MARGIN * base else 0


def catch_up_tokens(seconds: float, rows: int, most: int, small: StepCost) -> int:
    """How many tokens more than `rows` the small model computes in a quarter of `seconds`, up to `most`."""
    costs = small.estimate(max(1, rows), most + 1)
    return int(np.searchsorted(costs[1:], costs[0] + CATCH_UP * seconds, side="right"))


class Trials:
    """When guessing is tried although it would not pay: at first, and now and then, ever more seldom."""

    def __init__(self) -> None:
        self._left = TRIALS
        self._declined, self._wait = 0, RETRY

    @property
    def due(self) -> bool:
        return self._left > 0 or self._declined >= self._wait

    def decline(self) -> None:
        """It would not pay this time."""
        self._declined += 1

    def made(self) -> None:
        """A trial has taken place."""
        if self._left > 0:
            self._left -= 1
        else:
            self._wait = min(2 * self._wait, LONGEST_RETRY)
        self._declined = 0

    def paid(self) -> None:
        """It pays: the next time that it does not is soon tried again."""
        self._declined, self._wait = 0, RETRY

    def check_invariants(self) -> None:
        assert 0 <= self._left <= TRIALS and RETRY <= self._wait <= LONGEST_RETRY and self._declined >= 0
