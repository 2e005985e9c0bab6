"""Streams over time: disconnects, silence, failures in the middle, draining."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hetero.server.app import ACTIVE

from .client import Client, running, until
from .fake_engine import FakeEngine

LONG = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.token_seconds = 0.005
    return engine


async def open_request(
    client: Client, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_its_generation(
    client: Client, engine: FakeEngine, stream: bool, n: int
) -> None:
    """Case r02, both modes, every choice."""
    reader, writer = await open_request(client, {**LONG, "stream": stream, "n": n})
    if stream:
        await reader.readuntil(b'"content":"H"')
    await until(lambda: len(engine.running) == n)
    writer.close()
    await until(lambda: not engine.running, 1.0)
    assert engine.cancelled == n
    assert (await client.chat()).status == 200


async def test_a_client_that_leaves_during_the_prefill(client: Client, engine: FakeEngine) -> None:
    engine.prefill_seconds = 30
    reader, writer = await open_request(client, {**LONG, "stream": True})
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: engine.running)
    writer.transport.abort()
    await until(lambda: not engine.running, 1.0)


async def test_headers_at_once_and_comments_in_silence() -> None:
    engine = FakeEngine()
    engine.prefill_seconds = 0.3
    async with running(engine, keep_alive=0.05) as client:
        start = asyncio.get_running_loop().time()
        async with client.session.post(
            client.base + "/v1/chat/completions", json={**LONG, "stream": True, "max_tokens": 3}
        ) as response:
            assert asyncio.get_running_loop().time() - start < 0.25, "headers before the first token"
            text = (await response.read()).decode()
    before, _, after = text.partition("data: ")
    assert before.count(": keep-alive\n\n") >= 3 and before.replace(": keep-alive\n\n", "") == ""
    assert after.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("after", [0, 4])
async def test_a_failure_in_the_middle(client: Client, engine: FakeEngine, after: int) -> None:
    """llama.cpp PR#16109: the error is an event of its own, the last one."""
    engine.fail_after = after
    events = (await client.chat(stream=True, n=2)).events
    assert set(events[-1]) == {"error"} and events[-1]["error"]["message"] == "the device failed"
    assert "[DONE]" not in events
    reply = await client.chat()
    assert reply.status == 500 and reply.error["code"] == "generation_failed"
    engine.fail_after = -1
    assert (await client.chat()).status == 200


async def test_a_client_that_stops_reading_is_dropped() -> None:
    engine = FakeEngine(script="x" * 100)
    engine.info.n_ctx = 10**9
    async with running(engine, write_timeout=0.2) as client:
        _, writer = await open_request(client, {**LONG, "stream": True})
        await until(lambda: engine.running)
        await until(lambda: not engine.running, 15.0)
        writer.transport.abort()


async def test_a_client_that_does_not_read_the_end_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is full just when the last piece is written: its place is given back."""

    async def stuck(self: web.StreamResponse, data: bytes = b"") -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(web.StreamResponse, "write_eof", stuck)
    async with running(FakeEngine(), write_timeout=0.2) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.chat(stream=True)
        await until(lambda: not client.app[ACTIVE]._requests)


async def test_a_drain_ends_what_had_not_yet_begun() -> None:
    class SlowPrompts(FakeEngine):
        async def chat(self, messages: Any, **options: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().chat(messages, **options)

    engine = SlowPrompts()
    engine.token_seconds = 0.01
    async with running(engine, drain=0.0) as client:
        begun = asyncio.create_task(client.chat(ignore_eos=True))
        await until(lambda: client.app[ACTIVE]._requests)
        client.stop.set()
        reply = await begun
        assert reply.status == 503 and reply.error["code"] == "aborted"
        client.app[ACTIVE].check_invariants()


async def test_draining_lets_running_requests_finish() -> None:
    engine = FakeEngine()
    engine.token_seconds = 0.01
    async with running(engine, drain=20.0) as client:
        streamed = asyncio.create_task(client.chat(stream=True, max_tokens=15))
        whole = asyncio.create_task(client.chat(max_tokens=15))
        await until(lambda: len(engine.running) == 2)
        client.stop.set()
        await asyncio.sleep(0)
        await until(lambda: client.stop.is_set())
        reply = await client.get("/health")
        assert reply.status == 503 and "stopping" in reply.json["reason"]
        reply = await client.chat()
        assert reply.status == 503 and reply.error["code"] == "draining"
        assert (await streamed).events[-1] == "[DONE]" and (await whole).status == 200
    assert engine.cancelled == 0


async def test_a_drain_that_takes_too_long_ends_with_an_error_event() -> None:
    engine = FakeEngine()
    engine.token_seconds = 0.01
    async with running(engine, drain=0.1) as client:
        streamed = asyncio.create_task(client.chat(stream=True, ignore_eos=True))
        whole = asyncio.create_task(client.chat(ignore_eos=True))
        await until(lambda: len(engine.running) == 2)
        client.stop.set()
        assert (await streamed).events[-1]["error"]["code"] == "aborted"
        reply = await whole
        assert reply.status == 503 and reply.error["code"] == "aborted"
    assert not engine.running


async def test_a_taken_port_is_an_oserror() -> None:
    async with running(FakeEngine()) as client:
        with pytest.raises(OSError):
            async with running(FakeEngine(), port=client.port):
                pass
