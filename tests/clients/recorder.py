"""A server between a client and hetero that hands everything on and writes down what was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from in_thread import in_thread

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass
class Exchange:
    """One request, and what came back: `answer` is the whole body, of a stream too."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    size: int
    status: int = 0
    answer: str = ""
    left: bool = False  # the client did not wait for the end

    @property
    def line(self) -> str:
        kind = " streamed" if isinstance(self.body, dict) and self.body.get("stream") else ""
        gone = ", client left" if self.left else ""
        return f"{self.method} {self.path} ({self.size:,} bytes{kind}): {self.status}{gone}"


@dataclass
class Recorder:
    """The exchanges so far, in the order in which they began."""

    base: str
    exchanges: list[Exchange] = field(default_factory=list)

    def to(self, path: str) -> list[Exchange]:
        return [e for e in self.exchanges if e.method == "POST" and e.path.partition("?")[0] == path]

    def write(self, folder: Path) -> None:
        for i, exchange in enumerate(self.exchanges):
            (folder / f"{i:02}.json").write_text(json.dumps(vars(exchange), indent=1))


async def _hand_on(request: web.Request, target: str, recorder: Recorder) -> web.StreamResponse:
    data = await request.read()
    try:
        body = json.loads(data) if data else None
    except ValueError:
        body = data.decode("utf-8", "replace")
    exchange = Exchange(request.method, request.path_qs, dict(request.headers), body, len(data))
    recorder.exchanges.append(exchange)
    headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
    async with (
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout()) as session,
        session.request(request.method, target + request.path_qs, data=data, headers=headers) as source,
    ):
        exchange.status = source.status
        response = web.StreamResponse(status=source.status)
        response.headers.extend((n, v) for n, v in source.headers.items() if n.lower() not in HOP)
        try:
            await response.prepare(request)
            async for piece in source.content.iter_any():
                exchange.answer += piece.decode("utf-8", "replace")
                await response.write(piece)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            exchange.left = True
            raise
        return response


@asynccontextmanager
async def _proxy(target: str) -> AsyncIterator[Recorder]:
    recorder = Recorder("")
    app = web.Application(client_max_size=1 << 26)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await _hand_on(request, target, recorder)

    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        recorder.base = f"http://{host}:{port}"
        yield recorder
    finally:
        await runner.cleanup()


def recording(target: str) -> AbstractContextManager[Recorder]:
    """In a thread of its own, for the length of the block."""
    return in_thread(lambda: _proxy(target))
