"""Server-sent events: exactly `data: {json}` and a blank line, comments while nothing happens."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hetero.server.errors import ApiError, encode
from hetero.server.settings import ServerSettings

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream otherwise
}


class ClientGone(Exception):
    """The client closed the connection, or stopped reading for longer than `write_timeout`."""


class EventStream:
    """An SSE answer. Its headers go out with `start`, before the first event exists."""

    def __init__(self, request: web.Request, settings: ServerSettings) -> None:
        self._request = request
        self._timeout = settings.write_timeout
        self._writing_since: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.response = web.StreamResponse(headers=HEADERS)

    async def start(self) -> None:
        await self.response.prepare(self._request)
        self._watch_writes()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def send(self, *events: str) -> None:
        """Each event, JSON on one line, as a `data:` line; all in one write."""
        if events:
            await self._write("".join([f"data: {event}\n\n" for event in events]))

    async def keep_alive(self) -> None:
        """A comment, which clients skip; it also finds out that the client is gone."""
        await self._write(": keep-alive\n\n")

    async def done(self) -> None:
        await self.send("[DONE]")
        await self.response.write_eof()

    async def error(self, error: ApiError) -> None:
        """The last event of a stream that failed; no [DONE] follows."""
        await self.send(encode(error.body))
        await self.response.write_eof()

    async def _write(self, text: str) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        try:
            await self.response.write(text.encode())
        except ConnectionError as error:
            raise ClientGone from error
        finally:
            self._writing_since = None

    def _watch_writes(self) -> None:
        """Hang up on a client that has not read for `write_timeout`: the pending write then fails."""
        loop = asyncio.get_running_loop()
        stuck = self._writing_since is not None and loop.time() - self._writing_since >= self._timeout
        if stuck and self._request.transport is not None:
            self._request.transport.abort()
            return
        self._watch = loop.call_later(self._timeout / 2, self._watch_writes)
