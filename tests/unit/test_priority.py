"""Requests with priorities: who is served first, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation import simulate

from hetero import queues
from hetero.admission import MAX_PREEMPTIONS
from hetero.batch import Step
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.queues import Queues
from hetero.request import Request, RequestStatus
from hetero.sampling.params import SamplingParams
from hetero.scheduler import Scheduler

SIZE, SEQS, BUDGET = 16, 4, 64


def request(name: str, prompt: int, output: int, priority: int = 0, pooling: str | None = None) -> Request:
    ids = [hash((name, i)) % 1000 for i in range(prompt)]
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(name, ids, params, priority=priority, pooling=pooling)


class World:
    """A scheduler with `depth` steps in flight. `waited`: steps until a first token was computed."""

    def __init__(self, tokens: int = 4096, depth: int = 1):
        self.depth = depth
        kv = KVManager([KVGroup((0,), None, tokens // SIZE + 1)], SIZE)
        self.scheduler = Scheduler(kv, SEQS, BUDGET, 1024, depth)
        self.flying: list[Step] = []
        self.steps = 0
        self.came: dict[str, int] = {}
        self.waited: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r)
            self.came[r.request_id] = self.steps

    def step(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.steps += 1
            self.flying.append(step)
            for r in step.requests:
                self.waited.setdefault(r.request_id, self.steps - self.came[r.request_id])
        if self.flying and (step is None or len(self.flying) == self.depth):
            oldest = self.flying.pop(0)
            due = zip(oldest.requests, oldest.sampled, strict=True)
            sampled = [7 if wanted and not r.embeds else None for r, wanted in due]
            stop = {
                r.request_id: "stop"
                for r, wanted in zip(oldest.requests, oldest.sampled, strict=True)
                if wanted and r.embeds
            }
            for r in self.scheduler.update(oldest, sampled, stop):  # type: ignore[arg-type]
                self.ended[r.request_id] = self.steps
        self.scheduler.check_invariants()
        return step

    def run(self) -> None:
        while self.scheduler.has_work or self.flying:
            self.step()
            assert self.steps < 20_000, "it does not end"


@pytest.mark.parametrize(("tokens", "depth", "most"), [(8192, 1, 1), (8192, 3, 4), (640, 1, 4), (640, 2, 6)])
def test_interactive_requests_wait_a_few_steps_in_a_flood(tokens: int, depth: int, most: int) -> None:
    world = World(tokens, depth)
    world.add(*(request(f"bulk{i}", 60 + i, 60, priority=10) for i in range(24)))
    for i in range(20):
        for _ in range(9):
            world.step()
        world.add(request(f"chat{i}", 30, 6))
    world.run()
    assert max(world.waited[f"chat{i}"] for i in range(20)) <= most
    assert len(world.ended) == 44
    equal = World(tokens, depth)
    equal.add(*(request(f"bulk{i}", 60 + i, 60) for i in range(24)), request("chat", 30, 6))
    equal.run()
    assert equal.waited["chat"] > 10 * most, "the flood was none"


def test_embeddings_give_way_too() -> None:
    world = World()
    world.add(*(request(f"bulk{i}", 500, 1, 1, "mean") for i in range(8)))
    world.step()
    world.add(*(request(f"chat{i}", 20, 30) for i in range(3)))
    world.run()
    assert max(world.waited[f"chat{i}"] for i in range(3)) <= 4
    assert max(world.ended[f"chat{i}"] for i in range(3)) < max(world.ended[f"bulk{i}"] for i in range(8))


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always more interactive requests than can run, for as long as there is background work."""
    monkeypatch.setattr(queues, "PATIENCE", 32)
    world, count = World(), 0
    world.add(*(request(f"bulk{i}", 100, 40, priority=1) for i in range(3)))
    while sum(name.startswith("bulk") for name in world.ended) < 3:
        while world.scheduler.num_running + world.scheduler.num_waiting < 3 * SEQS:
            count += 1
            world.add(request(f"chat{count}", 10, 20))
        step = world.step()
        assert step is not None
        bulk = [r for r in step.requests if r.priority]
        assert len(bulk) <= 1, "one at a time"
        assert world.steps < 3 * (32 + queues.LOOK_EVERY + 20 + 60), "background work starves"


def test_less_important_prompts_take_a_part_of_the_step() -> None:
    world = World()
    world.add(request("chat", 8, 40))
    world.step()
    world.add(request("bulk", 400, 4, priority=1), request("bulk2", 400, 4, priority=1))
    for _ in range(8):
        step = world.step()
        assert step is not None
        counts = zip(step.requests, step.num_scheduled_tokens, strict=True)
        assert sum(n for r, n in counts if r.priority) <= BUDGET // 4
        assert step.requests[0].request_id == "chat"
    world.run()


def test_blocks_are_taken_from_the_least_important() -> None:
    world = World(tokens=20 * SIZE)
    old, new = request("old", 60, 90, priority=1), request("new", 60, 90)
    world.add(old)
    for _ in range(4):
        world.step()
    world.add(new, request("newer", 60, 90))
    world.run()
    assert old.num_preemptions and not new.num_preemptions
    assert world.ended["new"] < world.ended["old"]


def test_who_gives_way_does_not_count_in_the_worst_case() -> None:
    """What is needed beside it to go to its end in any case: only by those that it may not displace."""
    waited = []
    for priority in (0, 1):
        world = World(tokens=10 * SIZE)
        world.add(request("bulk", 3 * SIZE, 6 * SIZE, priority=1))
        world.step()
        often = request("often", 2 * SIZE, 2 * SIZE, priority)
        often.num_preemptions = MAX_PREEMPTIONS
        world.add(often)
        world.run()
        waited.append(world.waited["often"])
        assert often.num_preemptions == MAX_PREEMPTIONS
    assert waited[0] == 1 and waited[1] > 20


def test_one_priority_changes_nothing() -> None:
    def play(priority: int) -> tuple[dict[str, int], dict[str, int]]:
        world = World(640)
        world.add(*(request(f"r{i}", 20 + 9 * i, 50, priority) for i in range(9)))
        world.run()
        return world.waited, world.ended

    assert play(0) == play(-7)


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_simulations_without_patience(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "PATIENCE", 2)
    monkeypatch.setattr(queues, "LOOK_EVERY", 1)
    for seed in range(start, start + 100):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"replay: simulation.simulate({seed}) with PATIENCE 2 and LOOK_EVERY 1")
            raise


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queues = Queues()
        self.count = self.step_id = 0

    @rule(priority=st.integers(-2, 2))
    def add(self, priority: int) -> None:
        self.count += 1
        self.queues.add(request(f"r{self.count}", 1, 1, priority), self.step_id)

    @precondition(lambda self: self.queues.waiting)
    @rule()
    def admit(self) -> None:
        first = self.queues.waiting[0]
        assert self.queues.admit() is first
        first.status = RequestStatus.RUNNING

    @precondition(lambda self: self.queues.running)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(range(len(self.queues.running))))
        victim = self.queues.running[-1] if not self.queues.mixed else self.queues.running[chosen]
        self.queues.put_back(victim, self.step_id)
        victim.status = RequestStatus.PREEMPTED

    @precondition(lambda self: self.queues.running or self.queues.waiting)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        everybody = [*self.queues.running, *self.queues.waiting]
        chosen = everybody[data.draw(st.sampled_from(range(len(everybody))))]
        self.queues.remove(chosen)
        self.queues.forget(chosen)
        self.queues.forget(chosen)

    @rule(steps=st.integers(1, 2 * queues.PATIENCE))
    def time_passes(self, steps: int) -> None:
        self.step_id += steps - (self.step_id + steps) % queues.LOOK_EVERY
        waiting = list(self.queues.waiting)
        self.queues.raise_one(self.step_id)
        raised = [r for r in self.queues.waiting if self.queues.level(r) == queues.RAISED]
        assert len(raised) <= 1 and set(map(id, waiting)) == set(map(id, self.queues.waiting))
        if (lesser := self.queues.lesser()) is not None:
            assert lesser.priority > self.queues.waiting[0].priority

    @invariant()
    def check(self) -> None:
        self.queues.check_invariants()


TestQueues = QueueMachine.TestCase
TestQueues.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
