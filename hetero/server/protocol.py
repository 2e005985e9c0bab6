"""The connection level: errors below the routes as JSON, bounds on headers, nothing left open for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import http_exceptions, web

from hetero.server.errors import ApiError

HEADER_TIMEOUT = 30.0  # seconds that a new connection has for its first request's headers
KEEP_ALIVE_TIMEOUT = 75.0
LINGERING_TIME = 5.0  # for a client to read the error about a body that it is still sending
SHUTDOWN_TIMEOUT = 3.0
LEAST_READ = 1024  # bytes a second that a client takes of a whole answer


class Connection(web.RequestHandler):
    """aiohttp's connection, which answers malformed HTTP in plain text, with a JSON answer instead."""

    __slots__ = ("_first_request_timer", "_reading_timer", "_write_timeout")

    def __init__(self, *args: Any, write_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout = write_timeout

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first_request_timer = self._loop.call_later(HEADER_TIMEOUT, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._first_request_timer.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if not self._request_count and self.transport is not None:
            self.transport.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Hang up on a client that does not read its answer. (Streams have a watch of their own.)"""
        self._watch_reading(None)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._reading_timer.cancel()

    def _watch_reading(self, before: int | None) -> None:
        """`before`: the bytes that waited to be taken at the last look, None if there were none."""
        left = 0 if self.transport is None else self.transport.get_write_buffer_size()
        enough = LEAST_READ * self._write_timeout
        if before is not None and left > max(0.0, before - enough) and self.transport is not None:
            self.transport.abort()
        self._reading_timer = self._loop.call_later(self._write_timeout, self._watch_reading, left or None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; no error can follow")
        text = (message or "").strip().partition("\n")[0]
        if isinstance(exc, http_exceptions.LineTooLong) or "oo many headers" in text:
            status, text = 431, "the request's headers are too large or too many"
        elif status >= 500:
            self.log_exception("a request failed", exc_info=exc)
            text = "internal error; the server's log has the details"
        return ApiError(status, text or "malformed HTTP request", close=True).response()


class Server(web.Server):
    def __init__(self, *args: Any, connection_options: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection_options = connection_options

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._connection_options)


class Runner(web.AppRunner):
    """An AppRunner whose connections are `Connection`s and whose handlers are cancelled on a disconnect."""

    __slots__ = ("_write_timeout",)

    def __init__(self, app: web.Application, write_timeout: float) -> None:
        super().__init__(app, shutdown_timeout=SHUTDOWN_TIMEOUT)
        self._write_timeout = write_timeout

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return Server(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=True,
            connection_options={
                "keepalive_timeout": KEEP_ALIVE_TIMEOUT,
                "lingering_time": LINGERING_TIME,
                "write_timeout": self._write_timeout,
            },
        )
