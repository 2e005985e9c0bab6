"""/api/*: Ollama's routes, and the `ollama` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from hetero.request import Timings
from hetero.server.generate import Usage
from hetero.server.ollama.writer import OllamaWriter

from .background import CLOCK, HERMES, KEY, THINKING, WEATHER, in_background
from .client import Client, Reply, running
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"
USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200 and reply.headers["Content-Type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_chat(client: Client, engine: FakeEngine) -> None:
    """Streamed unless the client does not want it; the last line has the costs."""
    *chunks, last = lines(await client.post("/api/chat", {"model": "m", "messages": [USER]}))
    assert "".join(c["message"]["content"] for c in chunks) == TEXT
    assert all(not c["done"] and c["message"]["role"] == "assistant" for c in chunks)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["prompt_eval_count"] == 20 and last["eval_count"] == 20 and last["total_duration"] > 0
    whole = (await client.post("/api/chat", {"messages": [USER], "stream": False})).json
    assert whole["message"] == {"role": "assistant", "content": TEXT} and whole["done"] is True
    cut = await client.post("/api/chat", {"messages": [USER], "options": {"num_predict": 4}})
    assert lines(cut)[-1]["done_reason"] == "length"


async def test_options(client: Client, engine: FakeEngine) -> None:
    """Ollama's defaults, and its names."""
    options = {
        "temperature": 0, "top_k": 5, "seed": 7, "num_predict": 9, "stop": ["zz"], "repeat_penalty": 1.2,
        "num_ctx": 4096, "mirostat": 0, "num_predict_extra": 1, "min_p": None,
    }  # fmt: skip
    await client.post("/api/chat", {"messages": [USER], "options": options, "keep_alive": "5m"})
    params = engine.submitted[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0, 5, 0.9, 7)
    assert (params.max_tokens, params.stop, params.repetition_penalty) == (9, ("zz",), 1.2)
    await client.post("/api/chat", {"messages": [USER], "options": {"num_predict": -1}, "keep_alive": 0})
    params = engine.submitted[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.8, 40, 0.9, None)


async def test_generate(client: Client, engine: FakeEngine) -> None:
    *chunks, last = lines(await client.post("/api/generate", {"prompt": "hi", "system": "S"}))
    assert "".join(c["response"] for c in chunks) == TEXT and last["done_reason"] == "stop"
    assert engine.rendered[-1][0] == [{"role": "system", "content": "S"}, USER]
    raw = (await client.post("/api/generate", {"prompt": "hi", "raw": True, "stream": False})).json
    assert raw["response"] == TEXT and engine.submitted[-1][0] == list(b"hi")


async def test_filling_in(client: Client, engine: FakeEngine) -> None:
    engine.fills_in = True
    for prompt in ("a", ""):
        reply = await client.post("/api/generate", {"prompt": prompt, "suffix": "b", "stream": False})
        assert reply.json["response"] == TEXT and engine.submitted[-1][0] == [*f"<{prompt}|b>".encode()]
    shown = (await client.post("/api/show", {"model": "fake-model"})).json
    assert "insert" in shown["capabilities"] and ".Suffix" in shown["template"]


async def test_without_a_prompt_the_model_is_loaded(client: Client, engine: FakeEngine) -> None:
    for path, body in (
        ("/api/chat", {"messages": []}),
        ("/api/chat", {"keep_alive": 0}),
        ("/api/generate", {"model": "m"}),
        ("/api/generate", {"prompt": "", "keep_alive": -1}),
    ):
        reply = (await client.post(path, body)).json
        assert (reply["done"], reply["done_reason"]) == (True, "load")
    assert engine.submitted == []


async def test_formats(client: Client, engine: FakeEngine) -> None:
    for form in ("json", {"type": "string"}):
        for path, body in (
            ("/api/chat", {"messages": [USER]}),
            ("/api/generate", {"prompt": "x"}),
            ("/api/generate", {"prompt": "x", "raw": True}),
        ):
            reply = (await client.post(path, {**body, "format": form, "stream": False})).json
            assert reply.get("response", reply.get("message", {}).get("content")) == '"a😸b中"'
    reply = await client.post("/api/chat", {"messages": [USER], "format": ""})
    assert "".join(c["message"]["content"] for c in lines(reply)) == TEXT


async def test_tools_and_thoughts(client: Client, engine: FakeEngine) -> None:
    """Calls are whole, in either form of the answer."""
    engine.template_source, engine.script = THINKING, f"<think>Hm.</think>Yes.{WEATHER}{CLOCK}"
    ask = {"messages": [USER], "tools": [TOOL], "think": True}
    whole = (await client.post("/api/chat", {**ask, "stream": False})).json["message"]
    chunks = [c["message"] for c in lines(await client.post("/api/chat", ask))]
    assert "".join(c.get("thinking", "") for c in chunks) == whole["thinking"] == "Hm."
    assert "".join(c["content"] for c in chunks) == whole["content"] == "Yes."
    streamed = [call["function"] for c in chunks for call in c.get("tool_calls", ())]
    assert streamed == [call["function"] for call in whole["tool_calls"]]
    assert streamed == [
        {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}},
        {"index": 1, "name": "get_time", "arguments": {"zone": "CET", "exact": True}},
    ]


async def test_results_of_tools_find_their_calls(client: Client, engine: FakeEngine) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g", "f")]
    messages = [
        USER,
        {"role": "assistant", "content": "", "thinking": "T", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_name": "f"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_name": "f"},
        {"role": "tool", "content": "4", "tool_name": "h"},
    ]
    assert (await client.post("/api/chat", {"messages": messages})).status == 200
    _, assistant, *results = engine.rendered[-1][0]
    assert assistant["reasoning_content"] == "T"
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [(r["content"], r.get("tool_call_id"), r["name"]) for r in results] == [
        ("1", ids[0], "f"), ("2", ids[1], "g"), ("3", ids[2], "f"), ("4", None, "h"),
    ]  # fmt: skip


async def test_logprobs(client: Client) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1}
    whole = (await client.post("/api/chat", {**body, "stream": False})).json["logprobs"]
    streamed = [e for c in lines(await client.post("/api/chat", body)) for e in c.get("logprobs", ())]
    assert whole == streamed and len(whole) == 20 and len(whole[0]["top_logprobs"]) == 1


async def test_what_clients_ask_about_models(client: Client, engine: FakeEngine) -> None:
    assert tuple(map(int, (await client.get("/api/version")).json["version"].split("."))) >= (0, 6, 4)
    (entry,) = (await client.get("/api/tags")).json["models"]
    assert set(entry) >= {"name", "model", "size", "digest", "modified_at", "details"}
    assert entry["name"] == "fake-model" and entry["details"]["parameter_size"] == "135"
    (running_model,) = (await client.get("/api/ps")).json["models"]
    assert running_model["context_length"] == 512 and running_model["digest"] == entry["digest"]
    for body in ({"model": "fake-model"}, {"name": "fake-model:latest"}):
        shown = (await client.post("/api/show", body)).json
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["capabilities"] == ["completion", "tools"] and shown["template"] == "{{ messages }}"
    reply = await client.post("/api/show", {"model": "other"})
    assert reply.status == 404 and reply.json == {"error": "model 'other' not found"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat", {"messages": 3}, "messages"),
        ("chat", {"messages": [3]}, "messages[0]"),
        ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ("chat", {"messages": [{**USER, "content": "raise"}]}, "alternate"),
        ("chat", {"messages": [{**USER, "content": "x" * 600}]}, "512"),
        ("chat", {"messages": [USER], "options": 3}, "options"),
        ("chat", {"messages": [USER], "options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"messages": [USER], "options": {"top_p": "x"}}, "options.top_p"),
        ("chat", {"messages": [USER], "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": [USER], "format": 3}, "format"),
        ("chat", {"messages": [USER], "format": {"not": {}}}, "format"),
        ("chat", {"messages": [USER], "think": "much"}, "think"),
        ("chat", {"messages": [USER], "think": True}, "think"),
        ("chat", {"messages": [USER], "tools": [{"type": "x"}]}, "tools[0].type"),
        ("chat", {"messages": [USER], "stream": "yes"}, "stream"),
        ("generate", {"prompt": 3}, "prompt"),
        ("generate", {"prompt": "x" * 600, "raw": True}, "512"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("show", {}, "model"),
    ],
)
async def test_errors_name_the_field(
    client: Client, engine: FakeEngine, path: str, body: dict[str, Any], field: str
) -> None:
    reply = await client.post(f"/api/{path}", body)
    assert reply.status == 400, reply.text
    assert set(reply.json) == {"error"} and field in reply.json["error"]
    assert engine.submitted == []


async def test_errors_in_a_stream(client: Client, engine: FakeEngine) -> None:
    engine.fail_after = 3
    assert lines(await client.post("/api/chat", {"messages": [USER]}))[-1] == {"error": "the device failed"}
    assert (await client.get("/api/nothing")).json == {"error": "there is nothing at this path"}


async def test_lines_while_nothing_comes() -> None:
    engine = FakeEngine()
    engine.prefill_seconds = 0.2
    async with running(engine, keep_alive=0.02) as client:
        for path, body in (("/api/chat", {"messages": [USER]}), ("/api/generate", {"prompt": "x"})):
            first, *_, last = lines(await client.post(path, body))
            assert not first["done"] and last["done"]
            assert first.get("response") == "" or first["message"]["content"] == ""


async def test_lines_while_a_call_is_written(engine: FakeEngine) -> None:
    """It is sent whole: until then there is nothing to send."""
    engine.template_source, engine.script, engine.token_seconds = HERMES, WEATHER, 0.005
    async with running(engine, keep_alive=0.02) as client:
        *waiting, call, last = lines(await client.post("/api/chat", {"messages": [USER], "tools": [TOOL]}))
    assert call["message"]["tool_calls"] and last["done"]
    assert len(waiting) >= 3 and all(line["message"]["content"] == "" for line in waiting)


@pytest.fixture(scope="module")
def engine_in_background() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def api(engine_in_background: FakeEngine) -> Iterator[ollama.Client]:
    with in_background(engine_in_background) as base:
        yield ollama.Client(base, headers={"Authorization": f"Bearer {KEY}"})


def test_the_ollama_package(api: ollama.Client) -> None:
    assert "".join(part.message.content or "" for part in api.chat("m", [USER], stream=True)) == TEXT
    assert api.generate("m", "hi").response == TEXT
    assert [model.model for model in api.list().models] == ["fake-model"]
    assert api.show("fake-model").modelinfo["llama.context_length"] == 512  # type: ignore[index]
    assert api.ps().models[0].context_length == 512
    with pytest.raises(ollama.ResponseError, match="512") as caught:
        list(api.chat("m", [{"role": "user", "content": "x" * 600}], stream=True))
    assert caught.value.status_code == 400


def test_the_ollama_package_calls_a_tool(
    api: ollama.Client, engine_in_background: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_in_background, "template_source", THINKING)
    monkeypatch.setattr(engine_in_background, "script", f"<think>Hm.</think>{WEATHER}")
    messages: list[Any] = [USER]
    answer = api.chat("m", messages, tools=[TOOL], think=True).message
    (call,) = answer.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert answer.thinking == "Hm."
    messages += [answer, {"role": "tool", "tool_name": call.function.name, "content": "18 C"}]
    api.chat("m", messages, tools=[TOOL])
    _, assistant, result = engine_in_background.rendered[-1][0]
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_tokens_that_all_came_at_once_took_some_time() -> None:
    """Guessed right, with the first: clients divide by the duration."""
    writer = OllamaWriter(FakeEngine(), True, False)  # type: ignore[arg-type]
    usage = Usage(1, 5, completion_tokens=12, timings=[Timings(prompt_n=5, predicted_n=12)])
    assert json.loads(writer.end(usage))["eval_duration"] == 1000
