"""Stages in child processes: the same bits as in this process, and what happens when a child goes away.

HETERO_TEST_SCALE=full kills and stops children 50 times instead of 6.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine.driver import BLOCK, Driver
from tiny_models import tiny_model

from backends.base import DeviceSpec, StageLost
from backends.ggml.devices import DeviceError, open_device
from backends.ggml.models.config import read_config
from backends.ggml.stage import GgmlStage, StageError, StageSpec
from hetero.engine import Engine
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.pipeline import child, isolated, pipe, supervise
from hetero.pipeline.channel import Kind
from hetero.pipeline.isolated import IsolatedStage
from hetero.pipeline.runner import Runner
from hetero.pipeline.supervise import Supervised
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.sampling.sampler import Sampler
from hetero.scheduler import Scheduler
from hetero.text.tokenizer import Tokenizer
from quant.gguf import open_gguf

ACCIDENTS = 50 if os.environ.get("HETERO_TEST_SCALE") == "full" else 6
NUM_BLOCKS, MAX_TOKENS, MAX_SEQS = 200, 64, 8
ONE_THREAD = DeviceSpec("CPU", threads=1)
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("isolated") / "tiny.gguf", n_layers=4)


def spec_of(path: Path, first: int = 0, last: int | None = None, depth: int = 1) -> StageSpec:
    n_layer = read_config(open_gguf(path)).n_layer
    group_of = dict.fromkeys(range(n_layer), 0)
    return StageSpec(first, last or n_layer, group_of, (NUM_BLOCKS,), MAX_TOKENS, MAX_TOKENS, depth)


def isolate(path: Path, spec: StageSpec, device: DeviceSpec = ONE_THREAD, **options) -> IsolatedStage:
    return IsolatedStage(path, read_config(open_gguf(path)), device, spec, **options)


def segments() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir() if p.name.startswith("psm_")} if folder.exists() else set()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- the same bits ---------------------------------------------------------------------------------


def greedy(driver: Driver, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """The tokens after `prompt`, and the logits of each of them."""
    table, ids, rows = list(range(1, 20)), list(prompt), []
    logits = driver.step([(table, 0, prompt)])[0]
    for _ in range(count):
        rows.append(logits[-1])
        ids.append(int(logits[-1].argmax()))
        logits = driver.step([(table, len(ids) - 1, ids[-1:])])[0]
    return ids[len(prompt) :], np.stack(rows)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "bytes"])
def test_the_same_bits_as_in_this_process(smollm2_path: Path, shared_memory: bool) -> None:
    before = segments()
    driver = Driver(smollm2_path, num_blocks=40, threads=1)
    prompt = list(range(1000, 1040))
    tokens, logits = greedy(driver, prompt, 12)
    spec, memory = driver.stage.spec, driver.stage.memory()
    driver.close()
    loaded: list[int] = []
    stage = isolate(smollm2_path, spec, progress=loaded.append, shared_memory=shared_memory)
    try:
        assert bool(stage._rings) is shared_memory
        assert stage.memory() == memory and sum(loaded) > 50e6
        driver.stage = stage  # type: ignore[assignment]
        assert segments() == before, "the names are gone as soon as both ends have the memory"
        again, rows = greedy(driver, prompt, 12)
        assert again == tokens and np.array_equal(rows, logits)
        assert stage.argmax is not None and stage.graph_seconds > 0
        stage.check()
        stage.check_invariants()
    finally:
        stage.close()
    assert not psutil.pid_exists(stage.pid or 0)


def test_hidden_rows_between_stages(model: Path) -> None:
    """Three stages in processes of their own, one layer in the middle, against one in this process."""
    config = read_config(open_gguf(model))
    whole = GgmlStage(open_gguf(model), config, open_device(ONE_THREAD), spec_of(model))
    parts = [isolate(model, spec_of(model, *cut, depth=3)) for cut in ((0, 2), (2, 3), (3, 4))]
    driver = Driver(model, num_blocks=NUM_BLOCKS, max_tokens=MAX_TOKENS, threads=1)
    driver.close()
    try:
        driver.stage = whole
        tokens, logits = greedy(driver, list(range(3, 40)), 20)
        driver.stage = InARow(parts)  # type: ignore[assignment]
        again, rows = greedy(driver, list(range(3, 40)), 20)
        assert again == tokens and np.array_equal(rows, logits)
    finally:
        for stage in (whole, *parts):
            stage.close()


class InARow:
    def __init__(self, stages: list[IsolatedStage]) -> None:
        self.stages = stages

    def prepare(self, batch, hidden) -> None:
        self.stages[0].prepare(batch, hidden)
        self.batch = batch

    def compute(self) -> np.ndarray:
        out = self.stages[0].compute()
        for stage in self.stages[1:]:
            stage.prepare(self.batch, out)
            out = stage.compute()
        return out


def test_too_little_shared_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = segments(), []

    def full(name: str, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipe, "_commit", full)
    stage = isolate(model, spec_of(model))
    try:
        assert len(calls) == 2 and not stage._rings and segments() == before
        stage.check()
    finally:
        stage.close()


def test_shared_memory_is_not_promised_beyond_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").exists() or not hasattr(os, "posix_fallocate"):
        pytest.skip("only Linux promises more")
    before, room = segments(), os.statvfs("/dev/shm")
    with pytest.raises(OSError):
        pipe.Ring(2, room.f_frsize * room.f_blocks)
    assert segments() == before


# -- errors ----------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="device CUDA7"):
        isolate(model, spec_of(model), DeviceSpec("CUDA7"))
    with pytest.raises(DeviceError, match=r"nothing\.gguf"):
        IsolatedStage(tmp_path / "nothing.gguf", read_config(open_gguf(model)), ONE_THREAD, spec_of(model))


def a_step(driver: Driver, first_token: int = 5) -> None:
    driver.step([([1, 2], 0, [first_token, 6, 7])])


@pytest.fixture
def driver(model: Path) -> Iterator[Driver]:
    driver = Driver(model, num_blocks=NUM_BLOCKS, max_tokens=MAX_TOKENS, threads=1)
    driver.close()
    driver.stage = isolate(model, spec_of(model))  # type: ignore[assignment]
    yield driver
    driver.stage.close()


class BadStage(GgmlStage):
    """The first token says what goes wrong."""

    FAIL, HANG, ABORT = 1, 2, 3

    def prepare(self, batch, hidden) -> None:
        super().prepare(batch, hidden)
        self.first_token = int(batch.input_ids[0])

    def compute(self) -> np.ndarray:
        if self.first_token == self.FAIL:
            raise StageError("out of\nmemory")
        if self.first_token == self.HANG:  # as ggml does when an RPC peer is stopped
            time.sleep(1000)
        if self.first_token == self.ABORT:
            context = self._lib.context(8)
            a, b = (self._lib.new_tensor_4d(context, 0, n, 1, 1, 1) for n in (3, 5))
            self._lib.mul_mat(context, a, b)
        return super().compute()


def bad_child(*arguments) -> None:
    """The main function of a child whose stage is a BadStage."""
    import backends.ggml.stage

    backends.ggml.stage.GgmlStage = BadStage  # type: ignore[misc]
    child.main(*arguments)


@pytest.fixture
def bad_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(isolated.child, "main", bad_child)
    whole, driver.stage = driver.stage, isolate(driver.gguf.path, driver.stage.spec)  # type: ignore[assignment]
    whole.close()
    return driver


def test_a_step_that_fails_there_is_an_error_here(bad_driver: Driver) -> None:
    a_step(bad_driver)
    with pytest.raises(StageError, match=r"^out of memory$"):
        a_step(bad_driver, BadStage.FAIL)
    a_step(bad_driver)


def test_a_step_that_hangs_while_the_process_lives(
    bad_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_step(bad_driver)
    a_step(bad_driver)
    monkeypatch.setattr(isolated, "STEP_SECONDS", 1.5)
    monkeypatch.setattr(isolated, "PATIENCE", 0.0)
    with pytest.raises(StageLost, match="a step has not ended after 2 s"):
        a_step(bad_driver, BadStage.HANG)


def test_an_assertion_of_ggml_is_passed_on(
    bad_driver: Driver, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StageLost, match=r"GGML_ASSERT\(ggml_can_mul_mat"):
        a_step(bad_driver, BadStage.ABORT)
    assert capfd.readouterr().err == "" and "GGML_ASSERT" in caplog.text


def test_a_step_outside_of_the_pools_ends_the_child(driver: Driver) -> None:
    with pytest.raises(StageLost, match="garbage came: a step reaches outside of the KV pools"):
        driver.step([([NUM_BLOCKS + 5], 0, [5, 6])])


def test_a_child_that_is_killed(driver: Driver) -> None:
    a_step(driver)
    os.kill(driver.stage.pid, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(StageLost, match="device CPU was lost: its process ended"):
            a_step(driver)
    with pytest.raises(StageLost):
        driver.stage.check()


@posix
@pytest.mark.parametrize("where", ["check", "step"])
def test_a_child_that_is_stopped(driver: Driver, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "PING_SECONDS", 0.2)
    a_step(driver)
    os.kill(driver.stage.pid, signal.SIGSTOP)
    with pytest.raises(StageLost, match="device CPU was lost: no answer for"):
        driver.stage.check() if where == "check" else a_step(driver)
    until(lambda: not psutil.pid_exists(driver.stage.pid) or zombie(driver.stage.pid))


def zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@posix
def test_a_send_that_hangs_is_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped child does not empty the pipe; the thread that sends then waits in the kernel."""
    monkeypatch.setattr(isolated, "STEP_SECONDS", 0.3)
    os.kill(driver.stage.pid, signal.SIGSTOP)
    errors: list[Exception] = []

    def fill() -> None:
        try:
            while True:
                driver.stage._send(Kind.PING, {"x": "y" * 60_000})
        except StageLost as error:
            errors.append(error)

    driver.stage._busy.acquire()  # as a step does
    thread = threading.Thread(target=fill)
    thread.start()
    while thread.is_alive():
        try:
            driver.stage.check()
        except StageLost:
            break
        time.sleep(0.05)
    thread.join(10)
    driver.stage._busy.release()
    assert len(errors) == 1


@pytest.mark.parametrize("frame", [b"", b"\xff[]", b"\x09" + b'{"kind":5,"header":{},"arrays":[["f4",[2]]]}'])
def test_a_child_that_is_sent_garbage_ends(driver: Driver, frame: bytes) -> None:
    driver.stage.channel._connection.send_bytes(frame)
    with pytest.raises(StageLost, match="device CPU was lost: garbage came"):
        a_step(driver)


# -- the parent goes away --------------------------------------------------------------------------

PARENT = """
import sys, time
from pathlib import Path
from backends.base import DeviceSpec
from backends.ggml.models.config import read_config
from backends.ggml.stage import StageSpec
from hetero.pipeline.isolated import IsolatedStage
from quant.gguf import open_gguf

if __name__ == "__main__":
    path = Path(sys.argv[1])
    spec = StageSpec(0, 4, dict.fromkeys(range(4), 0), (20,), 16, 16)
    stage = IsolatedStage(path, read_config(open_gguf(path)), DeviceSpec("CPU", threads=1), spec)
    print(stage.pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_child_does_not_outlive_its_parent(model: Path, tmp_path: Path, how: str) -> None:
    script, before = tmp_path / "parent.py", segments()
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(model), "60" if how == "killed" else "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline())
        if how == "killed":
            parent.kill()
        assert parent.stderr.read() == b"", "no complaint about leaked memory, no traceback"
        parent.wait(30)
    until(lambda: not psutil.pid_exists(pid) or zombie(pid), 10)
    assert segments() == before


# -- under load ------------------------------------------------------------------------------------


class Served:
    """An engine over supervised children, driven by a thread as AsyncEngine's is."""

    def __init__(self, model: Path, cuts: list[tuple[int, int]]):
        config = read_config(open_gguf(model))
        self.children: list[IsolatedStage] = []
        stages = []
        for first, last in cuts:
            spec = replace(spec_of(model, first, last, depth=len(cuts)), max_logits=MAX_SEQS)

            def make(spec: StageSpec = spec) -> IsolatedStage:
                self.children.append(isolate(model, spec))
                return self.children[-1]

            stages.append(Supervised(make, f"CPU{first}"))
        self.runner, sampler = Runner(stages), Sampler(config.n_vocab)
        sampler.warmup()
        kv = KVManager([KVGroup(tuple(range(config.n_layer)), None, NUM_BLOCKS)], BLOCK)
        scheduler = Scheduler(kv, MAX_SEQS, MAX_TOKENS, 512, self.runner.depth)
        self.engine = Engine(Tokenizer(model), scheduler, self.runner, sampler, BLOCK)
        self.ends: dict[str, OutputDelta] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def add(self, prompt: list[int]) -> str:
        request_id = f"r{self.count}"
        self.count += 1
        self.tokens[request_id] = []

        def sink(delta: OutputDelta) -> None:
            self.tokens[request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends[request_id] = delta

        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        self.engine.add(Request(request_id, list(prompt), params), sink)
        return request_id

    def finish(self) -> None:
        while self.engine.step():
            pass

    def alive(self) -> list[IsolatedStage]:
        return [c for c in self.children if c.lost is None]


PROMPTS = [[(7 * i + j * j) % 300 for j in range(10 + 9 * i)] for i in range(6)]


@posix
@pytest.mark.parametrize("cuts", [[(0, 4)], [(0, 2), (2, 4)]], ids=["one", "two"])
def test_children_killed_and_stopped_at_random_moments(
    model: Path, cuts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "PING_SECONDS", 0.3)
    monkeypatch.setattr(supervise, "CHECK_SECONDS", 0.3)
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    before, served, rng = segments(), Served(model, cuts), random.Random(1)
    engine = served.engine
    alone = []
    for prompt in PROMPTS:
        request_id = served.add(prompt)
        served.finish()
        alone.append(served.tokens[request_id])
        engine.scheduler.kv.clear_cache()
    assert all(len(tokens) == 24 for tokens in alone)
    lost = 0
    for accident in range(ACCIDENTS):
        asked = {}
        victim = rng.choice(served.alive())
        signal_number = signal.SIGSTOP if accident % 3 == 2 else signal.SIGKILL
        timer = threading.Timer(rng.uniform(0.0, 0.3), os.kill, (victim.pid, signal_number))
        timer.start()
        end = time.monotonic() + 30
        while served.runner.unavailable is None:
            for which in rng.sample(range(len(PROMPTS)), 3):
                asked[served.add(PROMPTS[which])] = which
            for _ in range(rng.randint(1, 12)):
                engine.step()
            assert time.monotonic() < end, "the loss was not noticed"
        served.finish()
        engine.check_invariants()
        assert all(total == free for total, free in engine.stats().kv_blocks)
        for request_id, which in asked.items():
            delta = served.ends[request_id]
            if delta.finish_reason is FinishReason.ERROR:
                assert delta.error is not None and "was lost" in delta.error
                assert served.tokens[request_id] == alone[which][: len(served.tokens[request_id])]
                lost += 1
            else:
                assert delta.finish_reason is FinishReason.LENGTH
                assert served.tokens[request_id] == alone[which]
        until(lambda: served.runner.unavailable is None, 30)
        request_id = served.add(PROMPTS[0])
        served.finish()
        assert served.tokens[request_id] == alone[0], "after it came back"
    assert lost >= ACCIDENTS and sum(served.runner.restarts) >= ACCIDENTS
    served.runner.close()
    assert not [c for c in served.children if psutil.pid_exists(c.pid or 0)]
    assert segments() == before


def test_a_child_lost_while_nothing_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    served = Served(model, [(0, 4)])
    request_id = served.add(PROMPTS[1])
    served.finish()
    changed = threading.Event()
    served.runner.watch(changed.set)
    os.kill(served.children[0].pid or 0, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    assert changed.wait(30) and "its process ended" in (served.runner.unavailable or "")
    served.finish()  # lets go of the cache
    until(lambda: served.runner.unavailable is None)
    again = served.add(PROMPTS[1])
    served.finish()
    assert served.tokens[again] == served.tokens[request_id]
    assert served.ends[again].num_cached_tokens == 0
    served.runner.close()


def test_a_stage_that_cannot_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is gone: the reason is shown for as long as that lasts."""
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    path = tiny_model(tmp_path / "there.gguf", n_layers=4)
    served = Served(path, [(0, 4)])
    path.rename(tmp_path / "away.gguf")
    served.children[0].channel.abort()
    until(lambda: "cannot be opened" in (served.runner.unavailable or ""))
    assert "there.gguf" in (served.runner.unavailable or "")
    served.finish()
    (tmp_path / "away.gguf").rename(path)
    until(lambda: served.runner.unavailable is None)
    request_id = served.add(PROMPTS[0])
    served.finish()
    assert served.ends[request_id].finish_reason is FinishReason.LENGTH
    served.runner.close()


def test_no_child_is_left() -> None:
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]
