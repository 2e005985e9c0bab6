"""What a run's records say: percentiles, rates, goodput. Failed requests are counted, never averaged away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.bench.client import Record
from hetero.bench.load import Run

PERCENTILES = (50, 90, 95, 99)
LIMITS = ("ttft", "tpot", "e2e")  # what a limit can be of
_LIMIT = re.compile(r"(ttft|tpot|e2e)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to be a good one: seconds, None where there is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in LIMITS)

    def are_met(self, record: Record) -> bool:
        """By a record without an error."""
        for name in LIMITS:
            limit, value = getattr(self, name), getattr(record, name)
            if limit is not None and value is not None and value > limit:
                return False
        return True

    def __str__(self) -> str:
        found = [(name, getattr(self, name)) for name in LIMITS]
        return ",".join(f"{name}={1e3 * limit:g}ms" for name, limit in found if limit is not None)


def parse_limits(text: str) -> Limits:
    """`ttft=600ms,tpot=50ms,e2e=20s`. Raises ValueError with one line."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a limit such as ttft=600ms, tpot=50ms or e2e=20s")
        if match[1] in found:
            raise ValueError(f"{match[1]} is limited twice")
        found[match[1]] = float(match[2]) / (1e3 if match[3] == "ms" else 1)
    return Limits(**found)


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds, and tokens or requests per second. `good` is None without limits.

    `ttft`, `tpot`, `gap`, `e2e` and `queue` map "mean", "p50", "p90", "p95" and "p99" to seconds, over the
    requests that were answered; empty where nothing was measured. `errors` counts the failed ones by cause.
    `cached`: part of the prompts' tokens that the server had cached, None where it does not say.
    """

    requests: int
    answered: int
    errors: dict[str, int]
    seconds: float
    request_rate: float
    output_rate: float
    prompt_rate: float
    good: float | None
    goodput: float | None
    cached: float | None
    prompt_tokens: int
    output_tokens: int
    ttft: dict[str, float]
    tpot: dict[str, float]
    gap: dict[str, float]
    e2e: dict[str, float]
    queue: dict[str, float]
    late: float  # the longest that a request was sent after it was due: a client that cannot keep up

    @property
    def failed(self) -> int:
        return self.requests - self.answered


def summarize(run: Run, limits: Limits) -> Summary:
    """The numbers of a run."""
    good_records = [r for r in run.records if r.error is None]
    seconds = max(run.seconds, 1e-9)
    met = sum(limits.are_met(r) for r in good_records)
    prompts = sum(r.prompt_tokens for r in good_records)
    outputs = sum(r.output_tokens for r in good_records)
    known = [r for r in good_records if r.cached_tokens is not None]
    of_known = sum(r.prompt_tokens for r in known)
    return Summary(
        requests=len(run.records),
        answered=len(good_records),
        errors=dict(Counter(_cause(r.error) for r in run.records if r.error is not None)),
        seconds=run.seconds,
        request_rate=len(good_records) / seconds,
        output_rate=outputs / seconds,
        prompt_rate=prompts / seconds,
        good=met / len(run.records) if limits and run.records else None,
        goodput=met / seconds if limits else None,
        cached=sum(r.cached_tokens or 0 for r in known) / of_known if of_known else None,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft=_spread([r.ttft for r in good_records]),
        tpot=_spread([t for r in good_records if (t := r.tpot) is not None]),
        gap=_spread([gap for r in good_records for gap in r.gaps]),
        e2e=_spread([r.e2e for r in good_records]),
        queue=_spread([r.queued for r in good_records if r.queued is not None]),
        late=max((r.sent - r.due for r in run.records), default=0.0),
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)  # between two values on a straight line, as others do
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def _cause(error: str) -> str:
    """Errors that differ in numbers only are of one kind."""
    return re.sub(r"\d{4,}", "N", error)[:120]
