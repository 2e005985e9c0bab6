"""/v1/responses: what is read, the events, and what is stored."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.server.responses.store import ResponseStore

from .background import CLOCK, KEY, THINKING, WEATHER, in_background
from .client import Client, Reply, running
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"
PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": {}}


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """The events, whose names are their types and whose numbers count up."""
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event.pop("sequence_number") == len(events)
        events.append(event)
    return events


async def test_a_text(client: Client, engine: FakeEngine) -> None:
    engine.cached_tokens = 3
    body = (await client.post(PATH, {"input": "hi", "instructions": "S", "metadata": {"a": "b"}})).json
    assert engine.rendered[-1][0] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
    ]
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert body["metadata"] == {"a": "b"} and body["incomplete_details"] is None
    usage = body["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3


async def test_the_stream_ends_with_what_one_piece_would_be(client: Client, engine: FakeEngine) -> None:
    engine.template_source = THINKING
    engine.script = f"<think>Hm.</think>Let me see.{WEATHER}{CLOCK}"
    ask = {"input": "weather?", "tools": [TOOL]}
    whole = (await client.post(PATH, ask)).json
    events = named_events(await client.post(PATH, {**ask, "stream": True}))
    assert [e["type"] for e in events[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert [kind for kind in whole if whole[kind] != last[kind]] in (
        ["id", "output"],
        ["id", "created_at", "output"],
    )
    for one, other in zip(whole["output"], last["output"], strict=True):
        own = {"id", "call_id"}  # each answer has its own
        assert {k: v for k, v in one.items() if k not in own} == {
            k: v for k, v in other.items() if k not in own
        }
    assert [item["type"] for item in last["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] >= len("Hm.")
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == last["output"]
    for position, item in enumerate(done):
        own_events = [e for e in events if e.get("output_index") == position]
        text = "".join(e["delta"] for e in own_events if e["type"].endswith(".delta"))
        expected = item.get("arguments") or item["content"][0]["text"]
        assert text == expected
        assert {e["item_id"] for e in own_events if "item_id" in e} == {item["id"]}
        assert own_events[0]["item"]["status"] == "in_progress"


async def test_a_cut_answer_is_incomplete(client: Client) -> None:
    body = (await client.post(PATH, {"input": "hi", "max_output_tokens": 4})).json
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    events = named_events(await client.post(PATH, {"input": "hi", "max_output_tokens": 4, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


async def test_an_error_ends_the_stream_with_a_failed_response(client: Client, engine: FakeEngine) -> None:
    engine.fail_after = 3
    events = named_events(await client.post(PATH, {"input": "hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "generation_failed", "message": "the device failed"}
    reply = await client.post(PATH, {"input": "hi"})
    assert reply.status == 500 and reply.error["message"] == "the device failed"


async def test_what_codex_sends(client: Client, engine: FakeEngine) -> None:
    """Tools of unknown types are skipped; developers' items come first; `store: false`."""
    body = {
        "model": "m", "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "instructions": "You are Codex.", "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "k", "service_tier": None,
        "tools": [TOOL, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []},
                  {"type": "custom", "name": "apply_patch", "format": {}}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}],
             "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "name": "get_weather", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call", "name": "get_weather", "arguments": "{}", "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "18"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "19"}]},
        ],
    }  # fmt: skip
    events = named_events(await client.post(PATH, body))
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]["total_tokens"]
    system, user, assistant, *results = engine.rendered[-1][0]
    assert system == {"role": "system", "content": "You are Codex.\n\nD"} and user["content"] == "u"
    assert assistant["content"] == "A" and assistant["reasoning_content"] == "R"
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert [(r["tool_call_id"], r["content"], r["name"]) for r in results] == [
        ("c1", "18", "get_weather"),
        ("c2", "19", "get_weather"),
    ]
    assert [tool["function"]["name"] for tool in engine.asked["tools"]] == ["get_weather"]
    assert engine.asked["thinking"] == "medium"
    stored = events[-1]["response"]["id"]
    assert (await client.get(f"{PATH}/{stored}")).status == 404


async def test_stored_responses(client: Client, engine: FakeEngine) -> None:
    first = (await client.post(PATH, {"input": "one", "instructions": "I"})).json
    second = (await client.post(PATH, {"input": "two", "previous_response_id": first["id"]})).json
    assert second["previous_response_id"] == first["id"]
    assert [(m["role"], m["content"]) for m in engine.rendered[-1][0]] == [
        ("user", "one"), ("assistant", TEXT), ("user", "two"),
    ], "instructions hold for one response"  # fmt: skip
    assert (await client.get(f"{PATH}/{second['id']}")).json == second
    items = (await client.get(f"{PATH}/{second['id']}/input_items")).json
    assert [item["content"] for item in items["data"]] == ["two"] and not items["has_more"]
    assert (await client.request("DELETE", f"{PATH}/{first['id']}")).json["deleted"] is True
    assert (await client.get(f"{PATH}/{first['id']}")).error["code"] == "not_found"
    reply = await client.post(PATH, {"input": "3", "previous_response_id": second["id"]})
    assert reply.status == 400 and reply.error["param"] == "previous_response_id"


async def test_nobody_sees_what_others_stored() -> None:
    async with running(FakeEngine(), api_keys=("a", "b")) as client:
        mine, other = ({"x-api-key": key} for key in ("a", "b"))
        response_id = (await client.post(PATH, {"input": "secret"}, headers=mine)).json["id"]
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"{PATH}/{response_id}", headers=other)).status == 404
        ask = {"input": "x", "previous_response_id": response_id}
        assert (await client.post(PATH, ask, headers=other)).status == 400
        assert (await client.post(PATH, ask, headers=mine)).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": "raise"}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"instructions": 3}, "instructions"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_named(
    client: Client, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        reply = await client.post(PATH, {"input": "hi", "stream": stream, **body})
        assert reply.status == 400, reply.text
        assert reply.error["param"] == param
    assert engine.submitted == []


async def test_choice_among_allowed_tools(client: Client, engine: FakeEngine) -> None:
    tools = [TOOL, {**TOOL, "name": "b"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    for given_choice, expected in ((choice, {"names": ["b"], "mode": "required"}), (None, "auto")):
        reply = await client.post(PATH, {"input": "x", "tools": tools, "tool_choice": given_choice})
        assert reply.status == 200 and engine.asked["tool_choice"] == expected


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("ab"), st.integers(1, 600))))
@settings(max_examples=200, deadline=None)
def test_the_store_keeps_what_was_used_last_and_can_be_gone_on_from(
    operations: list[tuple[int, str, int]],
) -> None:
    limit = 2000
    store = ResponseStore(max_bytes=limit)
    made: dict[str, tuple[str, list[str], int]] = {}  # whose, the texts of the conversation, its bytes
    for number, (choice, client, size) in enumerate(operations):
        previous = list(made)[choice % len(made)] if made and choice else None
        history = [] if previous is None else store.history(client, previous)
        owner, before, length = made[previous] if previous is not None else (client, [], 0)
        if previous is not None and history is not None:
            assert owner == client and [item["name"] for item in history] == before
        if choice == 12 and previous is not None:
            was_there = store.get(client, previous) is not None
            assert store.remove(client, previous) == was_there
            assert store.get(client, previous) is None
        elif history is not None:
            name = f"r{number}"
            response = {"id": name, "output": [{"name": f"{name}-out", "text": "x" * size}]}
            items = [{"name": name}]
            length += len(json.dumps([response, items], separators=(",", ":")))
            store.add(client, response, items, previous)
            made[name] = (client, [*before, name, f"{name}-out"], length)
            fits = length <= limit  # all that it goes on from stays for its sake, or it is the first to go
            assert (store.get(client, name) is not None) == fits
        store.check_invariants()


def test_what_is_stored_takes_no_more_than_its_json() -> None:
    """Lists of nothing: as objects, 20 times their text."""
    store = ResponseStore()
    tracemalloc.start()
    for number in range(2):
        items = json.loads("[" + ",".join(['{"x":[' + ",".join(["[]"] * 1000) + "]}"] * 20) + "]")
        store.add("a", {"id": f"r{number}", "output": []}, items, None)
        del items
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    store.check_invariants()
    assert taken < 2 * 2 * 60_000
    history = store.history("a", "r1")
    assert history is not None and len(history) == 20 and history[0]["x"] == [[]] * 1000


@pytest.fixture(scope="module")
def engine_in_background() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine_in_background: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        in_background(engine_in_background) as base,
        openai.OpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0) as api,
    ):
        yield api


def test_the_openai_package(api: openai.OpenAI, engine_in_background: FakeEngine) -> None:
    with api.responses.stream(model="m", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == TEXT and final.usage is not None
    assert api.responses.retrieve(final.id).output_text == TEXT
    again = api.responses.create(model="m", input="more", previous_response_id=final.id)
    assert again.output_text == TEXT and len(engine_in_background.rendered[-1][0]) == 3
    assert [item.type for item in api.responses.input_items.list(again.id)] == ["message"]
    api.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(final.id)


def test_the_openai_package_calls_a_tool(
    api: openai.OpenAI, engine_in_background: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_in_background, "template_source", THINKING)
    monkeypatch.setattr(engine_in_background, "script", f"<think>Hm.</think>{WEATHER}")
    ask: Any = {"model": "m", "tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}
    with api.responses.stream(input="weather?", **ask) as stream:
        final = stream.get_final_response()
    assert engine_in_background.asked["tool_choice"] == {"name": "get_weather"}
    reasoning, call = final.output
    assert reasoning.type == "reasoning" and call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
    api.responses.create(input=[{"role": "user", "content": "weather?"}, *final.output, result], **ask)
    assert [m["role"] for m in engine_in_background.rendered[-1][0]] == ["user", "assistant", "tool"]


async def test_silence_is_filled_with_events(engine: FakeEngine) -> None:
    """Not with comments, which Codex does not count."""
    engine.prefill_seconds = 0.2
    async with running(engine, keep_alive=0.02) as client:
        reply = await client.post("/v1/responses", {"input": "hi", "stream": True})
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names.count("response.in_progress") >= 3 and names[-1] == "response.completed"
    assert ": keep-alive" not in reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
