"""/v1/messages: what is read, the events, and the `anthropic` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from .background import CLOCK, KEY, THINKING, WEATHER, in_background
from .client import Client, Reply, running
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"
PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


async def ask(client: Client, **body: Any) -> Reply:
    return await client.post(PATH, {"messages": [USER], "max_tokens": 300, **body})


def named_events(reply: Reply) -> list[dict[str, Any]]:
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_text(client: Client, engine: FakeEngine) -> None:
    engine.cached_tokens = 3
    body = (await ask(client)).json
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake-model")
    assert body["content"] == [{"type": "text", "text": TEXT}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert usage["cache_read_input_tokens"] == 3 and usage["output_tokens"] == len(TEXT.encode()) + 1
    assert (
        usage["input_tokens"] + 3
        == (await client.post(PATH + "/count_tokens", {"messages": [USER]})).json["input_tokens"]
    )
    assert engine.asked["thinking"] is False, "nobody asked for it"


async def test_why_it_stopped(client: Client) -> None:
    cut = (await ask(client, max_tokens=4)).json
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hell")
    stopped = (await ask(client, stop_sequences=["zzz", "wör"])).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wör")
    events = named_events(await ask(client, stop_sequences=["zzz", "wör"], stream=True))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "wör"}


async def test_the_stream_is_the_whole_answer(client: Client, engine: FakeEngine) -> None:
    engine.template_source = THINKING
    engine.script = f"<think>Hm.</think>Let me see.{WEATHER}{CLOCK}"
    more = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = (await ask(client, **more)).json
    assert engine.asked["thinking"] is True
    first, *events, delta, last = named_events(await ask(client, **more, stream=True))
    assert first["type"] == "message_start" and last == {"type": "message_stop"}
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == whole["usage"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            change = event["delta"]
            name = {"thinking_delta": "thinking", "text_delta": "text", "signature_delta": "signature"}
            if change["type"] == "input_json_delta":
                blocks[-1]["json"] += change["partial_json"]
            else:
                field = name[change["type"]]
                blocks[-1][field] += change[field]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    for block, expected in zip(blocks, whole["content"], strict=True):
        if text := block.pop("json"):
            block["input"] = json.loads(text)
        assert {k: v for k, v in block.items() if k != "id"} == {
            k: v for k, v in expected.items() if k != "id"
        }
    assert blocks[0]["signature"], "clients send only signed thoughts back"


async def test_a_call_that_is_cut_has_no_half_arguments(client: Client, engine: FakeEngine) -> None:
    engine.template_source, engine.script = THINKING, WEATHER
    body = (await ask(client, tools=[TOOL], max_tokens=len(WEATHER) - 20)).json
    assert body["stop_reason"] == "max_tokens" and body["content"][0]["input"] == {}


async def test_blocks_become_messages(client: Client, engine: FakeEngine) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "é"}}
    thought = {"type": "thinking", "thinking": "T", "signature": "s"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "DOC"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, document]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "Well, "},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"},
                                          {"type": "text", "text": "A"}, call]},
        {"role": "user", "content": results},
    ]  # fmt: skip
    assert (await ask(client, messages=messages, system="S")).status == 200
    system, user, assistant, *rest = engine.rendered[-1][0]
    assert system == {"role": "system", "content": "S"}
    assert user == {"role": "user", "content": "a\nDOC\n\nb"}, "turns of one role are one"
    function = {"name": "get_weather", "arguments": '{"city":"é"}'}
    assert assistant == {
        "role": "assistant", "content": "Well, A", "reasoning_content": "T",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }  # fmt: skip
    assert rest == [
        {"role": "tool", "tool_call_id": "t1", "content": "18", "name": "get_weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: broken"},
        {"role": "user", "content": "and?"},
    ]


async def test_the_system_prompt_in_every_form_is_the_same(client: Client, engine: FakeEngine) -> None:
    """What Claude Code sends: as text, as blocks, behind a block that varies, in the middle of the list."""
    text = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=12345;"}
    forms: list[dict[str, Any]] = [
        {"system": "Be kind."},
        {"system": [text]},
        {"system": [billing, text]},
        {"system": f"{billing['text']}\nBe kind."},
        {"messages": [USER, {"role": "system", "content": "Be kind."}]},
        {"messages": [USER, {"role": "system", "content": [text]}]},
    ]
    for form in forms:
        reply = await client.post(PATH + "?beta=true", {"messages": [USER], "max_tokens": 32000, **form})
        assert reply.status == 200, reply.text
    assert len({tuple(prompt) for prompt, _, _ in engine.submitted}) == 1
    assert engine.rendered[-1][0] == [{"role": "system", "content": "Be kind."}, USER]


async def test_a_trailing_assistant_message_is_continued(client: Client, engine: FakeEngine) -> None:
    reply = await ask(client, messages=[USER, {"role": "assistant", "content": "Sure"}])
    assert reply.status == 200 and bytes(engine.submitted[-1][0][-4:]) == b"Sure"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_weather"}, {"name": "get_weather"}),
    ],
)
async def test_choices_of_tools(client: Client, engine: FakeEngine, choice: Any, expected: Any) -> None:
    assert (await ask(client, tools=[TOOL], tool_choice=choice)).status == 200
    assert engine.asked["tool_choice"] == expected
    assert (await ask(client, tool_choice={"type": "any"})).status == 200
    assert engine.asked["tool_choice"] == "none", "without tools there is nothing to choose"


async def test_how_much_to_think(client: Client, engine: FakeEngine) -> None:
    for more, expected in (
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "low"}}, False),
    ):
        assert (await ask(client, **more)).status == 200
        assert engine.asked["thinking"] == expected


async def test_a_schema(client: Client) -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "string"}}}
    assert (await ask(client, output_config=config)).json["content"][0]["text"] == '"a😸b中"'


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "content[0].name"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format",
        ),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "raise"}]}, "alternate"),
    ],
)
async def test_errors_name_the_field(
    client: Client, engine: FakeEngine, body: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        reply = await ask(client, stream=stream, **body)
        assert reply.status == 400, reply.text
        assert reply.json["type"] == "error" and reply.json["error"]["type"] == "invalid_request_error"
        assert field in reply.json["error"]["message"]
    assert engine.submitted == []


async def test_errors_have_the_shape_of_the_route(client: Client, engine: FakeEngine) -> None:
    too_long = await ask(client, messages=[{"role": "user", "content": "x" * 600}], stream=True)
    assert too_long.status == 400 and too_long.json["error"]["message"].startswith("prompt is too long: ")
    assert "512" in too_long.json["error"]["message"]
    assert (await client.get(PATH)).json["error"]["type"] == "invalid_request_error"
    assert (await client.post(PATH, b"{")).json["type"] == "error"
    engine.fail_after = 3
    assert (await ask(client)).json["error"] == {"type": "api_error", "message": "the device failed"}
    events = named_events(await ask(client, stream=True))
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the device failed"},
        "request_id": None,
    }
    engine.healthy = (False, "no device")
    assert (await ask(client)).json["error"] == {"type": "overloaded_error", "message": "no device"}


async def test_pings_while_nothing_comes() -> None:
    engine = FakeEngine()
    engine.prefill_seconds = 0.2
    async with running(engine, keep_alive=0.02) as client:
        events = named_events(await ask(client, stream=True))
    assert events[0]["type"] == "message_start" and {"type": "ping"} in events
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == TEXT


@pytest.fixture(scope="module")
def engine_in_background() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine_in_background: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with (
        in_background(engine_in_background) as base,
        anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0) as api,
    ):
        yield api


def test_the_anthropic_package(api: anthropic.Anthropic) -> None:
    messages: Any = [USER]
    with api.messages.stream(model="m", max_tokens=300, messages=messages) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == TEXT and final.stop_reason == "end_turn" and final.usage.output_tokens == 20
    assert api.messages.count_tokens(model="m", messages=messages).input_tokens == 20
    assert [(m.id, m.type) for m in api.models.list()] == [("fake-model", "model")]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        api.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(anthropic.AuthenticationError):
        api.with_options(api_key="wrong").messages.create(model="m", max_tokens=9, messages=messages)


def test_the_anthropic_package_calls_a_tool(
    api: anthropic.Anthropic, engine_in_background: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_in_background, "template_source", THINKING)
    monkeypatch.setattr(engine_in_background, "script", f"<think>Hm.</think>Yes.{WEATHER}")
    messages: Any = [USER]
    more: Any = {
        "model": "m", "max_tokens": 300, "tools": [TOOL], "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }  # fmt: skip
    with api.messages.stream(messages=messages, **more) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    thought, text, call = final.content
    assert thought.type == "thinking" and thought.thinking == "Hm." and text.type == "text"
    assert call.type == "tool_use" and call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 C"}
    messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    api.messages.create(messages=messages, **more)
    roles = [(m["role"], m.get("reasoning_content")) for m in engine_in_background.rendered[-1][0]]
    assert roles == [("user", None), ("assistant", "Hm."), ("tool", None)]
