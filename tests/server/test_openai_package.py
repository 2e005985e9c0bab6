"""The `openai` package against a server that listens, in its own thread as a program has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .background import CLOCK, KEY, THINKING, WEATHER, in_background
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        in_background(engine) as base,
        openai.OpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0) as api,
    ):
        yield api


@pytest.fixture
def thinking(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine as a model that reasons, speaks and calls two tools."""
    monkeypatch.setattr(engine, "template_source", THINKING)
    monkeypatch.setattr(engine, "script", f"<think>Hm, weather.</think>Let me see.{WEATHER}{CLOCK}")
    return engine


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}},
        },
    }
    for name, parameter in (("get_weather", "city"), ("get_time", "zone"))
]


def test_chat_stream(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details is not None


def test_chat_and_models(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], n=2, seed=1)
    assert [c.message.content for c in answer.choices] == [TEXT, TEXT]
    assert [m.id for m in api.models.list()] == ["fake-model"]
    assert api.models.retrieve("fake-model").id == "fake-model"


def test_completions(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="m", prompt="x", max_tokens=5, logprobs=1)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_errors_are_the_packages_own(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 600}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="m", messages=[], temperature=9)
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()


def test_tools_in_a_stream(api: openai.OpenAI, thinking: FakeEngine) -> None:
    """Names first, indexes 0 and 1, arguments in pieces, `tool_calls` at the end."""
    calls: dict[int, list[str]] = {}
    text, reasoning, finish = "", "", None
    for chunk in api.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "weather?"}], tools=TOOLS, stream=True
    ):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.arguments == ""
                calls[call.index] = [call.function.name or "", ""]
            else:
                assert call.id is None and call.function.name is None
                calls[call.index][1] += call.function.arguments or ""
    assert (text, reasoning, finish) == ("Let me see.", "Hm, weather.", "tool_calls")
    assert [name for name, _ in calls.values()] == ["get_weather", "get_time"] and list(calls) == [0, 1]
    assert [json.loads(arguments) for _, arguments in calls.values()] == [
        {"city": "Paris"},
        {"zone": "CET", "exact": True},
    ]


def test_a_round_trip_with_tools(api: openai.OpenAI, thinking: FakeEngine) -> None:
    messages: Any = [{"role": "user", "content": "weather?"}]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = api.chat.completions.create(model="m", messages=messages, tools=TOOLS, tool_choice=choice)
    assert thinking.asked["tool_choice"] == {"name": "get_weather"}
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Let me see."
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) >= len("Hm, weather")
    calls: Any = message.tool_calls
    assert len({call.id for call in calls}) == 2
    messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": "18 C"} for c in calls)]
    api.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    roles = [m["role"] for m in thinking.rendered[-1][0]]
    assert roles == ["user", "assistant", "tool", "tool"]


def test_an_answer_that_is_cut_in_a_call(api: openai.OpenAI, thinking: FakeEngine) -> None:
    length = len("<think>Hm, weather.</think>Let me see." + WEATHER) - 20
    answer = api.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "weather?"}], tools=TOOLS, max_tokens=length
    )
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and '{"city": "Paris"}'.startswith(call.function.arguments)
