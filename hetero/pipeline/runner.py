"""The stages in a row. Steps go in at the front and come out, in order, at the end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import StageBackend
from hetero.batch import Batch
from hetero.pipeline.stage import Stage, StepState, compute, prepare


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits float32 [L, n_vocab] of a step's `logits_rows`, or the error that it died of.

    The arrays are the sampler's to modify until the next step is submitted. `argmax` is int32 [L]
    where the device has looked for the largest logits (-1: a row that is not finite).
    `graph_seconds` is the time that devices computed, `busy_seconds` the same with transfers, one
    entry per stage.
    """

    step_id: int
    logits: np.ndarray | None
    argmax: np.ndarray | None
    error: Exception | None
    graph_seconds: float
    busy_seconds: tuple[float, ...]


class Runner:
    """Keeps up to `depth` steps in flight, one per stage.

    A single stage is driven by the thread that waits for it: a thread of its own would add two
    hand-overs (0.2 ms, a thirtieth of a decode step of a small model) and nothing to overlap.
    """

    def __init__(self, backends: Sequence[StageBackend]):
        self.backends = list(backends)
        self._done: queue.SimpleQueue[StepState] = queue.SimpleQueue()
        self._stages: list[Stage] = []
        deliver: Callable[[StepState], None] = self._done.put
        for index in reversed(range(len(backends))) if len(backends) > 1 else ():
            stage = Stage(backends[index], deliver, f"stage-{index}")
            self._stages.insert(0, stage)
            deliver = stage.put
        self._enter = deliver
        self.in_flight = 0

    @property
    def depth(self) -> int:
        return len(self.backends)

    def submit(self, batch: Batch) -> None:
        """Start a step. The caller keeps `in_flight` below `depth`."""
        assert self.in_flight < self.depth, "more steps in flight than stages"
        self.in_flight += 1
        state = StepState(batch)
        if not self._stages:
            prepare(self.backends[0], state)
        self._enter(state)

    def wait(self, timeout: float | None = None) -> StepResult | None:
        """The oldest step's result, or None if a pipeline takes longer than `timeout` seconds."""
        assert self.in_flight > 0, "no step in flight"
        try:
            state = self._done.get(timeout=timeout)
        except queue.Empty:
            return None
        if not self._stages:
            compute(self.backends[0], state)
        self.in_flight -= 1
        return StepResult(
            state.batch.step_id,
            state.output if state.error is None else None,
            state.argmax if state.error is None else None,
            state.error,
            state.graph_seconds,
            tuple(state.busy_seconds),
        )

    def close(self) -> None:
        """Stop the threads and free the devices; steps in flight are finished first."""
        for stage in self._stages:
            stage.close()
        for backend in self.backends:
            backend.close()
