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


class Connection(web.RequestHandler):
    """aiohttp's connection, which answers malformed HTTP in plain text, with a JSON answer instead."""

    __slots__ = ("_first_request_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first_request_timer = self._loop.call_later(HEADER_TIMEOUT, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._first_request_timer.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if not self._request_count and self.transport is not None:
            self.transport.close()

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

    __slots__ = ()

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, shutdown_timeout=SHUTDOWN_TIMEOUT)

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return Server(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=True,
            connection_options={
                "keepalive_timeout": KEEP_ALIVE_TIMEOUT,
                "lingering_time": LINGERING_TIME,
            },
        )
