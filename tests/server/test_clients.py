"""The official clients against a real model: a streamed chat, and a tool that it must call.

What the model says is its own affair; what a forced call's arguments are is not, and nor is that the client
can read all of it and send it back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from .background import HERMES, KEY, WEATHER, in_background
from .fake_engine import FakeEngine
from .real import RealServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}


@pytest.fixture
def openai_api(smollm2_server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=smollm2_server.base + "/v1", api_key="x", max_retries=0)


def test_openai_chat(openai_api: openai.OpenAI) -> None:
    ask: Any = {"model": "m", "temperature": 0, "max_tokens": 12}
    chunks = list(openai_api.chat.completions.create(**ask, messages=[QUESTION], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = openai_api.chat.completions.create(**ask, messages=[QUESTION])
    assert text and text == whole.choices[0].message.content

    tools: Any = [{"type": "function", "function": FUNCTION}]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    ask["max_tokens"] = 64
    with openai_api.chat.completions.stream(
        **ask, messages=[QUESTION], tools=tools, tool_choice=choice
    ) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    said: Any = answer.message.model_dump(exclude_none=True)
    last = openai_api.chat.completions.create(**ask, messages=[QUESTION, said, result], tools=tools)
    assert last.choices[0].message.content or last.choices[0].message.tool_calls


def test_openai_responses(openai_api: openai.OpenAI) -> None:
    ask: Any = {"model": "m", "temperature": 0, "max_output_tokens": 12}
    with openai_api.responses.stream(**ask, input="What is the weather in Paris?") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == openai_api.responses.create(**ask, input=[QUESTION]).output_text != ""

    tools: Any = [{"type": "function", **FUNCTION}]
    ask["max_output_tokens"] = 64
    once: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with openai_api.responses.stream(**ask, input=[QUESTION], **once) as stream:
        answer = stream.get_final_response()
    (call,) = answer.output
    assert answer.status == "completed" and call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}
    last = openai_api.responses.create(**ask, input=[result], previous_response_id=answer.id, tools=tools)
    assert last.output and last.usage is not None and last.usage.input_tokens > 20


def test_anthropic(smollm2_server: RealServer) -> None:
    api = anthropic.Anthropic(base_url=smollm2_server.base, api_key="x", max_retries=0)
    greedy = {"temperature": 0}  # the package has no name for it any more
    ask: Any = {"model": "m", "max_tokens": 12, "extra_body": greedy}
    with api.messages.stream(**ask, messages=[QUESTION]) as stream:
        text = "".join(stream.text_stream)
    (block,) = api.messages.create(**ask, messages=[QUESTION]).content
    assert block.type == "text" and block.text == text != ""

    tool: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
    ask |= {"max_tokens": 64, "tools": [tool]}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with api.messages.stream(**ask, messages=[QUESTION], tool_choice=choice) as events:
        answer = events.get_final_message()
    (call,) = answer.content
    assert answer.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "get_weather" and call.input == {"city": "Paris"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    said: Any = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = api.messages.create(**ask, messages=[QUESTION, *said])
    counted = api.messages.count_tokens(model="m", messages=[QUESTION, *said], tools=[tool])
    usage = last.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_ollama(smollm2_server: RealServer) -> None:
    api = ollama.Client(smollm2_server.base)
    options = {"temperature": 0, "num_predict": 12}
    parts = list(api.chat("m", [QUESTION], stream=True, options=options))
    text = "".join(part.message.content or "" for part in parts)
    assert text and text == api.chat("m", [QUESTION], options=options).message.content
    assert parts[-1].done and parts[-1].eval_count == 12 and (parts[-1].eval_duration or 0) > 0
    formatted = api.chat("m", [QUESTION], format=SCHEMA, options={"num_predict": 64})
    assert json.loads(formatted.message.content or "") == {"city": "Paris"}
    tool: Any = {"type": "function", "function": FUNCTION}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": {
        "name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"}]  # fmt: skip
    assert api.chat("m", messages, tools=[tool], options=options).done


def test_llm_calls_a_tool(tmp_path: Path) -> None:
    """The command calls the function that the model asks for, and sends back what it returned."""
    engine = FakeEngine("It is 18 degrees.")
    engine.template_source, engine.scripts = HERMES, [WEATHER]
    with in_background(engine) as base:
        model: dict[str, Any] = {"model_id": "hetero", "model_name": "m", "api_base": f"{base}/v1"}
        model |= {"supports_tools": True, "headers": {"x-api-key": KEY}}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML too
        function = "def get_weather(city: str) -> str:\n    return city + ': 18 degrees'\n"
        command = [sys.executable, "-m", "llm", "-m", "hetero", "--functions", function, "weather?"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "It is 18 degrees."
    *_, result = engine.rendered[-1][0]
    assert (result["role"], result["content"]) == ("tool", "Paris: 18 degrees")
    assert len(engine.submitted) == 2
