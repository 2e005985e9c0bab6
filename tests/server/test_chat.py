"""/v1/chat/completions: what is accepted, refused and answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .client import Client
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_answer_in_one_piece(client: Client, engine: FakeEngine) -> None:
    engine.cached_tokens = 16
    body = (
        await client.chat(model="any-name", user="me", metadata={}, store=False, seed=None, stop=None)
    ).json
    assert body["object"] == "chat.completion" and body["model"] == "fake-model"
    assert body["id"].startswith("chatcmpl-") and isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = body["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["completion_tokens"] == len(TEXT.encode()) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(
    ("options", "wants_usage"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_stream_shape(client: Client, options: Any, wants_usage: bool) -> None:
    """Case r01."""
    reply = await client.chat(stream=True, stream_options=options)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *chunks, done = reply.events
    assert done == "[DONE]"
    if wants_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert all("usage" not in c for c in chunks)
    assert {(c["id"], c["created"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", "fake-model")
    }
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in c["delta"] for c in choices[1:])
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    assert "".join(c["delta"].get("content", "") for c in choices) == TEXT


async def test_stream_options_without_stream_are_ignored(client: Client) -> None:
    reply = await client.chat(stream_options={"include_usage": True})
    assert reply.status == 200 and reply.json["object"] == "chat.completion"


@pytest.mark.parametrize("stop", [None, ["zzz"]])
async def test_logprobs_in_every_mode(client: Client, stop: Any) -> None:
    """Cases s05 and t01: one entry per token, streamed or not, with or without stop."""
    ask = {"logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = (await client.chat(**ask)).json
    chunks = (await client.chat(**ask, stream=True)).events[:-1]
    entries = whole["choices"][0]["logprobs"]["content"]
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert entries == streamed and len(entries) == whole["usage"]["completion_tokens"]
    assert bytes(b for e in entries for b in e["bytes"]) == TEXT.encode()
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in entries)
    assert [len(e["top_logprobs"]) for e in entries] == [3] * len(entries)
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    assert entries[-1]["token"] == "<|im_end|>" and entries[-1]["bytes"] == []
    assert entries[0]["top_logprobs"][2] == {"token": "bytes:\\xf0", "logprob": -9999.0, "bytes": [0xF0]}


async def test_logprobs_without_alternatives(client: Client) -> None:
    for ask in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        entries = (await client.chat(**ask)).json["choices"][0]["logprobs"]["content"]
        assert all(e["top_logprobs"] == [] for e in entries)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"191222": -100, "5": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repeat_penalty": True}, "repeat_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, 3]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": 3}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"tools": {}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"grammar": 3}, "grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"grammar": "root ::= x", "guided_json": {"type": "object"}}, "guided_json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": 3}, "model"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_named(
    client: Client, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    """Case s03 and others: 400 with the field, before anything reaches the engine."""
    for stream in ({}, {"stream": True}) if "stream" not in body else ({},):
        reply = await client.chat(**stream, **body)
        assert reply.status == 400, reply.text
        assert reply.error["param"] == param and reply.error["type"] == "invalid_request_error"
        assert param.split(".")[0].split("[")[0] in reply.error["message"] or param == "messages"
    assert engine.submitted == []
    assert (await client.chat()).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": None, "reasoning_effort": None},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"functions": [], "audio": None, "modalities": ["text"], "guided_json": None, "grammar": ""},
        {"some_future_field": {"x": 1}, "reasoning_effort": "low", "parallel_tool_calls": True},
        {"temperature": None, "logit_bias": None, "logprobs": None, "n": None, "stream": None, "tools": None},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "system", "content": "s"}, USER, {"role": "system", "content": "mid-list"}]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": None}, USER]},
        {"stop": ["x"] * 16},
    ],
)
async def test_is_accepted(client: Client, body: dict[str, Any]) -> None:
    assert (await client.chat(**body)).status == 200


async def test_sampling_fields_reach_the_engine(client: Client, engine: FakeEngine) -> None:
    await client.chat(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repeat_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"5": 5}, seed=7, n=2, stop="!", max_tokens=5,
        max_completion_tokens=3.0, ignore_eos=True, stop_token_ids=[9],
    )  # fmt: skip
    (_, first, _), (_, second, _) = engine.submitted
    assert (first.seed, second.seed) == (7, 8)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 0, 0.1)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.1, 0.5, -0.5)
    assert (first.logit_bias, first.stop, first.stop_token_ids) == ({5: 5.0}, ("!",), (9,))
    assert (first.max_tokens, first.ignore_eos, first.logprobs) == (3, True, None)
    await client.chat(max_tokens=-1)
    assert engine.submitted[-1][1].max_tokens is None


async def test_a_number_beyond_float(client: Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}'
    reply = await client.post("/v1/chat/completions", body)
    assert reply.status == 400 and reply.error["param"] == "temperature"


async def test_n_answers(client: Client) -> None:
    body = (await client.chat(n=3, max_tokens=4)).json
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 12, "each prompt counts once, each answer for itself"
    chunks = (await client.chat(n=3, max_tokens=4, stream=True)).events[:-1]
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in own) == "Hell"


async def test_json_schema_and_stop(client: Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    assert (await client.chat(response_format=schema)).json["choices"][0]["message"]["content"] == '"a😸b中"'
    assert (await client.chat(response_format={"type": "text"})).json["choices"][0]["message"][
        "content"
    ] == TEXT
    for stream in (False, True):
        reply = await client.chat(stop=["wör", "zzz"], stream=stream)
        assert TEXT not in reply.text and "wör" not in reply.text


@pytest.mark.parametrize("tokens", [511, 512, 5000])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_at_the_limit(client: Client, tokens: int, stream: bool) -> None:
    """Case l01: an answer of status 400 before any event, with both counts."""
    overhead = len(b"user\n") + 3 + len(b"assistant\n")
    messages = [{"role": "user", "content": "x" * (tokens - overhead)}]
    reply = await client.chat(messages=messages, stream=stream, max_tokens=8)
    if tokens < 512:
        assert reply.status == 200
        last = reply.events[-2] if stream else reply.json
        assert last["choices"][0]["finish_reason"] == "length"
        return
    assert reply.status == 400 and reply.headers["Content-Type"].startswith("application/json")
    assert reply.error["code"] == "context_length_exceeded" and reply.error["param"] == "messages"
    assert str(tokens) in reply.error["message"] and "512" in reply.error["message"]


async def test_content_parts_and_prefill(client: Client, engine: FakeEngine) -> None:
    """Case c03: parts reach the template in order; a trailing assistant message is continued."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.chat(messages=[{"role": "user", "content": parts}])
    await client.chat(messages=[{"role": "user", "content": "one\ntwo"}])
    assert engine.submitted[0][0] == engine.submitted[1][0]
    for content in ("Sure", [{"type": "text", "text": "Sure"}]):
        await client.chat(messages=[USER, {"role": "assistant", "content": content}])
        assert bytes(engine.submitted[-1][0][-4:]) == b"Sure"
    assert engine.submitted[-1][0] == engine.submitted[-2][0]
    await client.chat(messages=[USER, {"role": "assistant", "content": "x"}], continue_final_message=False)
    assert engine.rendered[-1][1] is False
    await client.chat(chat_template_kwargs={"enable_thinking": False})
    assert engine.rendered[-1][2] == {"enable_thinking": False}


async def test_developer_messages_are_system_messages(client: Client, engine: FakeEngine) -> None:
    developer = {"role": "developer", "content": [{"type": "text", "text": "D"}]}
    await client.chat(messages=[{"role": "system", "content": "S"}, USER, developer, USER])
    assert engine.rendered[-1][0] == [{"role": "system", "content": "S\n\nD"}, USER, USER]
    await client.chat(messages=[USER, developer])
    assert engine.rendered[-1][0] == [{"role": "system", "content": "D"}, USER]


async def test_a_model_without_template_says_so(client: Client, engine: FakeEngine) -> None:
    """Case c01."""
    engine.info.has_chat_template = False
    reply = await client.chat()
    assert reply.status == 400 and "chat template" in reply.error["message"]
    assert (await client.complete()).status == 200
