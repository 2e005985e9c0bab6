"""Schemas that compile, and prove too complex in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hetero.request import FinishReason, OutputDelta

from .client import Client, Reply
from .fake_engine import FakeEngine
from .real import RealClient

MESSAGE = "response_format: it proved too complex in the middle of the answer (lexer error)"
TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 400},
    "/api/chat": {"messages": TURNS},
    "/api/generate": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
}


def error_in(path: str, answer: Any) -> dict[str, Any]:
    """What an error's object, or a stream's last one, says, under OpenAI's names."""
    if path.startswith("/api/"):
        return {"message": answer["error"]}
    return answer["response"]["error"] if "response" in answer else answer["error"]


def last_object(reply: Reply) -> Any:
    lines = [line for line in reply.text.splitlines() if line]
    return json.loads(lines[-1].removeprefix("data: "))


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_says_that_the_request_is_at_fault(
    client: Client, engine: FakeEngine, path: str
) -> None:
    engine.fail_after = 4
    engine.failure = OutputDelta(
        finish_reason=FinishReason.ERROR,
        error=MESSAGE,
        error_code="grammar_too_complex",
        error_field="response_format",
    )
    whole = await client.post(path, {**BODIES[path], "stream": False})
    assert whole.status == 400, whole.text
    streamed = await client.post(path, {**BODIES[path], "stream": True})
    assert streamed.status == 200
    for error in (error_in(path, whole.json), error_in(path, last_object(streamed))):
        assert error["message"] == MESSAGE
        assert error.get("type", "invalid_request_error") == "invalid_request_error"
        assert error.get("code", "grammar_too_complex") == "grammar_too_complex"
        assert error.get("param", "response_format") == "response_format"
    assert "[DONE]" not in streamed.text and "message_stop" not in streamed.text


# Short, but with a state for each set of places where its letters may have been.
SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string", "pattern": "^.*[a-m].{300}[n-z].{300}c$"}},
    "required": ["s"],
}


async def test_a_real_schema_that_is_too_complex(smollm2: RealClient) -> None:
    """The others in its batch answer as they would alone, its blocks come back, and the log has a line."""
    chat = {
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "temperature": 0,
        "max_tokens": 300,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
    other = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}
    alone = await smollm2.post("/v1/completions", other)
    path = "/v1/chat/completions"
    whole, streamed, format_, *others = await asyncio.gather(
        smollm2.post(path, {**chat, "response_format": wanted}),
        smollm2.post(path, {**chat, "response_format": wanted, "stream": True}),
        smollm2.post("/api/chat", {**chat, "format": SCHEMA, "stream": False}),
        smollm2.post("/v1/completions", other),
        smollm2.post("/v1/completions", other),
    )
    assert whole.status == 400, whole.text
    assert (whole.error["param"], whole.error["code"]) == ("response_format", "grammar_too_complex")
    assert last_object(streamed) == whole.json and streamed.text.count("data: ") > 3
    assert format_.status == 400 and format_.json["error"].startswith("format: "), format_.text
    for answer in others:
        assert answer.json["choices"] == alone.json["choices"]
    await smollm2.until_idle()
    await smollm2.check_alive()
    lines = [line for line in smollm2.server.log.splitlines() if "too complex" in line]
    assert len(lines) == 3 and all(line.startswith("WARNING ") for line in lines), lines
