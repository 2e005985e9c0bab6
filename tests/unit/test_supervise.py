"""Stages that are lost and come back, what the engine makes of it, and how long a step may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_runner import FakeRunner, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import StageLost
from hetero.engine import DEVICE_UNAVAILABLE
from hetero.pipeline import supervise
from hetero.pipeline.deadlines import (
    DRIVER_SECONDS,
    FIRST_SECONDS,
    NEW_PATIENCE,
    NEW_SECONDS,
    PATIENCE,
    STEP_SECONDS,
    Deadlines,
)
from hetero.pipeline.runner import Runner
from hetero.pipeline.supervise import Supervised
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams


class FakeStage:
    """Lost when a test says so."""

    graph_seconds, argmax = 0.0, None
    move_seconds, moved_bytes = 0.0, 0

    def __init__(self) -> None:
        self.lost: str | None = None
        self.closed = False
        self.steps = 0
        self.host_memory = object()

    def _require(self) -> None:
        assert not self.closed
        if self.lost is not None:
            raise StageLost(self.lost)

    def prepare(self, batch: object, hidden: np.ndarray | None) -> None:
        self._require()

    def compute(self) -> np.ndarray:
        self._require()
        self.steps += 1
        return np.zeros((1, 4), np.float32)

    check = _require

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def memory(self) -> dict[str, int]:
        return {"kv": 1}

    def close(self) -> None:
        self.closed = True


class Factory:
    """Makes stages, or fails with `error`."""

    def __init__(self) -> None:
        self.stages: list[FakeStage] = []
        self.error: Exception | None = None
        self.calls = 0

    def __call__(self) -> FakeStage:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.stages.append(FakeStage())
        return self.stages[-1]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    monkeypatch.setattr(supervise, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(supervise, "BACKOFF", (0.01, 0.02))
    return Factory()


@pytest.fixture
def stage(factory: Factory) -> Iterator[Supervised]:
    supervised = Supervised(factory, "X")
    yield supervised
    supervised.close()
    supervised.check_invariants()
    assert all(s.closed for s in factory.stages)


def run(stage: Supervised) -> np.ndarray:
    stage.prepare(None, None)  # type: ignore[arg-type]
    return stage.compute()


@pytest.mark.parametrize("where", ["prepare", "compute", "idle"])
def test_a_loss_is_noticed_and_mended(factory: Factory, stage: Supervised, where: str) -> None:
    changes = threading.Semaphore(0)
    stage.on_change = changes.release
    assert run(stage).shape == (1, 4) and stage.unavailable is None
    assert stage.host_memory is factory.stages[0].host_memory
    if where == "compute":
        stage.prepare(None, None)  # type: ignore[arg-type]
    factory.stages[0].lost = "X was lost"
    if where == "prepare":
        with pytest.raises(StageLost, match="X was lost"):
            stage.prepare(None, None)  # type: ignore[arg-type]
    elif where == "compute":
        with pytest.raises(StageLost, match="X was lost"):
            stage.compute()
    assert changes.acquire(timeout=10)
    assert stage.unavailable == "X was lost"
    stage.check_invariants()
    until(lambda: stage.restarts == 1)
    assert changes.acquire(timeout=10)
    assert stage.unavailable == "X was lost", "nobody has let go of what it held"
    assert stage.host_memory is None
    with pytest.raises(StageLost):
        stage.prepare(None, None)  # type: ignore[arg-type]
    stage.acknowledge()
    assert changes.acquire(timeout=10)
    assert stage.unavailable is None and run(stage).shape == (1, 4)
    assert stage.host_memory is factory.stages[1].host_memory
    assert stage.counters() == {"steps": 2}, "of both stages"
    assert factory.stages[0].closed and not factory.stages[1].closed
    stage.check_invariants()


def test_one_that_cannot_come_back_says_why_until_it_does(factory: Factory, stage: Supervised) -> None:
    factory.error = ValueError("no device\nnamed X")
    factory.stages[0].lost = "X was lost"
    until(lambda: stage.unavailable is not None)
    stage.acknowledge()
    until(lambda: factory.calls >= 5)
    assert stage.unavailable == "device X cannot be opened: no device named X"
    stage.check_invariants()
    factory.error = None
    until(lambda: stage.unavailable is None)
    assert stage.restarts == 1 and run(stage).shape == (1, 4)


def test_what_the_first_opening_raises_goes_to_the_caller(factory: Factory) -> None:
    factory.error = ValueError("no such device")
    with pytest.raises(ValueError, match="no such device"):
        Supervised(factory, "X")


def test_closing_while_it_is_being_opened(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CLOSE_SECONDS", 0.05)
    opening, go_on = threading.Event(), threading.Event()

    def slow() -> FakeStage:
        if factory.stages:
            opening.set()
            assert go_on.wait(10)
        return factory()

    stage = Supervised(slow, "X")
    factory.stages[0].lost = "X was lost"
    assert opening.wait(10)
    stage.close()
    go_on.set()
    until(lambda: len(factory.stages) == 2 and factory.stages[1].closed)


def test_the_runner_is_available_when_all_its_stages_are(factory: Factory) -> None:
    stages = [Supervised(factory, "A"), Supervised(factory, "B")]
    runner = Runner(stages)
    changed = threading.Event()
    runner.watch(changed.set)
    try:
        assert runner.unavailable is None and runner.restarts == (0, 0)
        factory.stages[1].lost = "B was lost"
        assert changed.wait(10)
        assert runner.unavailable == "B was lost"
        until(lambda: runner.restarts == (0, 1))
        assert runner.unavailable == "B was lost"
        runner.acknowledge()
        assert runner.unavailable is None
    finally:
        runner.close()


# -- the engine ------------------------------------------------------------------------------------


class Client:
    def __init__(self, engine, prompt: str, request_id: str) -> None:
        self.deltas: list[OutputDelta] = []
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(request_id, list(prompt.encode()), params), self.deltas.append)

    @property
    def end(self) -> OutputDelta:
        return self.deltas[-1]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_all_requests_end_when_a_stage_is_lost(depth: int, rounds: int) -> None:
    runner = FakeRunner(depth)
    engine = make_engine(runner, num_blocks=20, max_num_seqs=3)
    clients = [Client(engine, "some prompt", str(i)) for i in range(5)]  # two of them wait
    for _ in range(rounds):
        engine.step()
    runner.unavailable = "device X was lost"
    while engine.step():
        engine.check_invariants()
    for client in clients:
        assert client.end.finish_reason is FinishReason.ERROR
        assert client.end.error == "device X was lost" and client.end.error_code == DEVICE_UNAVAILABLE
    assert all(total == free for total, free in engine.stats().kv_blocks)
    late = Client(engine, "some prompt", "late")
    assert not engine.step() and late.end.error == "device X was lost"
    runner.back = True
    engine.step()  # as the engine's thread does when it is told of the change
    assert runner.unavailable is None
    again = Client(engine, "some prompt", "again")
    while engine.step():
        engine.check_invariants()
    assert again.end.finish_reason is FinishReason.LENGTH and again.end.num_cached_tokens == 0
    assert engine.failed_steps == 0


# -- how long a step may take ----------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100)), max_size=30), st.integers(1, 4096))
def test_deadlines_are_patient(steps: list[tuple[int, float]], tokens: int) -> None:
    deadlines = Deadlines(network=True)
    assert deadlines.seconds(tokens) == FIRST_SECONDS
    for i, (count, seconds) in enumerate(steps):
        deadlines.observe(count, seconds)
        deadlines.check_invariants()
        assert deadlines.seconds(count) >= (PATIENCE * seconds if i else FIRST_SECONDS)
    assert deadlines.seconds(tokens) >= STEP_SECONDS


def test_deadlines_of_a_quick_device_and_of_a_slow_one() -> None:
    quick, slow = Deadlines(network=True), Deadlines(network=True)
    for deadlines, seconds in ((quick, 0.005), (slow, 1.0)):
        for _ in range(3):
            deadlines.observe(1, seconds)
    assert quick.seconds(1) == STEP_SECONDS and slow.seconds(1) == PATIENCE
    assert quick.seconds(512) == NEW_SECONDS, "a size that is new"
    assert slow.seconds(512) == NEW_PATIENCE * 512
    quick.observe(512, 0.5)
    assert quick.seconds(512) == 10.0 and quick.seconds(256) == NEW_SECONDS
    quick.observe(1, 3.0)  # once, on a busy machine
    assert quick.seconds(1) == 60.0
    for _ in range(300):
        quick.observe(1, 0.005)
    assert quick.seconds(1) == STEP_SECONDS
    local = Deadlines()
    for _ in range(3):
        local.observe(1, 0.005)
    assert local.seconds(1) == local.seconds(512) == DRIVER_SECONDS, "it answers pings while it compiles"


# -- in any order ----------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """No step runs on a stage that is newer than what its caller has let go of."""

    def __init__(self) -> None:
        super().__init__()
        self._before = supervise.CHECK_SECONDS, supervise.BACKOFF
        supervise.CHECK_SECONDS, supervise.BACKOFF = 0.001, (0.001,)
        self.factory = Factory()
        self.stage = Supervised(self.factory, "X")
        self.trusted = self.factory.stages[0]  # what was computed is in it
        self.error = ValueError("not there")

    def teardown(self) -> None:
        self.stage.close()
        supervise.CHECK_SECONDS, supervise.BACKOFF = self._before
        assert all(s.closed for s in self.factory.stages)

    @rule()
    def step(self) -> None:
        try:
            run(self.stage)
        except StageLost:
            assert self.trusted.lost is not None
        else:
            assert self.factory.stages[-1] is self.trusted

    @rule()
    def lose(self) -> None:
        self.factory.stages[-1].lost = "X was lost"

    @rule()
    def let_go(self) -> None:
        if self.stage.unavailable is not None:
            self.stage.acknowledge()
            if self.factory.error is None:
                until(lambda: self.stage.unavailable is None or self.factory.stages[-1].lost)
            self.trusted = self.factory.stages[-1]

    @rule()
    def break_it(self) -> None:
        self.factory.error = self.error

    @rule()
    def mend_it(self) -> None:
        self.factory.error = None

    @rule()
    def wait(self) -> None:
        until(lambda: self.trusted.lost is None or self.stage.unavailable is not None)

    @invariant()
    def holds(self) -> None:
        self.stage.check_invariants()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
