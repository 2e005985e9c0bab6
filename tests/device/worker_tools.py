"""`hetero worker` as a process, stages on it, and the same computed here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from backends.base import RECURRENT, DeviceSpec, StageBackend
from backends.ggml.models import read_config
from backends.ggml.stage import StageSpec
from hetero.batch import Batch
from hetero.pipeline.part import ModelPart
from hetero.pipeline.remote import RemoteStage
from quant.gguf import open_gguf

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"a secret for tests only"
BLOCK = 16
BLOCKS = 64


class RunningWorker:
    """A worker that listens on loopback; `port` 0 takes a free one."""

    def __init__(self, folder: Path, *flags: str, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        secret = folder / "secret"
        secret.write_bytes(SECRET + b"\n")
        secret.chmod(0o600)
        self._log = folder / "log"
        command = [sys.executable, "-m", "cli", "worker", "--json", "--threads", "1"]
        command += ["--listen", f"127.0.0.1:{port}", "--secret-file", str(secret)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--cache-dir", str(folder / "cache"), *flags],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.facts = json.loads(line)
        (self.address,) = self.facts["listening"]
        self.port = int(self.address.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_log(self, *words: str, seconds: float = 90.0) -> str:
        """The first line that holds all of these."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.log.splitlines():
                if all(word in line for word in words):
                    return line
            assert time.monotonic() < deadline, (words, self.log)
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        """The worker's process and its children."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    @property
    def memory(self) -> int:
        """Resident bytes of the worker's own process."""
        return psutil.Process(self.process.pid).memory_info().rss

    def suspend(self) -> None:
        for process in self.family():
            process.suspend()

    def kill(self) -> None:
        """At once; its children notice, also those that were suspended."""
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for process in family[1:]:
            try:
                process.resume()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family[1:], 10)
        assert not [p for p in family[1:] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0
        assert "Traceback" not in self.log, self.log


@contextmanager
def running_worker(folder: Path, *flags: str) -> Iterator[RunningWorker]:
    worker = RunningWorker(folder, *flags)
    try:
        yield worker
        worker.stop()
    finally:
        if worker.process.poll() is None:
            worker.kill()
        assert worker.process.stdout is not None
        worker.process.stdout.close()


class Model:
    """A model file, and stages of it, one KV group per attention window."""

    def __init__(self, path: Path, max_tokens: int = 64) -> None:
        self.path, self.gguf = path, open_gguf(path)
        self.config = read_config(self.gguf)
        windows = sorted(
            set(self.config.layer_windows), key=lambda w: (w == RECURRENT, w is not None, w or 0)
        )
        self.group_of = {layer: windows.index(w) for layer, w in enumerate(self.config.layer_windows)}
        self.recurrent = RECURRENT in windows
        self.num_groups, self.max_tokens = len(windows) - self.recurrent, max_tokens

    def spec(self, first: int = 0, last: int | None = None, blocks: int = BLOCKS) -> StageSpec:
        last = self.config.n_layer if last is None else last
        groups = (blocks,) * self.num_groups
        spec = StageSpec(first, last, self.group_of, groups, self.max_tokens, self.max_tokens)
        return replace(spec, num_states=3 if self.recurrent else 0)

    def remote(
        self,
        worker: RunningWorker,
        first: int = 0,
        last: int | None = None,
        blocks: int = BLOCKS,
        host_slots: tuple[int, ...] = (),
        states: int | None = None,
    ) -> RemoteStage:
        spec = replace(self.spec(first, last, blocks), host_slots=host_slots)
        if states is not None:
            spec = replace(spec, num_states=states)
        part = ModelPart(self.gguf, self.config, spec.first, spec.last)
        return RemoteStage(part, self.config, DeviceSpec("CPU", worker=worker.address), spec, SECRET)

    def local(self) -> StageBackend:
        """All layers, in this process, on as many threads as the worker has."""
        import backends.cpu.jit  # noqa: F401
        from backends.ggml.devices import open_device
        from backends.ggml.stage import GgmlStage

        return GgmlStage(self.gguf, self.config, open_device("CPU", 1), self.spec())

    def batch(self, start: int, ids: list[int]) -> Batch:
        """Tokens `start` and on of one sequence, the logits of each wanted."""
        count = len(ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        table = np.arange(1, BLOCKS, dtype=np.int32)[None]
        slots = table[0][positions // BLOCK] * BLOCK + positions % BLOCK
        batch = Batch(
            step_id=0,
            input_ids=np.array(ids, np.int32),
            positions=positions,
            slot_mapping=[slots.astype(np.int32)] * self.num_groups,
            block_tables=[table] * self.num_groups,
            context_lens=np.array([start + count], np.int32),
            cu_seqlens_q=np.array([0, count], np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
            copies=[],
        )
        if self.recurrent:
            batch.state_sources = np.array([2 if start else 0], np.int32)
            batch.state_writes = np.array([[0, count, 2]], np.int32)
        return batch


def run(model: Model, stages: list[StageBackend], ids: list[int], chunk: int) -> np.ndarray:
    """Logits float32 [len(ids), n_vocab] through stages in a row, in chunks."""
    parts = []
    for start in range(0, len(ids), chunk):
        batch, hidden = model.batch(start, ids[start : start + chunk]), None
        for stage in stages:
            stage.prepare(batch, hidden)
            hidden = stage.compute()
        assert hidden is not None
        parts.append(hidden.copy())
    return np.concatenate(parts)


def greedy(model: Model, stages: list[StageBackend], ids: list[int], count: int) -> list[int]:
    """The next `count` likeliest tokens after `ids`."""
    logits = run(model, stages, ids, model.max_tokens)[-1]
    out = [int(logits.argmax())]
    while len(out) < count:
        start = len(ids) + len(out) - 1
        batch, hidden = model.batch(start, out[-1:]), None
        for stage in stages:
            stage.prepare(batch, hidden)
            hidden = stage.compute()
        assert hidden is not None
        out.append(int(hidden[-1].argmax()))
    return out


class Load:
    """Steps one after another in a thread, as a server does them. `steps` counts those that were right."""

    def __init__(self, stage: StageBackend, batch: Batch, expected: np.ndarray) -> None:
        self._stage, self._batch, self._expected = stage, batch, expected
        self.steps = self.wrong = 0
        self.errors: list[Exception] = []
        self.on_error: Callable[[], None] = lambda: None  # what a server does before it goes on
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._stage.prepare(self._batch, None)
                got = self._stage.compute()
            except Exception as error:
                self.errors.append(error)
                self.on_error()
                time.sleep(0.05)
                continue
            right = np.array_equal(got, self._expected)
            self.steps, self.wrong = self.steps + right, self.wrong + (not right)

    def wait_for(self, more: int, seconds: float) -> None:
        """Until `more` further steps were right."""
        goal, deadline = self.steps + more, time.monotonic() + seconds
        while self.steps < goal:
            assert time.monotonic() < deadline, (self.steps, goal, self.errors[-1:])
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "a step hangs"
