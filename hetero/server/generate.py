"""One HTTP request's answers: several submits to the engine, streamed or collected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from hetero.request import FinishReason, OutputDelta, Timings, TokenLogprob
from hetero.server.errors import ApiError, as_api_error, encode, json_response
from hetero.server.settings import ServerSettings
from hetero.server.sse import ClientGone, EventStream
from hetero.server.timings import sum_of, timings_dict

if TYPE_CHECKING:
    from hetero.async_engine import RequestStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Collected:
    """All of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""


class Shape(Protocol):
    """How a route writes its answers. `object` and `chunk_object` are the API's names of the two forms."""

    object: str
    chunk_object: str

    def chunks(self, index: int, delta: OutputDelta, first: bool) -> Iterable[dict[str, Any]]:
        """Entries for `choices`, one chunk each. The one with a finish_reason comes last."""

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """The whole choice, for an answer in one piece."""


@dataclass(slots=True)
class Usage:
    """Token counts over all choices; each prompt counts once, however many answers it gets."""

    choices_per_prompt: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, index: int, last: OutputDelta) -> None:
        self.completion_tokens += last.num_output_tokens
        if index % self.choices_per_prompt == 0:
            self.cached_tokens += last.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Active:
    """The requests being answered and their streams, so that a drain can wait for them, then end them."""

    def __init__(self) -> None:
        self.draining = False
        self._requests = 0
        self._streams: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    def add(self, stream: RequestStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: RequestStream) -> None:
        self._streams.discard(stream)

    def abort_all(self) -> None:
        for stream in list(self._streams):
            stream.abort()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def check_invariants(self) -> None:
        assert self._idle.is_set() == (self._requests == 0)
        assert self._requests or not self._streams


class Generation:
    """The choices of one request. Leaving the `async with` aborts what still runs, for whatever reason."""

    def __init__(self, streams: list[RequestStream], active: Active) -> None:
        self._streams = streams
        self._active = active
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

    async def deltas(self, idle: float | None) -> AsyncIterator[tuple[int, OutputDelta] | None]:
        """(choice, delta) as they come; None when nothing has come for `idle` to twice `idle` seconds.

        Raises ApiError when a choice fails: 500 for an error of the engine, 503 when the server ended it
        or a device was lost.
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
                status = 500 if delta.error_code is None else 503
                code = delta.error_code or "generation_failed"
                raise ApiError(status, delta.error or "the generation failed", code=code)
            if delta.finish_reason == FinishReason.ABORT:
                raise ApiError(503, "the server is stopping and ended this request", code="aborted")
            running -= delta.finish_reason is not None
            yield index, delta


@dataclass(slots=True)
class Answer:
    """Writes a Generation in a Shape."""

    id: str
    model: str
    shape: Shape
    usage: Usage
    num_choices: int
    stream: bool
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    async def respond(
        self, request: web.Request, settings: ServerSettings, generation: Generation
    ) -> web.StreamResponse:
        async with generation:
            if self.stream:
                return await self._stream(EventStream(request, settings), generation, settings.keep_alive)
            return json_response(await self._collect(generation))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
        }  # fmt: skip

    async def _stream(
        self, events: EventStream, generation: Generation, keep_alive: float
    ) -> web.StreamResponse:
        shape, started = self.shape, set[int]()
        before, after = encode(self._envelope(shape.chunk_object, [])).rsplit("]", 1)
        try:
            await events.start()
            async for item in generation.deltas(keep_alive):
                if item is None:
                    await events.keep_alive()
                    continue
                index, delta = item
                chunks = shape.chunks(index, delta, index not in started)
                started.add(index)
                texts = [f"{before}{encode(chunk)}]{after}" for chunk in chunks]
                if delta.finish_reason is not None:
                    self.usage.add(index, delta)
                    if delta.timings is not None:
                        texts[-1] = f'{texts[-1][:-1]},"timings":{encode(timings_dict(delta.timings))}}}'
                await events.send(*texts)
            if self.include_usage:
                usage = {**self._envelope(shape.chunk_object, []), "usage": self.usage.as_dict()}
                await events.send(encode(usage))
            await events.done()
        except (ClientGone, ConnectionError):
            log.debug("%s: the client closed the stream", self.id)
        except Exception as error:
            try:
                await events.error(as_api_error(error))
            except (ClientGone, ConnectionError):
                log.debug("%s: the client closed the stream", self.id)
        finally:
            events.close()
        return events.response

    async def _collect(self, generation: Generation) -> dict[str, Any]:
        choices = [Collected() for _ in range(self.num_choices)]
        texts: list[list[str]] = [[] for _ in choices]
        timings: list[Timings] = []
        async for item in generation.deltas(None):
            assert item is not None
            index, delta = item
            texts[index].append(delta.text)
            choices[index].token_ids += delta.token_ids
            choices[index].logprobs += delta.logprobs
            if delta.finish_reason is not None:
                choices[index].finish_reason = delta.finish_reason.value
                self.usage.add(index, delta)
                if delta.timings is not None:
                    timings.append(delta.timings)
        for choice, pieces in zip(choices, texts, strict=True):
            choice.text = "".join(pieces)
        body = self._envelope(
            self.shape.object, [self.shape.choice(i, choice) for i, choice in enumerate(choices)]
        )
        body["usage"] = self.usage.as_dict()
        return {**body, "timings": timings_dict(sum_of(timings))} if timings else body
