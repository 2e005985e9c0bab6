"""The stages in a row. Steps go in at the front and come out, in order, at the end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import StageBackend
from hetero.batch import Batch
from hetero.pipeline.stage import Stage, StepState


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits float32 [L, n_vocab] of a step's `logits_rows`, or the error that it died of.

    The array is the sampler's to modify; it is reused after as many further steps as the pipeline
    is deep. `graph_seconds` is the time devices computed, `busy_seconds` the same with transfers,
    one entry per stage.
    """

    step_id: int
    logits: np.ndarray | None
    error: Exception | None
    graph_seconds: float
    busy_seconds: tuple[float, ...]


class Runner:
    """Keeps up to `depth` steps in flight, one per stage."""

    def __init__(self, backends: Sequence[StageBackend]):
        self._done: queue.SimpleQueue[StepState] = queue.SimpleQueue()
        self.stages: list[Stage] = []
        deliver: Callable[[StepState], None] = self._done.put
        for index in reversed(range(len(backends))):
            stage = Stage(backends[index], deliver, f"stage-{index}")
            self.stages.insert(0, stage)
            deliver = stage.put
        self.in_flight = 0

    @property
    def depth(self) -> int:
        return len(self.stages)

    def submit(self, batch: Batch) -> None:
        """Start a step. The caller keeps `in_flight` below `depth`."""
        assert self.in_flight < self.depth, "more steps in flight than stages"
        self.in_flight += 1
        self.stages[0].put(StepState(batch))

    def wait(self, timeout: float | None = None) -> StepResult | None:
        """The oldest step's result, or None if it takes longer than `timeout` seconds."""
        assert self.in_flight > 0, "no step in flight"
        try:
            state = self._done.get(timeout=timeout)
        except queue.Empty:
            return None
        self.in_flight -= 1
        return StepResult(
            state.batch.step_id,
            state.output if state.error is None else None,
            state.error,
            state.graph_seconds,
            tuple(state.busy_seconds),
        )

    def close(self) -> None:
        """Stop the threads and free the devices; steps in flight are finished first."""
        for stage in self.stages:
            stage.close()
