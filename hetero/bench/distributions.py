"""How many tokens, and how many seconds: drawn from what the user wrote."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

_NUMBER = r"(\d+(?:\.\d+)?)"
_FIXED = re.compile(_NUMBER)
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}")
_LOGNORMAL = re.compile(rf"lognormal\({_NUMBER},\s*{_NUMBER}\)")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers >= `low`.

    `kind` fixed: `a`. uniform: from `a` to `b`, both included. lognormal: median `a`, the logarithm's
    standard deviation `b`, as prompts and answers of people are found to be; cut at 20 times the median.
    """

    kind: str
    a: float
    b: float = 0.0
    low: int = 1

    def draw(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            value = rng.randint(round(self.a), round(self.b))
        elif self.kind == "lognormal":
            value = round(min(20 * self.a, rng.lognormvariate(math.log(self.a), self.b)))
        else:
            value = round(self.a)
        return max(self.low, value)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.a:g}"
        return f"{self.a:g}..{self.b:g}" if self.kind == "uniform" else f"lognormal({self.a:g},{self.b:g})"


def parse_lengths(text: str) -> Lengths:
    """`200`, `50..400` or `lognormal(200,0.8)`. Raises ValueError with one line."""
    if match := _FIXED.fullmatch(text.strip()):
        found = Lengths("fixed", float(match[1]))
    elif match := _RANGE.fullmatch(text.strip()):
        found = Lengths("uniform", float(match[1]), float(match[2]))
        if found.a > found.b:
            raise ValueError(f"{text!r}: the first number is greater than the second")
    elif match := _LOGNORMAL.fullmatch(text.strip()):
        found = Lengths("lognormal", float(match[1]), float(match[2]))
        if found.b > 4:
            raise ValueError(f"{text!r}: a spread of more than 4 is not a length of anything")
    else:
        raise ValueError(f"{text!r} is not a length such as 200, 50..400 or lognormal(200,0.8)")
    if not 1 <= found.a <= 10_000_000 or found.b > 10_000_000:
        raise ValueError(f"{text!r}: lengths are between 1 and 10,000,000 tokens")
    return found


def arrival_times(rng: random.Random, rate: float, burstiness: float, count: int) -> list[float]:
    """`count` times in seconds from 0 on, `rate` a second on average.

    The gaps are gamma distributed with a coefficient of variation of `burstiness`: 1 is a Poisson process,
    0 a steady beat, and 2 and more come in bursts.
    """
    times, now = [], 0.0
    for _ in range(count):
        if burstiness > 0:
            shape = 1 / burstiness**2
            now += rng.gammavariate(shape, 1 / (rate * shape))
        else:
            now += 1 / rate
        times.append(now)
    return times
