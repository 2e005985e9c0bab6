"""What a split is predicted to do: seconds of each stage, tokens per second, and the usual alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.plan.planner import Plan
from hetero.plan.problem import SplitProblem
from hetero.plan.split import Goal, Part, even_split, memory_split, rate, stage_seconds
from hetero.plan.times import costs, typical_context


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another split, as `hetero plan` compares it: layers of each device in stage order."""

    name: str
    layers: tuple[tuple[str, int], ...]
    tokens_per_second: float
    single_tokens_per_second: float
    short_by_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Decoding at `context` tokens: `stage_seconds` of a step of one micro-batch of `batch` requests.

    `tokens_per_second` of `requests` requests together, `single_tokens_per_second` of one alone.
    `measured` is False when devices' times were guessed.
    """

    measured: bool
    context: int
    requests: int
    batch: int
    micro_batches: int
    stage_seconds: tuple[float, ...]
    tokens_per_second: float
    single_tokens_per_second: float
    alternatives: tuple[Alternative, ...]


def forecast(problem: SplitProblem, plan: Plan, labels: Sequence[str]) -> Forecast:
    """Of a plan whose parts are the stages of `plan`; `labels` are the devices' names."""
    parts = [Part(s.index, *s.layers) for s in plan.stages]
    context = typical_context(plan.max_model_len)
    requests = max(1, min(problem.limits.max_num_seqs, plan.kv_tokens // context))
    goal = Goal("throughput", requests, problem.limits.pipeline_depth)
    return Forecast(
        measured=all(problem.times[p.device].measured for p in parts),
        context=context,
        requests=requests,
        batch=goal.batch(len(parts)),
        micro_batches=goal.micro_batches(len(parts)),
        stage_seconds=decode_seconds(problem, parts, goal.batch(len(parts)), context),
        tokens_per_second=_speed(problem, parts, requests, context),
        single_tokens_per_second=_speed(problem, parts, 1, context),
        alternatives=tuple(_alternatives(problem, parts, plan, labels)),
    )


def decode_seconds(
    problem: SplitProblem, parts: Sequence[Part], batch: int, context: float
) -> tuple[float, ...]:
    """Of each stage, for a step of `batch` sequences of one token at `context` tokens each."""
    return stage_seconds(parts, costs(problem.times, problem.classes, batch, context, 0.0))


def _speed(problem: SplitProblem, parts: Sequence[Part], requests: int, context: int) -> float:
    """Tokens per second of decoding."""
    goal = Goal("throughput", requests, problem.limits.pipeline_depth)

    def of(stages: int):
        return costs(problem.times, problem.classes, goal.batch(stages), context, 0.0)

    return 1.0 / max(rate(parts, of, goal).score, 1e-12)


def _alternatives(
    problem: SplitProblem, chosen: Sequence[Part], plan: Plan, labels: Sequence[str]
) -> list[Alternative]:
    devices, memory = len(labels), problem.memory(plan.kv_tokens)
    if devices == 1 or devices > memory.pieces:
        return []
    even, by_memory = even_split(memory), memory_split(memory)
    named = [("even", even), ("by memory", by_memory)]
    if even == by_memory:
        named = [("even, and by memory,", even)]
    found = []
    for name, parts in named:
        if list(parts) == list(chosen):
            continue
        made = problem.plan(parts)
        context = typical_context(made.max_model_len)
        requests = max(1, min(problem.limits.max_num_seqs, made.kv_tokens // context))
        found.append(
            Alternative(
                name,
                tuple((labels[p.device], p.last - p.first) for p in parts),
                _speed(problem, parts, requests, context),
                _speed(problem, parts, 1, context),
                made.short_by_bytes,
                made.kv_tokens,
            )
        )
    return found


__all__ = ["Alternative", "Forecast", "decode_seconds", "forecast"]
