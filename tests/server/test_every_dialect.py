"""On every route that generates: prompts that do not fit (case l01), and clients that leave (r02)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hetero.server.app import GENERATING

from .client import Client, until
from .fake_engine import FakeEngine

WORDS = "many words " * 200
TURNS = [{"role": "user", "content": WORDS}]
LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": WORDS},
    "/v1/responses": {"input": WORDS},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4000},
    "/api/chat": {"messages": TURNS},
    "/api/generate": {"prompt": WORDS},
    "/completion": {"prompt": WORDS},
    "/completions": {"prompt": WORDS},
    "/infill": {"input_prefix": WORDS, "input_suffix": ""},
    "/v1/embeddings": {"input": WORDS},
    "/api/embed": {"input": WORDS},
    "/api/embeddings": {"prompt": WORDS},
    "/embedding": {"content": WORDS},
    "/embeddings": {"input": WORDS},
}
TEXTS = [path for path in LONG if "embed" not in path]


def test_no_route_is_missing() -> None:
    assert LONG.keys() == {*GENERATING, "/v1/responses"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", LONG)
async def test_a_prompt_that_does_not_fit(
    client: Client, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.fills_in = True
    reply = await client.post(path, {**LONG[path], "stream": stream})
    assert reply.status == 400 and reply.headers["Content-Type"].startswith("application/json")
    assert str(engine.info.n_ctx) in reply.text and not engine.submitted, reply.text
    assert (await client.post(path, {**LONG[path], **short(path), "stream": False})).status == 200


def short(path: str) -> dict[str, Any]:
    """The same request with a prompt that fits."""
    turns, fields = [{"role": "user", "content": "few"}], LONG[path].items()
    return {name: turns if value == TURNS else "few" for name, value in fields if name != "max_tokens"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", TEXTS)
async def test_a_client_that_leaves(client: Client, engine: FakeEngine, path: str, stream: bool) -> None:
    engine.fills_in, engine.token_seconds, engine.script = True, 0.02, "a" * 10_000
    limit = {"max_tokens": 400, "n_predict": 400, "max_output_tokens": 400, "max_completion_tokens": 400}
    request = asyncio.create_task(client.post(path, {**LONG[path], **short(path), **limit, "stream": stream}))
    await until(lambda: engine.running)
    await asyncio.sleep(0.05)
    request.cancel()
    await until(lambda: not engine.running)
    assert engine.cancelled == 1


@pytest.mark.parametrize("path", TEXTS)
async def test_stops_are_bounded(client: Client, engine: FakeEngine, path: str) -> None:
    """Megabytes of a stop string, or of stop tokens, would keep everybody's steps waiting."""
    engine.fills_in = True
    name = {"/v1/messages": "stop_sequences"}.get(path, "stop")
    stops: list[dict[str, Any]] = [{name: ["x" * 5000]}, {name: ["a"] * 17}]
    if path != "/v1/messages":
        stops.append({"stop_token_ids": [1] * 1025})
    for wrong in stops:
        given: dict[str, Any] = {"options": wrong} if path.startswith("/api/") else wrong
        reply = await client.post(
            path, {**LONG[path], **short(path), "max_tokens": 4, **given, "stream": False}
        )
        assert reply.status == 400 and not engine.submitted, reply.text
        error = reply.json["error"]
        message = error if isinstance(error, str) else error["message"]
        prefix = "options." if path.startswith("/api/") else ""
        assert message.startswith(f"{prefix}{next(iter(wrong))}: ") and "at most" in message
