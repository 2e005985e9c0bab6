"""How many guessed tokens are worth computing: by what steps cost and by how often guesses were right.

A step gives each of n requests a token, and one more for each guess that is right. With K guesses it takes
s(n + K) seconds. So K is chosen for the most tokens per second, the likeliest guesses first:

    (n + P1 + .. + PK) / s(n + K)         P: probability that a guess and all before it in its draft are right

On an idle device a step of 8 tokens costs hardly more than one of 1, and long drafts pay. The more requests
share a step, the dearer is each further token, and only what is almost certain is still guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .base import Draft

MARGIN = 1.03  # a gain below this is noise
RETRY = 64  # decisions against any draft, after which one is tried all the same: its cost may have changed
LIKELY = 0.5  # expected tokens that make such a try worth while
STEEPNESS = 0.5  # costs grow less from token to token, but not at once
FREE_TOKENS = 8  # so many tokens double a step, as long as nothing has been measured

_EXACT = 16  # step sizes up to here have an entry of their own
_PER_DOUBLING = 8  # entries for each doubling above
_SIZES = _EXACT + 17 * _PER_DOUBLING
_RATE = 0.2  # weight of the newest measurement
_SHARED = 0.5  # part of a change at one size that is taken to have happened at all sizes
_SETTLED = 8  # measurements of a size before its changes say anything about others
_OUTLIER = 3.0  # a measurement counts as no more than so many times what was expected


class StepCost:
    """Seconds of a step by its number of tokens, learnt from the steps that were computed.

    Contexts grow and other programs come and go: a change seen at one size is carried over in part to the
    sizes that were not seen lately.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(_SIZES)
        self._seconds = np.zeros(_SIZES)
        self._seen = np.zeros(_SIZES, np.int64)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` >= 1 tokens took so long."""
        at = _index(num_tokens)
        seen, expected = self._seen[at], self._seconds[at]
        self._seen[at] += 1
        if seen == 0:
            self._tokens[at], self._seconds[at] = num_tokens, seconds
        elif seen == 1:  # the first may have built a graph or compiled something
            self._seconds[at] = min(expected, seconds)
        else:
            change = min(max(seconds / max(expected, 1e-9), 1 / _OUTLIER), _OUTLIER) ** _RATE
            if seen >= _SETTLED:
                self._seconds *= change**_SHARED
                change = change ** (1 - _SHARED)
            self._seconds[at] *= change
            self._tokens[at] += _RATE * (num_tokens - self._tokens[at])

    def is_settled(self, num_tokens: int) -> bool:
        """Whether steps of about so many tokens were measured often enough."""
        return bool(self._seen[_index(num_tokens)] >= _SETTLED)

    def estimate(self, first: int, count: int) -> np.ndarray:
        """Seconds of steps of `first`, `first` + 1, .. tokens: float64 [count], never falling.

        Between measured sizes on straight lines, beyond them as steep as over the upper half of them: what
        lies next to each other differs by chance. 1 + T / FREE_TOKENS where that is not known. For the same
        reason, tokens behind `first` cost STEEPNESS of what those before did on average, at least.
        """
        wanted = np.arange(first, first + count, dtype=np.float64)
        known = np.flatnonzero(self._seen)
        if not len(known):
            return 1 + wanted / FREE_TOKENS
        x, y = self._tokens[known], np.maximum.accumulate(self._seconds[known])
        guess = y[-1] * (FREE_TOKENS + wanted) / (FREE_TOKENS + x[-1])
        if x[0] <= x[-1] / 2:
            near = np.flatnonzero(x <= x[-1] / 2)[-1]
            slope = (y[-1] - y[near]) / (x[-1] - x[near])
            guess = np.where(wanted > x[-1], y[-1] + slope * (wanted - x[-1]), guess)
        inside = np.interp(wanted, x, y)
        below = y[0] * (FREE_TOKENS + wanted) / (FREE_TOKENS + x[0])
        found = np.where(wanted > x[-1], guess, np.where(wanted < x[0], below, inside))
        if x[0] < first:
            slope = STEEPNESS * (found[0] - y[0]) / (first - x[0])
            found = np.maximum(found, found[0] + slope * (wanted - first))
        return found

    def check_invariants(self) -> None:
        known = self._seen > 0
        assert (self._seconds[known] >= 0).all() and np.isfinite(self._seconds).all()
        assert (np.diff(self._tokens[known]) > 0).all(), "sizes in order"


def _index(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens - 1
    return min(_SIZES - 1, _EXACT + int(_PER_DOUBLING * np.log2(num_tokens / _EXACT)))


_PRIOR = (0.0, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.9)  # by _length_class, until it was measured
_PRIOR_TRIALS = 4.0
_MEMORY = 256.0  # guesses of a class that weigh as much as all before them
_OWN_PRIOR = 4.0  # right guesses that a request starts with
_OWN_MEMORY = 32.0
MOST_LIKELY = 0.98
UNLIKELY = 0.1  # no step is so cheap that such a guess would pay


def _length_class(match_length: int) -> int:
    return min(match_length.bit_length(), len(_PRIOR) - 1)


class Acceptance:
    """How often guesses of each proposer were right, by the length of the match that they rest on.

    A guess behind right ones rests on a match that is longer by these.
    """

    def __init__(self, num_proposers: int):
        self._trials = [[_PRIOR_TRIALS] * len(_PRIOR) for _ in range(num_proposers)]
        self._rates = [list(_PRIOR) for _ in range(num_proposers)]

    def rate(self, proposer: int, match_length: int) -> float:
        """Part of the guesses at such a match that were right."""
        return self._rates[proposer][_length_class(match_length)]

    def rates(self, proposer: int, match_length: int, count: int) -> Iterator[float]:
        """The same of `count` guesses that follow each other, each at a match longer by one."""
        rates = self._rates[proposer]
        for length in range(match_length, match_length + count):
            yield rates[_length_class(length)]

    def observe(self, proposer: int, match_length: int, right: bool) -> None:
        trials, rates, at = self._trials[proposer], self._rates[proposer], _length_class(match_length)
        trials[at] = min(trials[at] + 1, _MEMORY)
        rates[at] += (right - rates[at]) / trials[at]

    def check_invariants(self) -> None:
        assert all(0 <= rate <= 1 for rates in self._rates for rate in rates)
        assert all(0 < n <= _MEMORY for trials in self._trials for n in trials)


class RequestAcceptance:
    """One request against the average: its right guesses beside those that `Acceptance` expected.

    Guesses are compared with what came whether or not they were computed. So a request that starts to
    repeat itself is noticed without paying for drafts.
    """

    def __init__(self, shared: Acceptance):
        self._shared = shared
        self._hits = self._expected = _OWN_PRIOR
        self._draft: Draft = Draft([], 0)
        self._proposer = 0
        self._checked = 0

    def propose(self, proposer: int, draft: Draft) -> None:
        """What comes next will be compared with `draft`."""
        self._proposer, self._draft, self._checked = proposer, draft, 0

    def chances(self, limit: int) -> list[float]:
        """For each of the first `limit` guesses, the probability that it and all before it are right.

        Ends where that falls below UNLIKELY.
        """
        count = min(limit, len(self._draft.token_ids))
        return self.foresee(self._proposer, self._draft.match_length, count)

    def foresee(self, proposer: int, match_length: int, count: int) -> list[float]:
        """The same of `count` guesses that a proposer may make at such a match."""
        factor, chance, chances = self._hits / self._expected, 1.0, []
        for rate in self._shared.rates(proposer, match_length, count):
            chance *= min(MOST_LIKELY, rate * factor)
            if chance < UNLIKELY:
                break
            chances.append(chance)
        return chances

    def observe(self, token_ids: Sequence[int]) -> None:
        """The request's next tokens, whether they were guessed or not."""
        for token in token_ids:
            if self._checked == len(self._draft.token_ids):
                return
            right = self._draft.token_ids[self._checked] == token
            length = self._draft.match_length + self._checked
            self._expected += self._shared.rate(self._proposer, length)
            self._hits += right
            if self._expected > _OWN_MEMORY:
                self._hits *= 0.5
                self._expected *= 0.5
            self._shared.observe(self._proposer, length, right)
            self._checked = self._checked + 1 if right else len(self._draft.token_ids)

    def check_invariants(self) -> None:
        assert 0 <= self._checked <= len(self._draft.token_ids)
        assert self._hits >= 0 and 0 < self._expected <= _OWN_MEMORY + 1


class Policy:
    """Chooses draft lengths from costs and chances.

    `few_shapes`: a request gets 1, 2, 4, 8, .. tokens of a step, for devices that need a graph for each
    combination.
    """

    def __init__(self, few_shapes: bool = False) -> None:
        self.cost = StepCost()
        self._few_shapes = few_shapes
        self._declined = 0

    def choose(self, chances: Sequence[Sequence[float]], room: int) -> list[int]:
        """How many guesses of each request to compute, `room` in all at most. [] is no guess.

        `chances` has the requests that get a token in the step, as of RequestAcceptance.chances.
        """
        counts, gain, speedup = self._best(chances, room)
        if not any(counts):
            return counts
        if speedup < MARGIN:
            self._declined += gain >= LIKELY
            if self._declined < RETRY:
                return [0] * len(chances)
        self._declined = 0
        return counts

    def best(self, chances: Sequence[Sequence[float]], room: int) -> list[int]:
        """The same where every gain counts, and at least one guess is computed if there is any."""
        return self._best(chances, room)[0]

    def shaped(self, count: int) -> int:
        """How many of `count` guesses of a request a step may have."""
        return (1 << (1 + count).bit_length() - 1) - 1 if self._few_shapes else count

    def _best(self, chances: Sequence[Sequence[float]], room: int) -> tuple[list[int], float, float]:
        """With how many of them are expected to be right, and the tokens per second against those without."""
        ranked = sorted(((c, i) for i, each in enumerate(chances) for c in each), reverse=True)[:room]
        counts = [0] * len(chances)
        if not ranked:
            return counts, 0.0, 1.0
        gains = np.cumsum([0.0, *(chance for chance, _ in ranked)])
        rates = (len(chances) + gains) / self.cost.estimate(len(chances), len(gains))
        best = int(np.argmax(rates[1:])) + 1
        for _, i in ranked[:best]:
            counts[i] += 1
        return [self.shaped(n) for n in counts], float(gains[best]), float(rates[best] / rates[0])
