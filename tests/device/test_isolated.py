"""Stages in child processes: the same bits as in this process, and errors that stay in the child."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine.driver import Driver
from isolated_tools import (
    MAX_TOKENS,
    NUM_BLOCKS,
    ONE_THREAD,
    gone,
    isolate,
    posix,
    segments,
    spec_of,
    until,
)
from tiny_models import tiny_model

from backends.base import DeviceSpec, StageLost
from backends.ggml.devices import DeviceError, open_device
from backends.ggml.models.config import read_config
from backends.ggml.stage import GgmlStage, StageError
from hetero.pipeline import channel_stage, child, deadlines, isolated, pipe
from hetero.pipeline.channel import Kind
from hetero.pipeline.isolated import IsolatedStage
from quant.gguf import open_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("isolated") / "tiny.gguf", n_layers=4)


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
    driver = Driver(smollm2_path, num_blocks=40, threads=1)
    prompt = list(range(1000, 1040))
    tokens, logits = greedy(driver, prompt, 12)
    spec, memory, counters = driver.stage.spec, driver.stage.memory(), driver.stage.counters()
    driver.close()
    loaded: list[int] = []
    stage = isolate(smollm2_path, spec, progress=loaded.append, shared_memory=shared_memory)
    try:
        assert bool(stage._rings) is shared_memory
        assert stage.memory() == memory and sum(loaded) > 50e6
        driver.stage = stage  # type: ignore[assignment]
        assert not segments(), "the names are gone as soon as both ends have the memory"
        again, rows = greedy(driver, prompt, 12)
        assert again == tokens and np.array_equal(rows, logits)
        assert stage.argmax is not None and stage.graph_seconds > 0 and stage.counters() == counters
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


@pytest.mark.parametrize(("room", "slots"), [(1 << 20, 2), (100_000, 2), (0, 0)], ids=["all", "less", "none"])
def test_too_little_shared_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, room: int, slots: int
) -> None:
    """What does not fit goes through the pipe, here 40 rows of logits where there is less or none."""

    def commit(name: str, size: int) -> None:
        if size > room:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipe, "_commit", commit)
    stage, driver = isolate(model, spec_of(model)), Driver(model, num_blocks=NUM_BLOCKS, threads=1)
    try:
        assert len(stage._rings) == slots and not segments()
        fits = bool(slots) and stage._rings[1].slot_bytes >= 40 * 4 * driver.config.n_vocab
        assert fits == (room == 1 << 20)
        expected = driver.step([([1, 2, 3], 0, range(3, 43))])[0]
        driver.close()
        driver.stage = stage  # type: ignore[assignment]
        assert np.array_equal(driver.step([([1, 2, 3], 0, range(3, 43))])[0], expected)
    finally:
        stage.close()


def test_shared_memory_is_not_promised_beyond_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").exists() or not hasattr(os, "posix_fallocate"):
        pytest.skip("only Linux promises more")
    room = os.statvfs("/dev/shm")
    with pytest.raises(OSError):
        pipe.Ring(2, room.f_frsize * room.f_blocks)
    assert not segments()


# -- errors ----------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="device CUDA7"):
        isolate(model, spec_of(model), DeviceSpec("CUDA7"))
    with pytest.raises(DeviceError, match=r"nothing\.gguf"):
        IsolatedStage(tmp_path / "nothing.gguf", read_config(open_gguf(model)), ONE_THREAD, spec_of(model))


def a_step(driver: Driver, first_token: int = 9) -> None:
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

    FAIL, HANG, ABORT, CHECK_HANGS, CHECK_FAILS = range(1, 6)
    first_token = 0

    def prepare(self, batch, hidden) -> None:
        super().prepare(batch, hidden)
        self.first_token = int(batch.input_ids[0])

    def check(self) -> None:
        if self.first_token == self.CHECK_HANGS:
            time.sleep(1000)
        if self.first_token == self.CHECK_FAILS:
            raise StageError("out of\norder")

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
    monkeypatch.setattr(deadlines, "DRIVER_SECONDS", 1.5)
    monkeypatch.setattr(deadlines, "PATIENCE", 0.0)
    with pytest.raises(StageLost, match="a step has not ended after 2 s"):
        a_step(bad_driver, BadStage.HANG)


@pytest.mark.parametrize(
    ("token", "why"),
    [(BadStage.CHECK_HANGS, "its device does not answer after 2 s"), (BadStage.CHECK_FAILS, "out of order")],
)
def test_a_device_that_is_gone_while_nothing_runs(
    bad_driver: Driver, monkeypatch: pytest.MonkeyPatch, token: int, why: str
) -> None:
    monkeypatch.setattr(channel_stage, "DEVICE_SECONDS", 1.5)
    a_step(bad_driver)
    bad_driver.stage.check()
    a_step(bad_driver, token)
    with pytest.raises(StageLost, match=why):
        bad_driver.stage.check()


def test_an_assertion_of_ggml_is_passed_on(
    bad_driver: Driver, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(StageLost, match=r"device CPU was lost: GGML_ASSERT\(ggml"),
    ):
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
    monkeypatch.setattr(channel_stage, "PING_SECONDS", 0.2)
    a_step(driver)
    os.kill(driver.stage.pid, signal.SIGSTOP)
    with pytest.raises(StageLost, match="device CPU was lost: no answer for"):
        for _ in range(100):  # its threads stop one by one
            driver.stage.check() if where == "check" else a_step(driver)
    until(lambda: gone(driver.stage.pid))


@posix
def test_a_send_that_hangs_is_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped child does not empty the pipe; the thread that sends then waits in the kernel."""
    monkeypatch.setattr(deadlines, "STEP_SECONDS", 0.3)
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
    script = tmp_path / "parent.py"
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
    until(lambda: gone(pid), 10)
    assert not segments(parent.pid)
