"""The split as a question: a model's sizes, devices' times and memory, and what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from hetero.plan.planner import (
    BLOCK_SIZE,
    Limits,
    ModelFacts,
    Place,
    Plan,
    gathered_bytes,
    layer_kv_bytes,
    make_plan,
    stage_compute_bytes,
    tokens_of_memory,
)
from hetero.plan.split import (
    Costs,
    CostsOf,
    Goal,
    Memory,
    Part,
    best_split,
    can_place,
    memory_split,
    rate,
)
from hetero.plan.times import DeviceTimes, step_costs, typical_context

TRIES = 4  # sizes of the KV cache that are weighed against speed


class SplitProblem:
    """`ordered`: all devices take part, in their order. `classes[i]` is layer i's class in `times`."""

    def __init__(
        self,
        facts: ModelFacts,
        limits: Limits,
        places: Sequence[Place],
        times: Sequence[DeviceTimes],
        classes: Sequence[int],
        objective: str,
        ordered: bool,
    ):
        self.facts, self.limits, self.places = facts, limits, tuple(places)
        self.times, self.classes, self.ordered = tuple(times), tuple(classes), ordered
        self.objective = objective
        self.goal = self.goal_of(limits.max_num_seqs)
        self.context = typical_context(limits.context(facts))

    def goal_of(self, requests: int) -> Goal:
        """What is minimised when so many requests are busy."""
        alone = self.objective == "latency"
        return Goal(self.objective, 1 if alone else requests, self.limits.pipeline_depth)

    def costs(self, goal: Goal) -> CostsOf:
        """Costs by the number of stages."""

        @cache
        def of(stages: int) -> Costs:
            return step_costs(self.times, self.classes, goal, stages, self.context)

        return of

    def memory(self, tokens: int) -> Memory:
        """What stages need with a KV cache of `tokens` tokens. No less than the plan will say."""
        facts, limits = self.facts, self.limits
        stages = len(self.places)
        inner = [stage_compute_bytes(facts, limits, p, False, stages) for p in self.places]
        at_end = [stage_compute_bytes(facts, limits, p, True, stages) for p in self.places]
        gathered = [gathered_bytes(facts, limits, p, tokens) for p in self.places]
        names = [p.memory for p in self.places]
        return Memory(
            layers=np.array(facts.layer_bytes) + np.array(layer_kv_bytes(facts, limits, tokens, self.places)),
            first=facts.embed_bytes,
            last=facts.head_bytes + max(0, *(e - i for e, i in zip(at_end, inner, strict=True))),
            fixed=np.array(inner) + np.array(gathered) + facts.common_bytes,
            limits=np.array([p.usable_bytes for p in self.places]),
            pools=tuple(names.index(name) for name in names),
            last_cut=facts.last_cut,
        )

    def plan(self, parts: Sequence[Part]) -> Plan:
        """The memory map of a split."""
        cuts = [(p.device, p.first, p.last) for p in parts]
        return make_plan(self.facts, self.places, cuts, self.limits)

    def choose(self) -> tuple[Part, ...]:
        """The split for the objective; where nothing fits, the one by memory, which is least short."""
        limits, facts = self.limits, self.facts
        least = limits.least_tokens(facts)
        if limits.kv_memory and not limits.kv_tokens:
            least = tokens_of_memory(facts, limits, self.places)
        elif self.objective == "capacity" and not limits.kv_tokens:
            least = self._most_tokens(least)
        first = self._best(least, self.goal)
        if first is None:
            return memory_split(self.memory(least))
        if limits.kv_tokens or limits.kv_memory or self.objective in ("latency", "capacity"):
            return first
        return self._weighed(first)

    def _best(self, tokens: int, goal: Goal) -> tuple[Part, ...] | None:
        split = best_split(self.costs(goal), self.memory(tokens), goal, self.ordered)
        return None if split is None else split.parts

    def _most_tokens(self, least: int) -> int:
        """The largest KV cache for which some split fits; `least` when none does."""
        low, high = least // BLOCK_SIZE, self.limits.most_tokens(self.facts) // BLOCK_SIZE
        while low < high:
            middle = (low + high + 1) // 2
            if can_place(self.memory(middle * BLOCK_SIZE), self.ordered):
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_SIZE

    def _weighed(self, first: tuple[Part, ...]) -> tuple[Part, ...]:
        """The fastest split leaves room for some requests only: a slower one with more room can serve more.

        Each split is judged with as many requests as its KV cache has room for.
        """

        def judged(parts: tuple[Part, ...]) -> tuple[float, int]:
            tokens = self.plan(parts).kv_tokens
            goal = self.goal_of(max(1, min(self.limits.max_num_seqs, tokens // self.context)))
            return rate(parts, self.costs(goal), goal).score, -tokens

        candidates = [first]
        held = self.plan(first).kv_tokens
        wanted = min(self.limits.most_tokens(self.facts), self.limits.max_num_seqs * self.context)
        for _ in range(TRIES):
            if wanted <= held:
                break
            goal = self.goal_of(max(1, wanted // self.context))
            parts = self._best(wanted // BLOCK_SIZE * BLOCK_SIZE, goal)
            if parts is not None:
                candidates.append(parts)
                break
            wanted //= 2
        return min(candidates, key=judged)


__all__ = ["SplitProblem"]
