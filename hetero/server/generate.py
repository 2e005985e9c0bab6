"""One HTTP request's answers while they are made: several submits to the engine, read as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero.request import CLIENT, FinishReason, OutputDelta, Timings
from hetero.server.collect import Collected, Piece
from hetero.server.errors import ApiError, as_api_error
from hetero.text.parts import PartsParser, ReasoningPart, TextPart

if TYPE_CHECKING:
    from hetero.async_engine import RequestStream


@dataclass(slots=True)
class Usage:
    """Token counts over all choices; each prompt counts once, however many answers it gets."""

    choices_per_prompt: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # those that came while an answer was reasoning
    timings: list[Timings] = field(default_factory=list)  # of the choices that have ended

    def add(self, piece: Piece) -> None:
        delta = piece.delta
        if piece.parts and isinstance(piece.parts[-1], ReasoningPart):
            self.reasoning_tokens += len(delta.token_ids)
        if piece.finish is None:
            return
        self.completion_tokens += delta.num_output_tokens
        if piece.index % self.choices_per_prompt == 0:
            self.cached_tokens += delta.num_cached_tokens
        if delta.timings is not None:
            self.timings.append(delta.timings)


class Active:
    """The requests being answered and their streams, so that a drain can wait for them, then end them.

    A client may have `client_limit` at a time, 0: any number.
    """

    def __init__(self, client_limit: int = 0) -> None:
        self.draining = False
        self._ending = False
        self._client_limit = client_limit
        self._by_client: Counter[str] = Counter()
        self._requests = 0
        self._streams: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While one is answered. ApiError 429 where its client has as many as it may."""
        client = CLIENT.get()
        if self._client_limit and self._by_client[client] >= self._client_limit:
            raise ApiError(
                429,
                f"this API key has {self._client_limit} requests running, as many as it may",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._requests += 1
        self._by_client[client] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
            if not self._requests:
                self._idle.set()

    def add(self, stream: RequestStream) -> None:
        """After `abort_all` it is ended at once: its prompt was still being made then."""
        self._streams.add(stream)
        if self._ending:
            stream.abort()

    def discard(self, stream: RequestStream) -> None:
        self._streams.discard(stream)

    def abort_all(self) -> None:
        """End all, and those that are added later."""
        self._ending = True
        for stream in list(self._streams):
            stream.abort()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def check_invariants(self) -> None:
        assert self._idle.is_set() == (self._requests == 0)
        assert sum(self._by_client.values()) == self._requests
        assert not self._client_limit or all(0 < n <= self._client_limit for n in self._by_client.values())
        assert self._requests or not self._streams


class Generation:
    """The choices of one request. Leaving the `async with` aborts what still runs, for whatever reason."""

    def __init__(
        self,
        streams: list[RequestStream],
        active: Active,
        usage: Usage,
        parsers: Sequence[PartsParser] | None = None,
        sent: Callable[[str, bool], None] = lambda request_id, whole: None,
        ended: Callable[[int, OutputDelta], None] | None = None,
    ) -> None:
        """`parsers`: one for each stream; without them all is text. `sent` is called with each request's id
        when the first text of its answer was written (False), and when all of it was (True); `ended` with a
        choice and its last delta."""
        self.usage = usage
        self.num_choices = len(streams)
        self._streams = streams
        self._parsers = parsers
        self._active = active
        self._sent, self._ended = sent, ended
        self._begun: set[int] = set()  # choices of which text was written
        self._items: deque[tuple[int, OutputDelta | Exception] | None] = deque()
        self._arrived = asyncio.Event()
        self._quiet = True  # nothing came since the last tick
        self._ticker: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        for index, stream in enumerate(self._streams):
            self._active.add(stream)
            self._tasks.append(asyncio.create_task(self._pump(index, stream)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for stream in self._streams:
            stream.abort()
            self._active.discard(stream)
            self._sent(stream.request_id, True)
        for task in self._tasks:
            task.cancel()

    async def _pump(self, index: int, stream: RequestStream) -> None:
        try:
            ended = False
            async for delta in stream:
                self._put((index, delta))
                ended = delta.finish_reason is not None
            if not ended:
                self._put((index, OutputDelta(finish_reason=FinishReason.ABORT)))
        except Exception as error:
            self._put((index, error))

    def _put(self, item: tuple[int, OutputDelta | Exception] | None) -> None:
        self._items.append(item)
        self._quiet = False
        self._arrived.set()

    def _tick(self, idle: float) -> None:
        if self._quiet:
            self._put(None)
        self._quiet = True
        self._ticker = asyncio.get_running_loop().call_later(idle, self._tick, idle)

    async def pieces(self, idle: float | None = None) -> AsyncIterator[Piece | None]:
        """What is new, as it comes; None when nothing has come for `idle` to twice `idle` seconds.

        Raises ApiError when a choice fails: 500 for an error of the engine, 503 when the server ended it
        or a device was lost, 400 for what turned out not to be possible as asked.
        """
        if idle is not None:  # one timer for the whole stream: one for each token costs a third more
            self._ticker = asyncio.get_running_loop().call_later(idle, self._tick, idle)
        running = len(self._streams)
        while running:
            while not self._items:
                self._arrived.clear()
                await self._arrived.wait()
            item = self._items.popleft()
            if item is None:
                yield None
                continue
            index, delta = item
            if isinstance(delta, Exception):
                raise as_api_error(delta)
            if delta.finish_reason == FinishReason.ERROR:
                raise _failure(delta)
            if delta.finish_reason == FinishReason.ABORT:
                raise ApiError(503, "the server is stopping and ended this request", code="aborted")
            running -= delta.finish_reason is not None
            piece = self._piece(index, delta)
            self.usage.add(piece)
            if piece.finish is not None and self._ended is not None:
                self._ended(index, delta)
            yield piece
            if piece.parts and index not in self._begun:
                self._begun.add(index)
                self._sent(self._streams[index].request_id, False)

    def _piece(self, index: int, delta: OutputDelta) -> Piece:
        finish = None if delta.finish_reason is None else delta.finish_reason.value
        if self._parsers is None:
            return Piece(index, [TextPart(delta.text)] if delta.text else [], delta, finish)
        parser = self._parsers[index]
        parts = parser.push(delta.text) if delta.text else []
        if finish is not None:
            parts = [*parts, *parser.finish()]
            if parser.called_tools and delta.finish_reason == FinishReason.STOP:
                finish = "tool_calls"
        return Piece(index, parts, delta, finish)

    async def collect(self) -> list[Collected]:
        """All choices, when all have ended. Raises as `pieces` does."""
        choices = [Collected() for _ in self._streams]
        self._begun.update(range(len(choices)))  # nothing is written before the end
        async for piece in self.pieces():
            assert piece is not None
            choices[piece.index].add(piece)
        return choices


def _failure(last: OutputDelta) -> ApiError:
    status = 400 if last.error_field is not None else 500 if last.error_code is None else 503
    return ApiError(
        status,
        last.error or "the generation failed",
        param=last.error_field,
        code=last.error_code or "generation_failed",
    )
