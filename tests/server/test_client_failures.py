"""What other servers were reported to get wrong for editors and agents, a test for each report.

Embeddings have their own file.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from .background import CLOCK, HERMES, WEATHER
from .client import Client, running, until
from .fake_engine import FakeEngine
from .real import RealClient

USER = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat",
)  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
# The same request to every route that has conversations.
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 300},
    OLLAMA: {"messages": [USER]},
}


def saying(path: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    name = "input" if path == RESPONSES else "messages"
    return {**ROUTES[path], name: list(messages), **more}


def asking_for(path: str, tokens: int, **more: Any) -> dict[str, Any]:
    if path == OLLAMA:
        return {**ROUTES[path], "options": {"num_predict": tokens}, **more}
    return {**ROUTES[path], "max_output_tokens" if path == RESPONSES else "max_tokens": tokens, **more}


async def test_vllm_44000_ollama_16372_a_system_message_in_the_middle(
    client: Client, engine: FakeEngine
) -> None:
    system = {"role": "system", "content": "S"}
    reply = await client.post(MESSAGES, saying(MESSAGES, USER, system, USER, system="First"))
    assert reply.status == 200
    assert engine.rendered[-1][0][0] == {"role": "system", "content": "First\n\nS"}
    assert [m["role"] for m in engine.rendered[-1][0][1:]] == ["user"], "turns of one role are one"


async def test_llamacpp_20156_lmstudio_1383_tools_of_unknown_types(
    client: Client, engine: FakeEngine
) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace"}, {"type": "function", "name": "f"}, {"type": None}]
    reply = await client.post(RESPONSES, {"input": "hi", "tools": tools})
    assert reply.status == 200
    assert [tool["function"]["name"] for tool in engine.asked["tools"]] == ["f"]


async def test_codex_35758_models_are_also_under_models(client: Client) -> None:
    body = (await client.get("/v1/models")).json
    assert [m["name"] for m in body["models"]] == [m["id"] for m in body["data"]] == ["fake-model"]
    # Codex says who it is, and fails on entries without a prompt for its agent; none are fine.
    assert (await client.get("/v1/models?client_version=0.171.0")).json == {**body, "models": []}


async def test_codex_finds_an_ollama_new_enough(client: Client) -> None:
    """`codex exec --oss` refuses any before 0.13.4, the first with responses."""
    version = (await client.get("/api/version")).json["version"]
    assert tuple(int(part) for part in version.split(".")) >= (0, 13, 4)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_llamacpp_16048_15443_usage_only_where_it_is_asked_for(client: Client, options: Any) -> None:
    chunks = (await client.chat(stream=True, stream_options=options)).events[:-1]
    with_usage = [c for c in chunks if c.get("usage")]
    if options == {"include_usage": True}:
        assert with_usage == [chunks[-1]] and chunks[-1]["choices"] == []
        chunks.pop()
    else:
        assert with_usage == []
    assert all(c["choices"] for c in chunks)


@pytest.fixture
def calling(engine: FakeEngine) -> FakeEngine:
    engine.template_source, engine.script = HERMES, f"{WEATHER}\n{CLOCK}\n{WEATHER}"
    return engine


async def test_ollama_7881_15457_vercel_14722_opencode_20719_streamed_calls(
    client: Client, calling: FakeEngine
) -> None:
    """Indexes 0, 1, 2; the name in a call's first delta and never null; the end is `tool_calls`."""
    events = (await client.chat(stream=True, tools=[TOOL])).events[:-1]
    choices = [event["choices"][0] for event in events]
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
    seen: list[int] = []
    for delta in deltas:
        if delta["index"] not in seen:
            assert delta["id"] and delta["type"] == "function"
            assert delta["function"] == {"name": ["get_weather", "get_time"][len(seen) % 2], "arguments": ""}
            seen.append(delta["index"])
        else:
            assert set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
    assert seen == [0, 1, 2] and [delta["index"] for delta in deltas] == sorted(d["index"] for d in deltas)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    message = (await client.chat(tools=[TOOL])).json["choices"][0]
    assert message["finish_reason"] == "tool_calls" and message["message"]["content"] is None
    assert len({call["id"] for call in message["message"]["tool_calls"]}) == 3


async def test_lmstudio_261_llamacpppython_1805_content_null_beside_calls(
    client: Client, engine: FakeEngine
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "18"}
    assert (await client.chat(messages=[USER, said, result], tools=[TOOL])).status == 200
    assert engine.rendered[-1][0][1]["content"] == ""


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_sglang_40082_developers_are_heard_first(client: Client, engine: FakeEngine, path: str) -> None:
    first, late = {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}
    assert (await client.post(path, saying(path, first, USER, late))).status == 200
    assert engine.rendered[-1][0] == [{"role": "system", "content": "S\n\nD"}, USER]


@pytest.mark.parametrize("path", ROUTES)
async def test_llamacpp_20861_a_trailing_assistant_message_is_continued(
    client: Client, engine: FakeEngine, path: str
) -> None:
    said = {"role": "assistant", "content": "Sure"}
    assert (await client.post(path, saying(path, USER, said))).status == 200
    assert bytes(engine.submitted[-1][0][-4:]) == b"Sure"


ODD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "\\d+"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]},
    {},
]


@pytest.mark.parametrize("schema", ODD_SCHEMAS)
async def test_llamacpp_14227_lmstudio_2254_schemas_of_tools_are_relaxed(
    smollm2: RealClient, schema: dict[str, Any]
) -> None:
    """Whatever a tool's schema says, the call that is forced has an object of arguments."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "f"}}
    ask = {"messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    reply = await smollm2.post(CHAT, ask)
    assert reply.status == 200, reply.text
    answer = reply.json["choices"][0]
    if answer["finish_reason"] != "length":
        (call,) = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments, dict) and set(schema.get("required", ())) <= set(arguments)


async def test_llamacpp_19051_24097_a_strict_schema_that_cannot_be_enforced(smollm2: RealClient) -> None:
    schema = {"name": "x", "strict": True, "schema": ODD_SCHEMAS[0]}
    for stream in (False, True):
        form = {"type": "json_schema", "json_schema": schema}
        reply = await smollm2.chat(response_format=form, max_tokens=4, stream=stream)
        assert reply.status == 400 and reply.error["param"] == "response_format"
    text = {"format": {"type": "json_schema", **schema}}
    reply = await smollm2.post(RESPONSES, {"input": "hi", "text": text})
    assert reply.status == 400 and reply.error["param"] == "text.format"
    config = {"format": {"type": "json_schema", "schema": ODD_SCHEMAS[0]}}
    reply = await smollm2.post(MESSAGES, {**ROUTES[MESSAGES], "output_config": config})
    assert reply.status == 400 and "output_config.format" in reply.json["error"]["message"]
    reply = await smollm2.post(OLLAMA, {**ROUTES[OLLAMA], "format": ODD_SCHEMAS[0]})
    assert reply.status == 400 and "format" in reply.json["error"]


@pytest.mark.parametrize("path", ROUTES)
async def test_vllm_42474_more_tokens_than_fit_are_fewer_tokens(
    client: Client, engine: FakeEngine, path: str
) -> None:
    engine.script = "x" * 2000
    reply = await client.post(path, asking_for(path, 32000, stream=False))
    assert reply.status == 200
    assert any(word in reply.text for word in ('"length"', '"max_tokens"', '"max_output_tokens"'))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_openclaw_133860_ollama_5902_nothing_is_cut_in_silence(
    client: Client, path: str, stream: bool
) -> None:
    long = {"role": "user", "content": "x" * 2000}
    reply = await client.post(path, saying(path, long, stream=stream))
    assert reply.status == 400 and reply.headers["Content-Type"].startswith("application/json")
    assert "2018" in reply.text and "512" in reply.text
    if path in (CHAT, RESPONSES):
        assert reply.error["code"] == "context_length_exceeded"


async def test_llamacpp_16109_an_error_in_the_middle_of_a_stream(client: Client, engine: FakeEngine) -> None:
    engine.fail_after = 3
    *_, last = (await client.chat(stream=True)).events
    assert last["error"]["message"] == "the device failed"


@pytest.mark.parametrize("path", ROUTES)
async def test_ollama_4388_8342_headers_that_browsers_ask_for(client: Client, path: str) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,anthropic-version"
    headers = {
        "Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }  # fmt: skip
    reply = await client.request("OPTIONS", path, headers=headers)
    assert reply.status == 204 and reply.headers["Access-Control-Allow-Headers"] == asked
    assert reply.headers["Access-Control-Allow-Origin"] == headers["Origin"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_llamacpp_24496_a_client_that_leaves(path: str, stream: bool) -> None:
    """Case r02 in every dialect."""
    engine = FakeEngine("x" * 400)
    engine.token_seconds = 0.02
    async with running(engine) as client:
        body = json.dumps({**ROUTES[path], "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(head + body)
        if stream:
            await reader.readuntil(b"x")
        await until(lambda: engine.running)
        writer.close()
        await until(lambda: not engine.running, 1.0)
        assert engine.cancelled == 1


@pytest.mark.parametrize("path", ROUTES)
async def test_vllm_39741_no_tools_are_no_tools(client: Client, engine: FakeEngine, path: str) -> None:
    choice: Any = {"type": "any"} if path == MESSAGES else "required"
    for more in ({"tools": []}, {"tools": [], "tool_choice": choice}, {"tool_choice": choice}):
        assert (await client.post(path, {**ROUTES[path], **more})).status == 200
        assert (engine.asked["tools"], engine.asked["tool_choice"]) == ([], "none")


# -- cases l03 and w01 where the dialects have forms of their own -------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_l03_empty_conversations(client: Client, engine: FakeEngine, path: str) -> None:
    for messages in ([], [{}], [{"role": "user"}], [None]):
        assert (await client.post(path, saying(path, *messages))).status == 400
    name = "input" if path == RESPONSES else "messages"
    for value in (None, 3, {}):
        assert (await client.post(path, {**ROUTES[path], name: value})).status == 400
    assert (await client.post(path, saying(path, {"role": "user", "content": ""}))).status == 200


@pytest.mark.parametrize("path", [*ROUTES, "/api/generate", "/api/show", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "body", [b"{:", b"", b"null", b"[]", b"NaN", rb'{"model": "\ud800"}', b"[" * 100_000, b"\xc4\xe3"]
)
async def test_w01_bad_json_on_every_route(client: Client, path: str, body: bytes) -> None:
    reply = await client.post(path, body)
    assert reply.status == 400 and "not valid JSON" in reply.text
    error = reply.json["error"]
    assert isinstance(error, str) == path.startswith("/api/")
    assert (reply.json.get("type") == "error") == path.startswith("/v1/messages")
