"""A generation as an HTTP answer: streamed, or in one piece."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from hetero.server.collect import Collected, Piece
from hetero.server.errors import ApiError, as_api_error, json_response
from hetero.server.generate import Generation, Usage
from hetero.server.settings import ServerSettings
from hetero.server.sse import ClientGone, EventStream

log = logging.getLogger(__name__)


class Writer(Protocol):
    """How a route writes one answer. Each text is complete as sent: whole events, or whole lines."""

    content_type: str  # of a stream

    def begin(self) -> str:
        """Sent with the headers, before anything is computed."""

    def keep_alive(self) -> str:
        """Sent when nothing has happened for a while."""

    def piece(self, piece: Piece) -> str:
        """What is new."""

    def end(self, usage: Usage) -> str:
        """When all choices have ended."""

    def failure(self, error: ApiError) -> str:
        """The last words of a stream that failed."""

    def whole(self, choices: list[Collected], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""


@dataclass(slots=True)
class Answer:
    """A generation that has been started, and how it is to be written."""

    generation: Generation
    writer: Writer
    stream: bool

    async def respond(self, request: web.Request, settings: ServerSettings) -> web.StreamResponse:
        """Write it. Whatever happens, no choice runs on afterwards. Raises ApiError if not streaming."""
        async with self.generation:
            if not self.stream:
                choices = await self.generation.collect()
                return json_response(self.writer.whole(choices, self.generation.usage))
            return await self._stream(EventStream(request, settings, self.writer.content_type), settings)

    async def _stream(self, events: EventStream, settings: ServerSettings) -> web.StreamResponse:
        writer = self.writer
        try:
            try:
                await events.start()
                await events.write(writer.begin())
                async for piece in self.generation.pieces(settings.keep_alive):
                    text = "" if piece is None else writer.piece(piece)
                    # A piece may say nothing yet, and so may many: of a call that is only sent whole.
                    silent = events.silence >= settings.keep_alive
                    await events.write(text or (writer.keep_alive() if piece is None or silent else ""))
                await events.write(writer.end(self.generation.usage))
            except (ClientGone, ConnectionError):
                raise
            except Exception as error:
                await events.write(writer.failure(as_api_error(error)))
            await events.end()
        except (ClientGone, ConnectionError):
            log.debug("the client closed the stream")
        finally:
            events.close()
        return events.response
