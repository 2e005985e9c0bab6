"""A benchmark from start to end: every load at every server, in turn, as often as was asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hetero.bench.client import Record
from hetero.bench.load import Load, Run, run_load
from hetero.bench.recorded import Recorded, drawn_anew
from hetero.bench.results import Limits, Summary, summarize
from hetero.bench.server_info import ServerInfo, this_machine
from hetero.bench.workload import Session, Sizes, Workload, WorkloadError

FORMAT = 1
GAIN = 1.1  # more load that brings less than this many times the tokens per second: saturated


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `sessions` of the workload for each run, `warm_up` more before the first."""

    workload: Workload | Recorded
    sizes: Sizes
    loads: tuple[Load, ...]
    sessions: int
    warm_up: int
    repeat: int
    seed: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one load at one server."""

    server: str
    load: Load
    repetition: int
    summary: Summary
    records: tuple[Record, ...]


Show = Callable[[str, int, int], None]  # what runs, requests ended, of how many


def measure(
    plan: Plan, servers: Sequence[ServerInfo], show: Show = lambda what, done, total: None
) -> list[Result]:
    """All runs. The servers take turns, each is the first equally often, and all get the same text.

    Each repetition draws text anew, so that it is in nobody's cache. Raises WorkloadError where a prompt
    cannot fit the server's context.
    """
    for server in servers:
        _warm_up(plan, server, show)
    results = []
    for repetition in range(plan.repeat):
        shift = repetition % len(servers)
        order = [*servers[shift:], *servers[:shift]]
        for number, load in enumerate(plan.loads):
            seed = f"{plan.seed}/{repetition}/{number}"
            sessions = plan.workload.sessions(seed, plan.sessions, plan.sizes)
            for server in order:
                _check_fit(server, sessions)
                named = partial(show, f"{server.target.name}: {load}")
                run = run_load(server.target, sessions, load, plan.seed, named)
                found = summarize(run, plan.limits)
                results.append(Result(server.target.name, load, repetition, found, run.records))
    return results


def _warm_up(plan: Plan, server: ServerInfo, show: Show) -> None:
    if plan.warm_up:
        sessions = drawn_anew(plan.workload).sessions(f"{plan.seed}/warm-up", plan.warm_up, plan.sizes)
        once = [replace(session, turns=session.turns[:1], arrival=None) for session in sessions]
        named = partial(show, f"{server.target.name}: warm-up")
        run_load(server.target, once, Load(concurrency=1), plan.seed, named)


def _check_fit(server: ServerInfo, sessions: Sequence[Session]) -> None:
    """A first look, by words: the server has the last word."""
    if server.n_ctx is None:
        return
    for session in sessions:
        words = sum(len(str(m.get("content", "")).split()) for t in session.turns for m in t.messages)
        words += sum(turn.max_tokens for turn in session.turns)
        if words > server.n_ctx:
            raise WorkloadError(
                f"a session of about {words} tokens does not fit {server.target.name}'s context of "
                f"{server.n_ctx}; --prompt-tokens and --output-tokens set other lengths"
            )


def is_good(results: Sequence[Result]) -> bool:
    """Whether every request of every run was answered."""
    return all(not r.summary.failed for r in results)


def saturation(results: Sequence[Result], server: str) -> Load | None:
    """Of a sweep's loads in their order, the first after which tokens per second hardly grow.

    None where they still grow at the last, or there is but one. By the median over repetitions.
    """
    loads = list(dict.fromkeys(r.load for r in results))
    rates = [median_of(results, server, load, lambda s: s.output_rate) for load in loads]
    for load, rate, following in zip(loads, rates, rates[1:], strict=False):
        if following < GAIN * rate:
            return load
    return None


def median_of(
    results: Sequence[Result], server: str, load: Load, value: Callable[[Summary], float | None]
) -> float:
    """Over the repetitions; nan where nothing was measured."""
    found = [value(r.summary) for r in results if r.server == server and r.load == load]
    numbers = [v for v in found if v is not None]
    return statistics.median(numbers) if numbers else float("nan")


def ratios(
    results: Sequence[Result], server: str, base: str, load: Load, value: Callable[[Summary], float | None]
) -> tuple[float, float, float] | None:
    """(median, least, greatest) over repetitions of `server`'s value through `base`'s of the same run."""
    pairs: dict[int, dict[str, float]] = {}
    for r in results:
        number = value(r.summary)
        if r.load == load and number is not None:
            pairs.setdefault(r.repetition, {})[r.server] = number
    found = [pair[server] / pair[base] for pair in pairs.values() if pair.get(base) and server in pair]
    return (statistics.median(found), min(found), max(found)) if found else None


def as_record(plan: Plan, servers: Sequence[ServerInfo], results: Sequence[Result]) -> dict[str, Any]:
    """Everything that another person needs to repeat the benchmark and to check its numbers, for JSON.

    Of the requests it has times and counts, no text.
    """
    return {
        "hetero_bench": FORMAT,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": this_machine(),
        "plan": {
            "workload": plan.workload.name,
            "title": plan.workload.title,
            "prompt_tokens": _length(plan, "prompt"),
            "output_tokens": _length(plan, "output"),
            "loads": [asdict(load) for load in plan.loads],
            "sessions": plan.sessions,
            "warm_up": plan.warm_up,
            "repeat": plan.repeat,
            "seed": plan.seed,
            "limits": asdict(plan.limits),
        },
        "servers": [
            {"name": s.target.name, "model": s.target.model, "path": s.target.path, **s.about}
            for s in servers
        ],
        "good": is_good(results),
        "results": [
            {
                "server": r.server,
                "load": asdict(r.load),
                "repetition": r.repetition,
                "summary": asdict(r.summary),
                "requests": [_request(record) for record in r.records],
            }
            for r in results
        ],
    }


def _length(plan: Plan, which: str) -> str | None:
    own = getattr(plan.sizes, which) or getattr(plan.workload, which, None)
    return None if own is None else str(own)


def _request(record: Record) -> dict[str, Any]:
    found = asdict(record)
    del found["text"]
    return found


def run_of(record: dict[str, Any]) -> Run:
    """A run out of a record's result, so that its numbers can be worked out again."""
    requests = tuple(Record(**request) for request in record["requests"])
    return Run(requests, record["summary"]["seconds"])
