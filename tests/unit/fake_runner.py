"""A device, a sampler and a tokenizer so small that an engine's whole behaviour can be foretold."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hetero.batch import Batch
from hetero.engine import Engine
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.pipeline.stage import StageTimes
from hetero.request import TokenLogprob
from hetero.sampling.sampler import Sampled
from hetero.scheduler import Scheduler

EOS = 256
N_VOCAB = 260
BLOCK_SIZE = 16


def following(token: int, position: int) -> int:
    """What the "model" writes after `token` at `position`: letters; "!" is followed by the end."""
    return EOS if token == ord("!") else 97 + (token * 31 + position * 7) % 26


def text_after(prompt: str, count: int) -> str:
    """The model's text, alone."""
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(following(ids[-1], len(ids) - 1))
    return bytes(ids[len(prompt) :]).decode()


class ByteTokenizer:
    eog_ids = frozenset({EOS})
    control_texts: Mapping[str, int] = {}
    control_pattern = re.compile(r"(?!)")

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        return list(text.encode())

    def encode_segments(self, segments: list[tuple[str, bool]], *, add_special: bool) -> list[int]:
        return list("".join(text for text, _ in segments).encode())


class ArgmaxSampler:
    """Greedy, mask-aware; fails a row on demand."""

    n_vocab = N_VOCAB
    poison: int | None = None  # the row's request ends with an error when this token comes

    def sample(self, logits, states, masks, argmax=None):
        assert logits.shape == (len(states), N_VOCAB)
        out = []
        for row, state, mask in zip(logits, states, masks, strict=True):
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:N_VOCAB]
                row = np.where(bits, row, -np.inf)
            token = int(row.argmax())
            if token == self.poison:
                out.append(Sampled(-1, error="poisoned"))
                continue
            state.accept(token)
            wanted = state.params.logprobs is not None
            out.append(Sampled(token, TokenLogprob(token, -0.5, []) if wanted else None))
        return out


@dataclass
class Result:
    step_id: int
    logits: np.ndarray | None
    error: Exception | None
    stages: tuple[StageTimes, ...] = ()
    argmax: np.ndarray | None = None


class FakeRunner:
    """Computes `following` at each logits row. `fail` makes steps fail, `gate` holds results back."""

    def __init__(self, depth: int = 1, step_seconds: float = 0.0):
        self.depth = depth
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.fail_steps = 0  # so many of the next steps fail
        self.explode: Exception | None = None  # raised by wait: a bug, not a device failure
        self.closed = False
        self.steps = 0
        self.unavailable: str | None = None  # as long as a test says so, and until it is acknowledged
        self.back = False
        self.changed: Callable[[], None] = lambda: None
        self._results: deque[Result] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._results)

    @property
    def restarts(self) -> tuple[int, ...]:
        return (0,) * self.depth

    @property
    def counters(self) -> tuple[dict[str, int], ...]:
        return ({},) * self.depth

    def acknowledge(self) -> None:
        assert not self._results
        if self.back:
            self.unavailable = None

    def watch(self, callback: Callable[[], None], /) -> None:
        self.changed = callback

    def submit(self, batch: Batch, /) -> None:
        assert len(self._results) < self.depth
        self.steps += 1
        if self.unavailable is not None:
            self._results.append(Result(batch.step_id, None, RuntimeError(self.unavailable)))
            return
        if self.fail_steps:
            self.fail_steps -= 1
            self._results.append(Result(batch.step_id, None, RuntimeError("out of\nmemory")))
            return
        if batch.embeds:  # a token's row is its id and position; of "?" it is not a number
            rows = np.stack([batch.input_ids, batch.positions], axis=1).astype(np.float32)
            rows[batch.input_ids == ord("?")] = np.nan
            self._results.append(Result(batch.step_id, rows, None))
            return
        logits = np.zeros((len(batch.logits_rows), N_VOCAB), np.float32)
        for row, at in zip(logits, batch.logits_rows, strict=True):
            row[following(int(batch.input_ids[at]), int(batch.positions[at]))] = 1
        seconds = self.step_seconds
        times = StageTimes(busy_seconds=seconds, graph_seconds=seconds / self.depth)
        self._results.append(Result(batch.step_id, logits, None, (times,) * self.depth))

    def wait(self, timeout: float | None = None, /) -> Result | None:
        if self.explode is not None:
            raise self.explode
        if not self.gate.wait(timeout):
            return None
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return self._results.popleft()

    def close(self) -> None:
        self.closed = True


def make_engine(
    runner: FakeRunner,
    *,
    num_blocks: int = 65,
    window: int | None = None,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    **options,
) -> Engine:
    groups = [KVGroup((0,), None, num_blocks)]
    if window is not None:
        groups.append(KVGroup((1,), window, num_blocks))
    scheduler = Scheduler(KVManager(groups, BLOCK_SIZE), max_num_seqs, 64, max_model_len, runner.depth)
    return Engine(ByteTokenizer(), scheduler, runner, ArgmaxSampler(), BLOCK_SIZE, **options)
