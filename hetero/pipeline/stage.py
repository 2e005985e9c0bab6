"""A pipeline stage: a backend's layers, and the thread that drives them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from backends.base import StageBackend
from hetero.batch import Batch


@dataclass(slots=True)
class StageTimes:
    """What a step cost at one stage: seconds and bytes.

    Busy is all of the stage's time, `graph_seconds` the part that the device computed; the rest is transfer.
    `started` is when it began, by time.monotonic().
    """

    started: float = 0.0
    queue_seconds: float = 0.0  # it waited for the stage
    busy_seconds: float = 0.0
    graph_seconds: float = 0.0
    bytes_in: int = 0  # hidden rows, or token ids
    bytes_out: int = 0  # hidden rows, or logits
    move_seconds: float = 0.0  # blocks went to host memory and came back, in part while the device computed
    moved_bytes: int = 0


@dataclass(slots=True)
class StepState:
    """A step on its way through the stages."""

    batch: Batch
    output: np.ndarray | None = None  # hidden rows between stages, logits after the last
    argmax: np.ndarray | None = None  # of the logits, from the last stage
    error: Exception | None = None
    stages: list[StageTimes] = field(default_factory=list)  # of those it has passed or is in
    queued_at: float | None = None  # when it came to the stage's queue


def prepare(backend: StageBackend, state: StepState) -> None:
    """Give a stage its inputs. A step that failed in an earlier stage passes through untouched."""
    start = time.perf_counter()
    waited = 0.0 if state.queued_at is None else start - state.queued_at
    times = StageTimes(started=time.monotonic(), queue_seconds=waited)
    state.stages.append(times)
    if state.error is None:
        try:
            backend.prepare(state.batch, state.output)
            times.bytes_in = (state.batch.input_ids if state.output is None else state.output).nbytes
        except Exception as error:  # the step is lost, its thread must live
            state.error = error
    times.busy_seconds = time.perf_counter() - start


def compute(backend: StageBackend, state: StepState) -> None:
    """Run what was prepared, unless that failed."""
    start, times = time.perf_counter(), state.stages[-1]
    if state.error is None:
        try:
            state.output = backend.compute()
            state.argmax = backend.argmax
            times.graph_seconds, times.bytes_out = backend.graph_seconds, state.output.nbytes
            times.move_seconds, times.moved_bytes = backend.move_seconds, backend.moved_bytes
        except Exception as error:
            state.error = error
    times.busy_seconds += time.perf_counter() - start


class Stage:
    """Takes steps in order, runs them on its backend in a thread of its own and hands them on."""

    def __init__(self, backend: StageBackend, deliver: Callable[[StepState], None], name: str):
        self._backend = backend
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[StepState | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, state: StepState) -> None:
        state.queued_at = time.perf_counter()
        self._inbox.put(state)

    def close(self) -> None:
        """Finish what was put, then stop the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (state := self._inbox.get()) is not None:
            prepare(self._backend, state)
            compute(self._backend, state)
            self._deliver(state)
