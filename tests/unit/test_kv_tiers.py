"""Pools, tree, host memory and a tier below together, in any order of events that hypothesis can think of.

The device of the simulation knows what every block and slot holds: whoever attends anything but the KV
of its own prefix is caught. The same as test_scheduler_simulation.py, but failures shrink.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_cases import WINDOWS, Case
from simulation import Simulation

from hetero.kv.groups import KVGroup
from hetero.request import Request
from hetero.sampling.params import SamplingParams

STEMS = ([1] * 20, [1] * 8 + [2] * 12, [0, 1] * 10)
SPACE = st.sampled_from([0, 1, 4, 30])


class TierMachine(RuleBasedStateMachine):
    """A scheduler with tiers whose steps end when hypothesis says so, well or not."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        slots=st.tuples(SPACE, SPACE, SPACE),
        spare=st.integers(0, 12),
        depth=st.integers(1, 3),
        in_place=st.sampled_from([0, 0, 1, 4]),
        below=st.booleans(),
        drafts=st.booleans(),
        move_seconds=st.sampled_from([0, 0, 1, 30]),
    )
    def start(self, windows, slots, spare, depth, in_place, below, drafts, move_seconds) -> None:
        groups = [KVGroup((g,), window, 14 + spare) for g, window in enumerate(windows)]
        case = Case(groups, 2, depth, 3, 8, 24, [], [], in_place=in_place, drafts=drafts)
        case.host_slots, case.below, case.move_seconds = list(slots[: len(groups)]), below, move_seconds
        self.sim = Simulation(case, random.Random(0))
        self.count = 0

    @rule(stem=st.sampled_from(STEMS), cut=st.integers(1, 20), end=st.lists(st.integers(0, 2), max_size=3))
    def arrive(self, stem: list[int], cut: int, end: list[int]) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=1 + self.count % 4, ignore_eos=True)
        request = Request(f"r{self.count}", [*stem[:cut], *end], params)
        request.cache_scope = "other" if self.count % 5 == 0 else ""
        self.sim.todo.append((self.sim.now, request))
        self.sim._arrive()

    @precondition(lambda self: len(self.sim.flying) < self.sim.case.depth)
    @rule(fails=st.integers(0, 30))
    def schedule(self, fails: int) -> None:
        self.sim.case.failure_rate = float(fails == 30)
        self.sim._schedule()

    @precondition(lambda self: self.sim.flying)
    @rule()
    def collect(self) -> None:
        self.sim._collect()

    @rule()
    def run_for_a_while(self) -> None:
        self.sim.case.failure_rate = 0.0
        for _ in range(6):
            if len(self.sim.flying) >= self.sim.case.depth or not self.sim._schedule():
                if not self.sim.flying:
                    break
                self.sim._collect()

    @precondition(lambda self: self.sim.accepted)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        request = self.sim.accepted[-1 - which % len(self.sim.accepted)]
        if request.finish_reason is None:
            self.sim.cancelled.add(request.request_id)
            self.sim.scheduler.abort(request.request_id)

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.case.failure_rate = 0.0
            self.sim.run()


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
