"""A stage that comes back after it was lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np

from backends.base import BatchLike, HostMemoryView, StageBackend, StageLost

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # seconds before each attempt; the last one again and again
STEADY_SECONDS = 60.0  # a stage that lived this long starts again with the first
CLOSE_SECONDS = 5.0


class CheckedStage(StageBackend, Protocol):
    """A stage that lives elsewhere, as in hetero.pipeline.isolated."""

    def check(self) -> None:
        """From any thread, at any time. Raises StageLost."""
        ...


class Supervised:
    """A stage made by `factory`, which makes it anew in the background when it is lost.

    From the loss until both the new stage is there and `acknowledge` was called, `unavailable` says why and
    steps raise StageLost at once: what the caller still believes to be in the KV pools is not in the new
    ones. A thread looks after the stage every second, so that a loss is noticed between steps as well.
    The first stage is made by the constructor; what the factory raises then goes to the caller.
    """

    def __init__(self, factory: Callable[[], CheckedStage], label: str):
        self._factory, self.label = factory, label
        self.on_change: Callable[[], None] = lambda: None  # from any thread: `unavailable` has changed
        self.restarts = 0
        self._lock = threading.Lock()
        self._stage: CheckedStage | None = factory()
        self._current: CheckedStage | None = self._stage  # the step in flight is its
        self._lost: CheckedStage | None = None  # to be closed, which a step should not wait for
        self._counters: Counter[str] = Counter()  # of the stages that were lost
        self._memory = self._stage.memory()
        self._reason: str | None = None
        self._acknowledged = True
        self._attempts = 0
        self._since = time.monotonic()  # when the stage was made
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch-{label}", daemon=True)
        self._thread.start()

    @property
    def unavailable(self) -> str | None:
        """Why no step can run now, in one line, or None. Any thread may ask."""
        return self._reason

    def acknowledge(self) -> None:
        """Nothing that was computed before the loss is relied on any more, and no step is in flight."""
        with self._lock:
            self._acknowledged = True
            back = self._stage is not None and self._reason is not None
            if back:
                self._reason = None
        if back:
            self.on_change()

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """See base.StageBackend. Raises StageLost at once while the stage is not available."""
        with self._lock:
            stage, reason = self._stage, self._reason
        if stage is None or reason is not None:
            raise StageLost(reason or f"device {self.label} is closed")
        self._current = stage
        try:
            stage.prepare(batch, hidden)
        except StageLost as error:
            self._lose(stage, error)
            raise

    def compute(self) -> np.ndarray:
        """See base.StageBackend."""
        assert self._current is not None
        try:
            return self._current.compute()
        except StageLost as error:
            self._lose(self._current, error)
            raise

    @property
    def argmax(self) -> np.ndarray | None:
        return None if self._current is None else self._current.argmax

    @property
    def graph_seconds(self) -> float:
        return 0.0 if self._current is None else self._current.graph_seconds

    @property
    def move_seconds(self) -> float:
        return 0.0 if self._current is None else self._current.move_seconds

    @property
    def moved_bytes(self) -> int:
        return 0 if self._current is None else self._current.moved_bytes

    @property
    def host_memory(self) -> HostMemoryView | None:
        """Of the stage as it is now; None while no step can run."""
        with self._lock:
            return None if self._stage is None or self._reason is not None else self._stage.host_memory

    def memory(self) -> dict[str, int]:
        return dict(self._memory)

    def counters(self) -> dict[str, int]:
        """Over all stages so far."""
        with self._lock:
            total = Counter(self._counters)
            if self._stage is not None:
                total.update(self._stage.counters())
            return dict(total)

    def check(self) -> None:
        """See base.StageBackend."""
        with self._lock:
            stage, reason = self._stage, self._reason
        if stage is None or reason is not None:
            raise StageLost(reason or f"device {self.label} is closed")
        stage.check()

    def close(self) -> None:
        """No step may be in flight. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)  # it may be loading weights; then it closes what comes of that
        with self._lock:
            stage, self._stage, self._current = self._stage, None, None
        if stage is not None:
            stage.close()
        self._free_lost()

    def check_invariants(self) -> None:
        with self._lock:
            assert self._reason is not None or self._acknowledged
            assert self._lost is None or self._lost is not self._stage
            assert self._reason is not None or self._stage is not None or self._closing.is_set()

    def _lose(self, stage: CheckedStage, error: StageLost) -> None:
        with self._lock:
            if self._stage is not stage:
                return  # known already
            self._stage, self._reason, self._acknowledged = None, str(error), False
            self._lost = stage
            self._counters.update(stage.counters())
            if time.monotonic() - self._since > STEADY_SECONDS:
                self._attempts = 0
        log.error("%s; starting it again", error)
        self._wake.set()
        self.on_change()

    def _watch(self) -> None:
        while not self._closing.is_set():
            stage = self._stage
            if stage is not None:
                try:
                    stage.check()
                except StageLost as error:
                    self._lose(stage, error)
                    continue
                self._wake.wait(CHECK_SECONDS)
                self._wake.clear()
            else:
                self._free_lost()
                pause = BACKOFF[min(self._attempts, len(BACKOFF) - 1)]
                self._attempts += 1
                if not self._closing.wait(pause):
                    self._reopen()

    def _free_lost(self) -> None:
        with self._lock:
            stage, self._lost = self._lost, None
        if stage is not None:
            _close(stage)

    def _reopen(self) -> None:
        try:
            stage = self._factory()
        except Exception as error:  # whatever it is: it stays visible, and the next attempt comes
            text = " ".join(str(error).split())
            reason = text if isinstance(error, StageLost) else f"device {self.label} cannot be opened: {text}"
            if reason != self._reason:
                log.error("%s", reason)
            with self._lock:
                self._reason = reason
            return
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._stage, self._since = stage, time.monotonic()
                self.restarts += 1
                if self._acknowledged:
                    self._reason = None
        if closing:
            _close(stage)
            return
        log.warning("device %s is back", self.label)
        self.on_change()


def _close(stage: CheckedStage) -> None:
    try:
        stage.close()
    except Exception:  # it was lost: nothing depends on how it ends
        log.exception("closing a stage failed")
