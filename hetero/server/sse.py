"""Answers that are written bit by bit: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from hetero.server.settings import ServerSettings

SSE = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"
COMMENT = ": keep-alive\n\n"  # what clients of server-sent events skip


class ClientGone(Exception):
    """The client closed the connection, or stopped reading for longer than `write_timeout`."""


class EventStream:
    """An answer in pieces. Its headers go out with `start`, before the first piece exists."""

    def __init__(self, request: web.Request, settings: ServerSettings, content_type: str = SSE) -> None:
        self._request = request
        self._timeout = settings.write_timeout
        self._writing_since: float | None = None
        self._wrote = 0.0  # when the last write ended
        self._watch: asyncio.TimerHandle | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would collect the stream otherwise
            }
        )

    async def start(self) -> None:
        await self.response.prepare(self._request)
        self._wrote = asyncio.get_running_loop().time()
        self._watch_writes()

    @property
    def silence(self) -> float:
        """Seconds since something was last written."""
        return asyncio.get_running_loop().time() - self._wrote

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def write(self, text: str) -> None:
        """Raises ClientGone. Writing also finds out that the client is gone: keep-alives are for that too."""
        if text:
            await self._watched(self.response.write(text.encode()))

    async def end(self) -> None:
        """Raises ClientGone: all that was written must be read first."""
        await self._watched(self.response.write_eof())

    async def _watched(self, writing: Awaitable[None]) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        try:
            await writing
        except ConnectionError as error:
            raise ClientGone from error
        finally:
            self._writing_since = None
            self._wrote = asyncio.get_running_loop().time()

    def _watch_writes(self) -> None:
        """Hang up on a client that has not read for `write_timeout`: the pending write then fails."""
        loop = asyncio.get_running_loop()
        stuck = self._writing_since is not None and loop.time() - self._writing_since >= self._timeout
        if stuck and self._request.transport is not None:
            self._request.transport.abort()
            return
        self._watch = loop.call_later(self._timeout / 2, self._watch_writes)


def event(data: str, name: str | None = None) -> str:
    """`data`, JSON on one line, as one server-sent event: exactly `data: {json}` and a blank line."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"
