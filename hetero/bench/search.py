"""Which settings to try next: one lever at a time, then what has helped together, then around the best.

1  the base                       base
2  each value of each lever       base + a1, base + a2, base + b1, ...
3  what helped, the best first    base + a2, base + a2 + b1, ...: kept as long as it helps
4  around the best                best with another value of each lever
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Choice = tuple[tuple[str, str], ...]  # what differs from the base: (setting, value), sorted by setting

NOISE = 1.03  # a score that is not this many times a better one has not helped


@dataclass(frozen=True, slots=True)
class Lever:
    """A setting and the values to try beside the base's."""

    name: str
    values: tuple[str, ...]


def with_value(choice: Choice, name: str, value: str) -> Choice:
    """The choice with one setting set."""
    return tuple(sorted({**dict(choice), name: value}.items()))


@dataclass(slots=True)
class Search:
    """A walk over choices. `scores` are what trials gave, greater is better; None was rejected.

    Trials that were made before count as well: a search goes on where it was stopped.
    """

    levers: Sequence[Lever]
    scores: dict[Choice, float | None] = field(default_factory=dict)

    def tell(self, choice: Choice, score: float | None) -> None:
        self.scores[choice] = score

    def steps(self) -> Iterator[Choice]:
        """The choices to try, in order. Each must have been told before the next one is asked for."""
        yield from self._new([()])
        if self.scores[()] is None:
            return
        yield from self._new(
            with_value((), lever.name, value) for lever in self.levers for value in lever.values
        )
        best: Choice = ()
        for name, value in self._helpful():
            candidate = with_value(best, name, value)
            yield from self._new([candidate])
            if self._is_better(candidate, best):
                best = candidate
        tried_around: set[Choice] = set()
        while (best := self.best) not in tried_around:
            tried_around.add(best)
            around = (
                with_value(best, lever.name, value)
                for lever in self.levers
                for value in lever.values
                if dict(best).get(lever.name) != value
            )
            yield from self._new(around)

    @property
    def best(self) -> Choice:
        """The choice with the greatest score; the base unless another is better by more than noise."""
        found: Choice = ()
        for choice in sorted(self.scores, key=len):
            if self._is_better(choice, found):
                found = choice
        return found

    @property
    def contender(self) -> Choice | None:
        """The best, or where that is the base, the best of the others; None where no other was measured."""
        if self.best:
            return self.best
        others = [choice for choice, score in self.scores.items() if choice and score is not None]
        return max(others, key=self._score, default=None)

    def _helpful(self) -> list[tuple[str, str]]:
        """Of each lever the value that helped most, the greatest help first."""
        found = []
        for lever in self.levers:
            tried = [(self._score((pair,)), pair) for value in lever.values if (pair := (lever.name, value))]
            score, pair = max(tried, default=(0.0, ("", "")))
            if score > NOISE * self._score(()):
                found.append((score, pair))
        return [pair for _, pair in sorted(found, reverse=True)]

    def _new(self, choices: Iterator[Choice] | Sequence[Choice]) -> Iterator[Choice]:
        for choice in choices:
            if choice not in self.scores:
                yield choice
                assert choice in self.scores, "tell() comes before the next step"

    def _is_better(self, one: Choice, other: Choice) -> bool:
        return self._score(one) > NOISE * self._score(other)

    def _score(self, choice: Choice) -> float:
        score = self.scores.get(choice)
        return float("-inf") if score is None else score

    def check_invariants(self) -> None:
        """Raise AssertionError unless choices are of the levers' values."""
        values: Mapping[str, tuple[str, ...]] = {lever.name: lever.values for lever in self.levers}
        for choice in self.scores:
            assert list(choice) == sorted(choice) and len(dict(choice)) == len(choice)
            assert all(value in values[name] for name, value in choice)
        assert self.scores.get(self.best, 0.0) is not None
        contender = self.contender
        assert contender is None or (contender and self.scores[contender] is not None)


def pareto(points: Mapping[Choice, tuple[float, float]]) -> list[Choice]:
    """The choices that none other beats in both: (greater is better, smaller is better)."""
    kept = []
    for choice, (gain, cost) in points.items():
        beaten = any(g >= gain and c <= cost and (g, c) != (gain, cost) for g, c in points.values())
        if not beaten:
            kept.append(choice)
    return sorted(kept, key=lambda choice: points[choice])
