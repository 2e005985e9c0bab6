"""A store of served text, shared by all requests, that proposes how text like it went on."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import store_file
from . import store_kernels as kernels
from .base import Draft
from .store_file import Content

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 14
SAVE_SECONDS = 300.0
_CHUNK = 128  # tokens learned while proposers wait: up to 0.1 ms
_QUEUED = 1 << 20  # tokens that wait to be learned at most


class Store:
    """A bounded memory of token sequences. `learn` and proposers may be used by any threads at once.

    Text is kept once: what is known already is only counted, and where it departs from that a short segment
    is added. The oldest text makes room for new; text that is seen again before that is written anew. The
    longest match wins; of variants the one confirmed more often, where a contradiction halves the count.

    Sequences are learned by a thread that the first one starts, so that nobody waits; proposers wait for the
    part it is at, 0.1 ms at most. Scopes see only their own text and share the room.
    """

    def __init__(
        self, vocab_size: int, capacity: int = 10_000_000, path: Path | None = None, fingerprint: bytes = b""
    ):
        """Room for `capacity` tokens at BYTES_PER_TOKEN. With `path`, restored from there and saved to it.

        `fingerprint`: what the meaning of token ids depends on. Raises ValueError for a vocabulary of more
        than 2**20 tokens.
        """
        if not 0 < vocab_size <= 1 << kernels.TOKEN_BITS:
            raise ValueError(f"a vocabulary of {vocab_size} tokens: the store takes up to 2**20")
        self.capacity, self.vocab_size = max(1024, capacity), vocab_size
        self.path, self._fingerprint = path, fingerprint
        self.learned_tokens = self.dropped_tokens = 0
        _compile()
        self._arrays = _empty(self.capacity)
        self._scopes: dict[str, int] = {}  # numbers, least recently learned first
        self._lock = threading.Lock()  # the arrays, for one kernel
        self._learning = threading.Lock()  # the same to write to, for one sequence; taken first
        self._queue: deque[tuple[np.ndarray, str]] = deque()
        self._queued = 0  # tokens in the queue, and those being learned
        self._changed = threading.Condition()
        self._closed = self._unsaved = False
        self._thread: threading.Thread | None = None
        if path is not None:
            self._restore(store_file.read(path, fingerprint, vocab_size))

    @property
    def held_tokens(self) -> int:
        return int(self._arrays[-1][kernels.HELD])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def proposer(self, scope: str = "") -> StoreProposer:
        """A proposer for one request."""
        return StoreProposer(self, scope)

    def learn(self, token_ids: Sequence[int] | np.ndarray, scope: str = "") -> bool:
        """Have a sequence learned soon; False if it was dropped because too much waits.

        Raises ValueError for a token outside the vocabulary.
        """
        tokens = self._checked(token_ids)
        with self._changed:
            if self._closed or self._queued + len(tokens) > _QUEUED:
                self.dropped_tokens += len(tokens)
                return False
            self._queue.append((tokens, scope))
            self._queued += len(tokens)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="spec-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def learn_now(self, token_ids: Sequence[int] | np.ndarray, scope: str = "") -> None:
        """Learn a sequence before returning. Raises ValueError for a token outside the vocabulary."""
        tokens = self._checked(token_ids)
        if len(tokens) <= kernels.SHORT:
            return
        with self._learning:
            number = self._number(scope)
            text = (tokens | np.int32(number << kernels.TOKEN_BITS)) + np.int32(1)
            cursor = np.array([-1, 0, 0])
            for stop in range(_CHUNK, len(text) + _CHUNK, _CHUNK):
                with self._lock:
                    kernels.learn(text, min(stop, len(text)), cursor, *self._arrays)
            self.learned_tokens += len(text)
            self._unsaved = True

    def propose(self, tokens: np.ndarray, scope: str, cursor: np.ndarray, max_tokens: int) -> Draft:
        """What follows int32 `tokens` [n]. `cursor`: a proposer's own, see `store_kernels`."""
        if max_tokens <= 0:
            return Draft([], 0)
        text, draft = np.empty(kernels.LOOK + max_tokens, np.int32), np.empty(max_tokens, np.int32)
        with self._lock:
            number = self._scopes.get(scope)
            if number is None:
                return Draft([], 0)
            drafted, context = kernels.propose(tokens, number, cursor, text, draft, *self._arrays)
        return Draft(draft[:drafted].tolist(), context)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was given to `learn` is learned; False when `timeout` seconds pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued, timeout)

    def save(self) -> bool:
        """Save to `path` if something was learned since; False and a warning in the log if that failed."""
        with self._learning:
            if self.path is None or not self._unsaved:
                return True
            try:
                store_file.write(self.path, self._fingerprint, self._content())
            except OSError as error:
                log.warning("the speculation store was not saved: %s", error)
                return False
            self._unsaved = False
            return True

    def close(self) -> None:
        """Learn what waits, save, and end the thread. No more is learned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.save()

    def _checked(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.array(token_ids, np.int32)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"token ids must be below {self.vocab_size}")
        return tokens

    def _work(self) -> None:
        saved = time.monotonic()
        while True:
            with self._changed:
                due = max(0.0, saved + SAVE_SECONDS - time.monotonic()) if self._unsaved else None
                self._changed.wait_for(lambda: self._queue or self._closed, due)
                job = self._queue.popleft() if self._queue else None
                if job is None and self._closed:
                    return
            if job is not None:
                self.learn_now(*job)
                with self._changed:
                    self._queued -= len(job[0])
                    self._changed.notify_all()
            if self._unsaved and time.monotonic() - saved >= SAVE_SECONDS:
                self.save()
                saved = time.monotonic()

    def _number(self, scope: str) -> int:
        """The scope's number: when all are taken, that of the one longest unused. Needs `_learning`."""
        with self._lock:
            number = self._scopes.pop(scope, None)
            if number is None:
                number = len(self._scopes)
            if number == kernels.SCOPES:
                number = self._scopes.pop(next(iter(self._scopes)))
                kernels.forget(number, self._arrays[0], self._arrays[-1])
            self._scopes[scope] = number
            return number

    def _content(self) -> Content:
        words, counts, _, _, state = self._arrays
        head = int(state[kernels.HEAD])
        oldest = np.concatenate([words[head:], words[:head]])
        counted = np.concatenate([counts[head:], counts[:head]])
        first = int(np.argmax(oldest != 0)) if oldest.any() else len(oldest)
        names = sorted(self._scopes, key=self._scopes.__getitem__)
        return Content(names, oldest[first:], counted[first:])

    def _restore(self, content: Content | None) -> None:
        if content is None:
            return
        words, counts, _, _, state = self._arrays
        n = min(len(content.words), self.capacity - 1)
        words[:n], counts[:n] = (
            content.words[len(content.words) - n :],
            content.counts[len(content.words) - n :],
        )
        state[kernels.HEAD] = n
        kernels.index_all(*self._arrays)
        self._scopes = {name: number for number, name in enumerate(content.scopes)}

    def check_invariants(self) -> None:
        """Raise AssertionError unless the arrays agree with each other. O(capacity)."""
        with self._learning, self._lock:
            words, counts, chain, index, state = self._arrays
            head, held = int(state[kernels.HEAD]), words[words != 0] - 1
            assert 0 <= head < self.capacity and words[head] == 0, "a gap is at the place to be written"
            assert state[kernels.HELD] == len(held)
            assert len(words) == len(counts) == len(chain) == self.capacity
            for places in (chain, index):
                assert places.min() >= 0 and places.max() <= self.capacity
            assert sorted(self._scopes.values()) == list(range(len(self._scopes)))
            if len(held):
                assert held.min() >= 0 and held.max() >> kernels.TOKEN_BITS < len(self._scopes)
                assert (held & ((1 << kernels.TOKEN_BITS) - 1)).max() < self.vocab_size


class StoreProposer:
    """Proposes what the store knows to follow one request's last tokens. Used by one thread at a time."""

    name = "store"

    def __init__(self, store: Store, scope: str = ""):
        self._store, self._scope = store, scope
        self._last = np.zeros(4 * kernels.LOOK, np.int32)
        self._size = 0
        self._cursor = np.array([-1, 0, 0])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next verified tokens: a sequence or int32 [n]. O(1): only the last are looked at."""
        self._cursor[kernels.SINCE] += len(token_ids)
        tokens = token_ids[-kernels.LOOK :]
        if self._size + len(tokens) > len(self._last):
            self._last[: kernels.LOOK] = self._last[self._size - kernels.LOOK : self._size]
            self._size = kernels.LOOK
        self._last[self._size : self._size + len(tokens)] = tokens
        self._size += len(tokens)

    def propose(self, max_tokens: int) -> Draft:
        """What followed text like the last tokens; empty where nothing like them is known.

        match_length: of the tokens before, how many are alike; at least 3, at most `kernels.LOOK`. It is 3
        for the continuation of an edited copy too.
        """
        last = self._last[max(0, self._size - kernels.LOOK) : self._size]
        return self._store.propose(last, self._scope, self._cursor, max_tokens)


@functools.cache
def _compile() -> None:
    """Compile the kernels, or load them, before anybody waits for them."""
    arrays, tokens = _empty(64), np.ones(20, np.int32)
    kernels.learn(tokens, 20, np.array([-1, 0, 0]), *arrays)
    text, draft = np.empty(kernels.LOOK + 1, np.int32), np.empty(1, np.int32)
    kernels.propose(tokens, 0, np.array([-1, 0, 0]), text, draft, *arrays)
    kernels.forget(0, arrays[0], arrays[-1])
    kernels.index_all(*_empty(64))


def _empty(capacity: int) -> tuple[np.ndarray, ...]:
    """words, counts, chain, index, state: memory that is taken when it is first written to."""
    return (
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.uint8),
        np.zeros(capacity, np.int32),
        np.zeros(5 * capacity // 4, np.int32),
        np.zeros(kernels.STATE, np.int64),
    )
