"""Helpers that talk to a running server; they know nothing of the engine behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from hetero.server.app import ACTIVE, ServerSettings, create_app, serve


@dataclass
class Reply:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for its shape."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[Any]:
        return parse_events(self.text)


def parse_events(text: str) -> list[Any]:
    """JSON of each event, "[DONE]" as it is. Asserts the exact form: one `data: ` line and a blank line."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and not block.startswith("data:  ") and "\n" not in block, block
        events.append("[DONE]" if block == "data: [DONE]" else json.loads(block[6:]))
    return events


class Client:
    app: web.Application

    def __init__(self, host: str, port: int, stop: asyncio.Event, session: aiohttp.ClientSession) -> None:
        self.host, self.port, self.stop, self.session = host, port, stop, session

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def request(self, method: str, path: str, **kwargs: Any) -> Reply:
        async with self.session.request(method, self.base + path, **kwargs) as response:
            return Reply(response.status, response.headers, (await response.read()).decode())

    async def get(self, path: str, **kwargs: Any) -> Reply:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, body: Any, **kwargs: Any) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data=data, **kwargs)

    async def chat(self, **body: Any) -> Reply:
        return await self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body}
        )

    async def complete(self, **body: Any) -> Reply:
        return await self.post("/v1/completions", {"prompt": "hi", "max_tokens": 64, **body})

    async def raw(self, data: bytes, *, timeout: float = 10.0) -> bytes:
        """Bytes in, everything that comes back until the server closes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            try:
                await writer.drain()
                async with asyncio.timeout(timeout):
                    return await reader.read()
            except ConnectionError:
                return b""
        finally:
            writer.close()


@asynccontextmanager
async def running(engine: Any, **settings: Any) -> AsyncIterator[Client]:
    """A server on a free port over `engine`, as `serve` runs it, and a client."""
    server_settings = ServerSettings(**{"port": 0, "drain": 0.0, **settings})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    app = create_app(engine, server_settings)
    task = asyncio.create_task(
        serve(app, server_settings, on_ready=lambda *at: ready.set_result(at), stop=stop)
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(*ready.result(), stop, session)
            client.app = app
            yield client
    finally:
        stop.set()
        await task
        app[ACTIVE].check_invariants()


async def until(condition: Any, seconds: float = 3.0) -> None:
    """Wait for `condition()`; an AssertionError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
