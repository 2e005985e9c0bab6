"""A scheduler over device blocks and slots in host memory, and prompts for it."""

from __future__ import annotations

from hetero.batch import Step
from hetero.kv.groups import KVGroup
from hetero.kv.host_tier import HostTier
from hetero.kv.manager import KVManager
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.scheduler import Scheduler

SIZE = 4


class World:
    """A scheduler that serves one request after the other, with steps that end at once."""

    def __init__(self, blocks: int, slots: int, window: int | None = None, budget: int = 64, depth: int = 1):
        groups = [KVGroup((0,), None, blocks + 1)]
        if window is not None:
            groups.append(KVGroup((1,), window, blocks + 1))
        self.kv = KVManager(groups, SIZE, 0, HostTier([slots] * len(groups)))
        self.s = Scheduler(self.kv, 8, budget, 10**6, depth)
        self.count = 0
        self.steps: list[Step] = []

    def add(self, tokens: list[int], max_tokens: int = 1, scope: str = "") -> Request:
        self.count += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"r{self.count}", list(tokens), params, cache_scope=scope)
        self.s.add(request)
        return request

    def step(self) -> Step:
        step = self.s.schedule()
        assert step is not None
        self.steps.append(step)
        self.s.check_invariants()
        self.end(step)
        return step

    def end(self, step: Step, failed: bool = False) -> None:
        self.s.update(step, [7 if due else None for due in step.sampled], failed=failed)
        self.s.check_invariants()

    def put(self, tokens: list[int], **given) -> Request:
        request = self.add(tokens, **given)
        while request.finish_reason is None:
            self.step()
        return request

    def moves(self) -> tuple[int, int]:
        return sum(len(s.spills) for s in self.steps), sum(len(s.loads) for s in self.steps)


A, B, C = ([k] * 16 + [9] for k in (1, 2, 3))  # four blocks, and a token that is computed
