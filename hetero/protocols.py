"""What the engine asks of the things that it is made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hetero.batch import Batch
from hetero.sampling.sampler import Sampled, SamplerState


class TokenizerLike(Protocol):
    @property
    def eog_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class GrammarLike(Protocol):
    def fill_mask(self, row: np.ndarray, /) -> None: ...

    def accept(self, token_id: int, /) -> bool: ...

    @property
    def is_finished(self) -> bool: ...


class StageTimesLike(Protocol):
    started: float
    queue_seconds: float
    busy_seconds: float
    graph_seconds: float
    bytes_in: int
    bytes_out: int
    move_seconds: float
    moved_bytes: int


class ResultLike(Protocol):
    @property
    def step_id(self) -> int: ...
    @property
    def logits(self) -> np.ndarray | None: ...
    @property
    def argmax(self) -> np.ndarray | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def stages(self) -> Sequence[StageTimesLike]: ...


class RunnerLike(Protocol):
    @property
    def depth(self) -> int: ...

    @property
    def unavailable(self) -> str | None:
        """Why no step can run: a stage was lost. Any thread may ask."""
        ...

    @property
    def restarts(self) -> Sequence[int]:
        """How often each stage was lost and came back."""
        ...

    @property
    def counters(self) -> Sequence[dict[str, int]]:
        """StageBackend.counters of each stage."""
        ...

    def acknowledge(self) -> None:
        """Nothing computed so far is relied on, so that a lost stage may come back. None in flight."""
        ...

    def watch(self, callback: Callable[[], None], /) -> None:
        """`callback` is called, from any thread, whenever `unavailable` has changed."""
        ...

    def submit(self, batch: Batch, /) -> None: ...

    def wait(self, timeout: float | None = None, /) -> ResultLike | None: ...

    def close(self) -> None: ...


class SamplerLike(Protocol):
    n_vocab: int

    def sample(
        self,
        logits: np.ndarray,
        states: Sequence[SamplerState],
        masks: Sequence[np.ndarray | None],
        argmax: np.ndarray | None = None,
        /,
    ) -> list[Sampled]: ...
