"""The stages in a row. Steps go in at the front and come out, in order, at the end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import HostMemoryView, StageBackend
from hetero.batch import Batch
from hetero.pipeline.stage import Stage, StageTimes, StepState, compute, prepare
from hetero.pipeline.supervise import Supervised


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits float32 [L, n_vocab] of a step's `logits_rows`, or the error that it died of.

    Of a step that embeds: its rows float32 [T, n_embd] behind the last norm in place of logits.

    The arrays are the sampler's to modify until the next step is submitted. `argmax` is int32 [L]
    where the device has looked for the largest logits (-1: a row that is not finite). `stages` has
    what the step cost at each stage.
    """

    step_id: int
    logits: np.ndarray | None
    argmax: np.ndarray | None
    error: Exception | None
    stages: tuple[StageTimes, ...]


class Runner:
    """Keeps up to `depth` steps in flight, by default one per stage.

    A single stage is driven by the thread that waits for it: a thread of its own would add two
    hand-overs (0.2 ms, a thirtieth of a decode step of a small model) and nothing to overlap.
    """

    def __init__(self, backends: Sequence[StageBackend], depth: int = 0):
        self.backends = list(backends)
        # a single stage's results are used in place: the next step waits for them anyway
        self.depth = 1 if len(backends) == 1 else depth or len(backends)
        self._supervised = [b for b in backends if isinstance(b, Supervised)]
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
    def unavailable(self) -> str | None:
        """Why no step can run, in one line: a stage was lost. None while all are there. For any thread."""
        return next((reason for s in self._supervised if (reason := s.unavailable) is not None), None)

    @property
    def restarts(self) -> tuple[int, ...]:
        """How often each stage was lost and came back."""
        return tuple(b.restarts if isinstance(b, Supervised) else 0 for b in self.backends)

    @property
    def counters(self) -> tuple[dict[str, int], ...]:
        """StageBackend.counters of each stage."""
        return tuple(b.counters() for b in self.backends)

    @property
    def host_memories(self) -> tuple[HostMemoryView | None, ...]:
        """StageBackend.host_memory of each stage, as it is now."""
        return tuple(b.host_memory for b in self.backends)

    def acknowledge(self) -> None:
        """Say that nothing computed so far is relied on any more. A lost stage becomes available only after
        it. No step may be in flight."""
        assert self.in_flight == 0, "steps in flight rely on what was computed"
        for stage in self._supervised:
            stage.acknowledge()

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, whenever `unavailable` has changed."""
        for stage in self._supervised:
            stage.on_change = callback

    def submit(self, batch: Batch) -> None:
        """Start a step. The caller keeps `in_flight` below `depth`."""
        assert self.in_flight < self.depth, "more steps in flight than agreed"
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
            tuple(state.stages),
        )

    def close(self) -> None:
        """Stop the threads and free the devices; steps in flight are finished first."""
        for stage in self._stages:
            stage.close()
        for backend in self.backends:
            backend.close()
