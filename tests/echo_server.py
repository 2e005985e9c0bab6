"""A small OpenAI-compatible server for tests of clients: it counts, queues and fails as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from in_thread import in_thread

Behave = Callable[[int], str]  # of the request with this number: what happens to it


class Echo:
    """Answers `max_tokens` pieces of text, one request at a time, SECONDS each."""

    SECONDS = 0.02
    word = "w"

    def __init__(self, behave: Behave = lambda number: "well"):
        self.behave, self.bodies, self.running, self.most = behave, [], 0, 0
        self.turn = asyncio.Lock()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "echo", "meta": {"n_ctx": 4000}}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        how = self.behave(len(self.bodies))
        self.bodies.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.turn:
                await asyncio.sleep(self.SECONDS)
            if how == "500":
                return web.json_response({"error": "no"}, status=500)
            return await self._stream(request, body["max_tokens"], how)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, tokens: int, how: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict | str) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())

        for i in range(tokens if how != "short" else tokens - 1):
            if how == "hangs up" and i == tokens // 2:
                request.transport.abort()
                return response
            if how == "error" and i == tokens // 2:
                await send({"error": {"message": "device lost"}})
                return response
            if how == "rubbish" and i == tokens // 2:
                await send("{not json")
            await send({"choices": [{"delta": {"content": f"{self.word}{i} "}, "finish_reason": None}]})
        if how != "unfinished":
            await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
        count = tokens if how != "short" else tokens - 1
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        await send({"choices": [], "usage": usage})
        await send("[DONE]")
        return response


def serving(echo_of: Callable[[], Echo]) -> contextlib.AbstractContextManager[tuple[str, Echo]]:
    """Its URL, and the server, which is in a thread of its own."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[tuple[str, Echo]]:
        echo, app = echo_of(), web.Application()
        app.router.add_get("/v1/models", echo.models)
        app.router.add_post("/v1/chat/completions", echo.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", echo
        await runner.cleanup()

    return in_thread(serve)
