"""One trial of `hetero tune`: a server with other settings, its answers, and what it did under load."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetero.bench.client import Target
from hetero.bench.load import Load, run_load
from hetero.bench.own_server import KEY, StartError, serving
from hetero.bench.recorded import Recorded, drawn_anew
from hetero.bench.results import Limits, Summary, summarize
from hetero.bench.search import Choice
from hetero.bench.server_info import ServerError, find_out
from hetero.bench.workload import Sizes, Workload

PROBES = 6
PROBE_TOKENS = 24
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every trial is measured with. A trial begins sessions for `seconds`, as many as there is time for.

    `share` of the answers must keep `limits`: with 0.95, that is a limit of the 95th percentile. `held_out`
    are other workloads to prove with what was found; without any it is `workload` with other seeds.
    """

    workload: Workload | Recorded
    sizes: Sizes
    load: Load
    limits: Limits
    share: float
    sessions: int
    held_out: tuple[Workload | Recorded, ...] = ()

    def other(self, number: int) -> Traffic:
        """Such traffic that settings were not searched with, several kinds in turn."""
        if not self.held_out:
            return self
        return replace(self, workload=self.held_out[number % len(self.held_out)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial gave. `rejected` says why it does not count, None when it does. Any
    that keeps the limits is better than one that is `short` of them.

    `answers` is a digest of greedy answers to fixed prompts, each asked alone. `score` is the goodput, or
    the output tokens per second where there are no limits.
    """

    choice: Choice
    seed: str
    rejected: str | None
    short: bool = False  # fewer answers kept the limits than should
    answers: str | None = None
    score: float | None = None
    answered: int = 0
    ttft_p95: float | None = None
    tpot_p95: float | None = None
    good: float | None = None
    output_rate: float | None = None
    log: str | None = None
    status: dict[str, Any] | None = None  # of the server: devices, plan, settings

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "choice": dict(self.choice)}

    @staticmethod
    def of(found: Mapping[str, Any]) -> Outcome:
        return Outcome(**{**found, "choice": tuple(sorted(found["choice"].items()))})


Show = Callable[[int, int], None]


def run_trial(
    given: Mapping[str, Any],
    choice: Choice,
    traffic: Traffic,
    seed: str,
    folder: Path,
    name: str,
    expected: str | None,
    show: Show = lambda done, total: None,
) -> Outcome:
    """Measure a server with `given` settings and the choice's. The outcome says what went wrong.

    `expected`: the digest that the answers must have, None where they may differ. The server's output is
    kept in `folder`, as NAME.log.
    """
    log = folder / f"{name}.log"
    outcome = Outcome(choice, seed, None, log=log.name)
    try:
        with serving({**given, **dict(choice)}, log) as url:
            info = asyncio.run(find_out(url, name, None, KEY, None, True, 0.0))
            outcome = replace(outcome, status=info.about.get("status"))
            answers, error = _probe(info.target, traffic)
            if error is not None:
                return replace(outcome, rejected=f"a probe was not answered: {error}")
            if expected is not None and answers != expected:
                return replace(outcome, rejected="greedy answers changed", answers=answers)
            sessions = traffic.workload.sessions(seed, traffic.sessions, traffic.sizes)
            run = run_load(info.target, sessions, traffic.load, 1, show)
    except (StartError, ServerError) as error:
        return replace(outcome, rejected=f"did not start: {error}")
    return _judged(replace(outcome, answers=answers), summarize(run, traffic.limits), traffic)


def _judged(outcome: Outcome, found: Summary, traffic: Traffic) -> Outcome:
    outcome = replace(
        outcome,
        score=found.output_rate if found.goodput is None else found.goodput,
        answered=found.answered,
        ttft_p95=found.ttft.get("p95"),
        tpot_p95=found.tpot.get("p95"),
        good=found.good,
        output_rate=found.output_rate,
    )
    if found.failed:
        cause, number = max(found.errors.items(), key=lambda item: item[1])
        return replace(outcome, rejected=f"{found.failed} of {found.requests} failed ({number}: {cause})")
    if found.good is not None and found.good < traffic.share:
        return replace(outcome, short=True)
    return outcome


def _probe(target: Target, traffic: Traffic) -> tuple[str, str | None]:
    """A digest of greedy answers, one request at a time, and why one failed. Also warms the server up."""
    sessions = drawn_anew(traffic.workload).sessions("probe", PROBES, traffic.sizes)
    short = [
        replace(s, turns=(replace(s.turns[0], max_tokens=PROBE_TOKENS, pause=0.0),), arrival=None)
        for s in sessions
    ]
    run = run_load(target, short, Load(concurrency=1), 1)
    failed = next((record.error for record in run.records if record.error), None)
    texts = [record.text for record in sorted(run.records, key=lambda r: r.session)]
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest(), failed
