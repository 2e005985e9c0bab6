"""Reported cases of tools and structured output, against a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from .client import Reply
from .conftest import Serve
from .real import RealClient, talking_to

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "weather in Paris"}], "temperature": 0, "max_tokens": 64}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("get_weather", city={"type": "string", "enum": ["Paris"]})
FORCED = {**ASK, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


def calls_of(reply: Reply, stream: bool, choice: int = 0) -> tuple[list[dict[str, Any]], str, str]:
    """(calls, text, finish_reason) of a choice, with what their deltas must keep to."""
    assert reply.status == 200, reply.text
    if not stream:
        answer = reply.json["choices"][choice]
        message = answer["message"]
        return message.get("tool_calls") or [], message["content"] or "", answer["finish_reason"]
    calls: list[dict[str, Any]] = []
    text, finish = "", None
    for event in reply.events[:-1]:
        for entry in event["choices"]:
            if entry["index"] != choice:
                continue
            text += entry["delta"].get("content") or ""
            finish = entry["finish_reason"] or finish
            for delta in entry["delta"].get("tool_calls", ()):
                if delta["index"] == len(calls):
                    assert set(delta) == {"index", "id", "type", "function"} and delta["type"] == "function"
                    assert delta["function"]["name"] and delta["function"]["arguments"] == ""
                    calls.append({key: value for key, value in delta.items() if key != "index"})
                    calls[-1]["function"] = dict(delta["function"])
                else:
                    assert delta["index"] == len(calls) - 1 and set(delta) == {"index", "function"}
                    assert set(delta["function"]) == {"arguments"}
                    calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    assert finish is not None
    return calls, text, finish


@pytest.mark.parametrize("stream", [True, False])
async def test_j01_a_forced_call(smollm2: RealClient, stream: bool) -> None:
    calls, text, finish = calls_of(await smollm2.post(CHAT, {**FORCED, "stream": stream}), stream)
    assert (text, finish) == ("", "tool_calls")
    (call,) = calls
    assert call["id"] and call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    calls, text, finish = calls_of(
        await smollm2.post(CHAT, {**FORCED, "max_tokens": 3, "stream": stream}), stream
    )
    assert finish == "length"


async def test_a_round_trip_with_plain_messages(smollm2: RealClient) -> None:
    """The packaged model's template knows no tools: they are told, called and answered in words."""
    calls, _, _ = calls_of(await smollm2.post(CHAT, FORCED), False)
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny, 21 degrees"},
    ]
    alone = await smollm2.post(CHAT, {**ASK, "messages": history, "max_tokens": 1})
    told = await smollm2.post(CHAT, {**ASK, "messages": history, "tools": [WEATHER], "max_tokens": 1})
    none = await smollm2.post(
        CHAT, {**ASK, "messages": history, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 1}
    )
    prompts = [reply.json["usage"]["prompt_tokens"] for reply in (alone, told, none)]
    assert prompts[0] == prompts[2] < prompts[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_several_calls_have_indexes_and_ids_of_their_own(smollm2: RealClient, stream: bool) -> None:
    """Sampled, as a greedy small model may repeat itself until nothing is left of the context."""
    tools = [WEATHER, tool("now"), tool("add", a={"enum": [1, 2]}, b={"enum": [3]})]
    body = {**ASK, "tools": tools, "tool_choice": "required", "max_tokens": 900, "stream": stream}
    reply = await smollm2.post(CHAT, {**body, "temperature": 2.0, "seed": 3, "n": 3})
    for choice in range(3):
        calls, text, finish = calls_of(reply, stream, choice)
        assert (text, finish) == ("", "tool_calls") and calls
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            wanted = {"get_weather": {"city"}, "now": set(), "add": {"a", "b"}}[call["function"]["name"]]
            assert arguments.keys() == wanted
    once = await smollm2.post(CHAT, {**body, "parallel_tool_calls": False})
    assert len(calls_of(once, stream)[0]) == 1


async def test_neighbours_have_answers_of_their_own(smollm2: RealClient) -> None:
    """Forced calls, forms and free text in one batch, with and without log-probabilities."""
    free = {**ASK, "max_tokens": 24}
    alone = (await smollm2.post(CHAT, free)).json["choices"][0]["message"]["content"]

    async def forced(i: int) -> None:
        city = f"City {i} é😸"
        tools = [tool(f"f{i}", city={"type": "string", "enum": [city]})]
        more = {"logprobs": True, "top_logprobs": 2} if i % 2 else {}
        reply = await smollm2.post(
            CHAT,
            {
                **ASK,
                **more,
                "tools": tools,
                "tool_choice": {"type": "function", "function": {"name": f"f{i}"}},
            },
        )
        calls, _, finish = calls_of(reply, False)
        assert finish == "tool_calls" and calls[0]["function"]["name"] == f"f{i}"
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": city}
        entries = (reply.json["choices"][0]["logprobs"] or {"content": []})["content"]
        assert bool(entries) == bool(more)

    async def plain() -> None:
        assert (await smollm2.post(CHAT, free)).json["choices"][0]["message"]["content"] == alone

    async def hostile() -> None:
        schema = {
            "type": "object",
            "properties": {f"p{i}": {"pattern": f"(.*{i}){{20}}"} for i in range(300)},
        }
        body = {**ASK, "max_tokens": 4, "response_format": {"type": "json_object", "schema": schema}}
        assert (await smollm2.post(CHAT, body)).status in (200, 400)

    await asyncio.gather(hostile(), *(forced(i) for i in range(6)), plain(), plain())


@pytest.mark.parametrize(
    "form, pattern",
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}}, r"\d{3}-[a-f]{2}"),
        ({"grammar": 'root ::= "<" [a-c]{2,4} ">"'}, "<[a-c]{2,4}>"),
        ({"json_schema": {"const": "é"}}, '"é"'),
    ],
)
async def test_forms_by_other_servers_names(smollm2: RealClient, form: dict[str, Any], pattern: str) -> None:
    chat = await smollm2.post(CHAT, {**ASK, **form})
    assert re.fullmatch(pattern, chat.json["choices"][0]["message"]["content"])
    completion = await smollm2.post(
        "/v1/completions", {"prompt": "x", "temperature": 0, "max_tokens": 40, **form}
    )
    assert re.fullmatch(pattern, completion.json["choices"][0]["text"])


@pytest.mark.parametrize(
    "form, field",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"guided_regex": "(?=x)"}, "guided_regex"),
        ({"grammar": "root ::= missing"}, "grammar"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(
    smollm2: RealClient, form: dict[str, Any], field: str
) -> None:
    for stream in (True, False):
        reply = await smollm2.post(CHAT, {**ASK, **form, "stream": stream})
        assert reply.status == 400 and reply.error["param"] == field and field in reply.error["message"]


async def test_a_tools_schema_that_cannot_be_enforced_is_relaxed(smollm2: RealClient) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": r"^\d(?=x)", "not": {"const": ""}}}}
    for parameters in ({}, schema):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        body = {
            **ASK,
            "max_tokens": 200,
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        calls, _, finish = calls_of(await smollm2.post(CHAT, body), False)
        assert finish in ("tool_calls", "length")
        if finish == "tool_calls":
            assert json.loads(calls[0]["function"]["arguments"]).keys() <= {"a"}


CODER = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- for c in m.tool_calls or [] %}

<tool_call>
<function={{ c.function.name }}>
{%- for name, value in c.function.arguments.items() %}

<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}

</function>
</tool_call>
{%- endfor %}
{{ m.content }}<|im_end|>
{% endfor %}{{ tools | length if tools else "" }}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def test_a_round_trip_in_tags(serve: Serve, smollm2_path: Path, tmp_path: Path) -> None:
    """What the model was made to write is what the next prompt shows it to have written."""
    path = tmp_path / "coder.jinja"
    path.write_text(CODER)
    edit = tool("edit", path={"enum": ["a b", "</c>"]}, line={"type": "integer", "maximum": 9, "minimum": 7})
    body = {**ASK, "tools": [edit, WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    async with talking_to(serve(smollm2_path, "--kv-tokens", "1024", "--chat-template", str(path))) as client:
        for stream in (True, False):
            calls, text, finish = calls_of(await client.post(CHAT, {**body, "stream": stream}), stream)
            assert (text, finish, len(calls)) == ("", "tool_calls", 1)
            arguments = json.loads(calls[0]["function"]["arguments"])
            name = calls[0]["function"]["name"]
            wanted = {"edit": {"path", "line"}, "get_weather": {"city"}}[name]
            assert arguments.keys() == wanted and arguments.get("line", 7) in (7, 8, 9)
        messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": calls}]
        prompt = (await client.post("/apply-template", {"messages": messages})).json["prompt"]
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        assert f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>" in prompt
