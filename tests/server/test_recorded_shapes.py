"""Clients that no test can start: what they ask, from recorded/, and what they read from the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .background import HERMES, WEATHER
from .client import Client, Reply, running
from .fake_engine import FakeEngine

FOLDER = Path(__file__).parent / "recorded"
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    path.stem: {shape["name"]: shape for shape in json.loads(path.read_text())}
    for path in sorted(FOLDER.glob("*.json"))
}
ALL = [(client, name) for client, shapes in SHAPES.items() for name in shapes]
REFUSED = [("langchain", "image")]  # no model reads images
TEXT = "Hello, wörld 😸!"
NAME = "fake-model"


async def ask(client: Client, who: str, name: str) -> Reply:
    shape = SHAPES[who][name]
    body = json.dumps(shape["body"]).encode() if "body" in shape else None
    headers = {"Content-Type": "application/json"} | shape.get("headers", {})
    return await client.request(shape.get("method", "POST"), shape["path"], data=body, headers=headers)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(TEXT)
    engine.template_source, engine.fills_in = HERMES, True
    return engine


@pytest.fixture
def calling(engine: FakeEngine) -> FakeEngine:
    engine.script = WEATHER
    return engine


def deltas(reply: Reply) -> list[dict[str, Any]]:
    *chunks, done = reply.events
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def said(reply: Reply) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in deltas(reply))


@pytest.mark.parametrize(("who", "name"), ALL)
async def test_every_request_is_answered(client: Client, who: str, name: str) -> None:
    reply = await ask(client, who, name)
    assert reply.status == (400 if (who, name) in REFUSED else 204 if name == "preflight" else 200)


@pytest.mark.parametrize(("who", "name"), [pair for pair in ALL if pair[1] not in ("alive", "preflight")])
async def test_with_keys_every_request_needs_one(engine: FakeEngine, who: str, name: str) -> None:
    async with running(engine, api_keys=("k",)) as client:
        reply = await ask(client, who, name)
        assert reply.status == (200 if SHAPES[who][name]["path"] == "/health" else 401)


async def test_vscode_finds_the_model(client: Client) -> None:
    """It offers the model to its agent for `tools`, and cuts conversations at the context's length."""
    version = (await ask(client, "vscode_ollama", "version")).json["version"]
    assert tuple(int(part) for part in version.split(".")) >= (0, 6, 4)
    (model,) = (await ask(client, "vscode_ollama", "tags")).json["models"]
    assert model["model"] == SHAPES["vscode_ollama"]["show"]["body"]["model"]
    shown = (await ask(client, "vscode_ollama", "show")).json
    assert set(shown["capabilities"]) >= {"completion", "tools"} and "vision" not in shown["capabilities"]
    info = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 512
    assert info["general.basename"] == NAME


@pytest.mark.parametrize("who", ["vscode_ollama", "cline"])
async def test_openai_agents_call_tools(client: Client, calling: FakeEngine, who: str) -> None:
    reply = await ask(client, who, "chat")
    choices, usage = deltas(reply), reply.events[-2]
    assert choices[0]["delta"]["role"] == "assistant"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["index"] == 0 and calls[0]["id"] and calls[0]["function"]["name"] == "get_weather"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Paris"} and choices[-1]["finish_reason"] == "tool_calls"
    # Cline shows what was found in the cache.
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (user,) = [m for m in calling.rendered[-1][0] if m["role"] == "user"]
    parts = SHAPES[who]["chat"]["body"]["messages"][-1]["content"]
    assert all(part["text"] in json.dumps(user, ensure_ascii=False) for part in parts)


async def test_vscode_sends_results(client: Client, engine: FakeEngine) -> None:
    assert said(await ask(client, "vscode_ollama", "result")) == TEXT
    _, assistant, result = engine.rendered[-1][0]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1"


async def test_zed_finds_the_model(client: Client) -> None:
    """As llama-server's and as Ollama's: fields that its reader insists on."""
    (model,) = (await ask(client, "zed", "models")).json["data"]
    assert (model["id"], model["meta"]["n_ctx"]) == (NAME, 512)
    props = (await ask(client, "zed", "props")).json
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["chat_template"] == HERMES
    assert props["modalities"]["vision"] is False
    (listed,) = (await ask(client, "zed", "tags")).json["models"]
    assert all(isinstance(listed[name], str) and listed[name] for name in ("name", "modified_at", "digest"))
    assert isinstance(listed["size"], int)
    details = listed["details"]
    for name in ("format", "family", "parameter_size", "quantization_level"):
        assert isinstance(details[name], str) and details[name]
    assert details["families"] == [details["family"]]
    assert "tools" in (await ask(client, "zed", "show")).json["capabilities"]


async def test_zed_chats(client: Client, calling: FakeEngine) -> None:
    """Every line is read as a whole message."""
    reply = await ask(client, "zed", "chat")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    for line in lines:
        assert isinstance(line["model"], str) and isinstance(line["created_at"], str)
        assert line["message"]["role"] == "assistant" and isinstance(line["message"]["content"], str)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert call["id"] and call["function"]["name"] == "get_weather"
    assert call["function"]["arguments"] == {"city": "Paris"}
    assert lines[-1]["prompt_eval_count"] > 0 and lines[-1]["eval_count"] > 0
    assert (await ask(client, "zed", "result")).status == 200
    assert calling.rendered[-1][0][-1]["tool_call_id"] == "call_1"


async def test_zed_predicts_edits(client: Client, engine: FakeEngine) -> None:
    """The prompt is the model's as it stands: no template around it."""
    body = SHAPES["zed"]["prediction"]["body"]
    reply = (await ask(client, "zed", "prediction")).json
    assert (reply["response"], reply["done"]) == (TEXT, True)
    prompt, params, _ = engine.submitted[-1]
    assert bytes(prompt).decode() == body["prompt"]
    assert (params.max_tokens, params.stop, params.temperature) == (64, ("<|endoftext|>",), 0.2)


async def test_llama_vscode_fills_in(client: Client, engine: FakeEngine) -> None:
    fields = (await ask(client, "llama_vscode", "infill")).json
    assert fields["content"] == TEXT[:17] and fields["truncated"] is False
    # It asked for times too: there are none of this engine's.
    assert set(fields) == {"content", "truncated", "tokens_cached"}
    asked = b"[a.py:x = 1\n]<import os\n\ndef f():\n|\nf()\n>    return "
    assert bytes(engine.submitted[-1][0]) == asked
    warm = await ask(client, "llama_vscode", "warm-up")
    assert warm.json == {} and engine.submitted[-1][1].max_tokens == 1
    assert bytes(engine.submitted[-1][0]).startswith(b"[a.py:x = 1\n]"), "the cache has the files now"


async def test_continue_completes_code(client: Client, engine: FakeEngine) -> None:
    """It sends a suffix as such where Ollama's template has a place for it."""
    assert ".Suffix" in (await ask(client, "continue_ide", "show")).json["template"]
    reply = await ask(client, "continue_ide", "fill in")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["response"] for line in lines) == TEXT and lines[-1]["done"]
    assert bytes(engine.submitted[-1][0]) == b"<def f():\n    return |\nf()\n>"
    *parts, last = (await ask(client, "continue_ide", "completion")).events
    assert "".join(part["content"] for part in parts) == TEXT and last["stop"] is True


@pytest.mark.parametrize("who", ["open_webui", "librechat"])
async def test_web_interfaces(client: Client, engine: FakeEngine, who: str) -> None:
    assert (await ask(client, who, "alive")).text == ""
    assert [m["id"] for m in (await ask(client, who, "models")).json["data"]] == [NAME]
    chat = await ask(client, who, "chat")
    assert said(chat) == TEXT
    with_usage = [event for event in chat.events[:-1] if event.get("usage")]
    assert len(with_usage) == ("stream_options" in SHAPES[who]["chat"]["body"])
    title = (await ask(client, who, "title")).json["choices"][0]["message"]["content"]
    assert title == (TEXT if who == "open_webui" else '"a😸b中"')


async def test_open_webui_in_a_browser(client: Client) -> None:
    """It connects directly, from its own origin."""
    origin = SHAPES["open_webui"]["preflight"]["headers"]["Origin"]
    preflight = (await ask(client, "open_webui", "preflight")).headers
    assert preflight["Access-Control-Allow-Origin"] == origin
    assert preflight["Access-Control-Allow-Headers"] == "authorization,content-type"
    for name in ("models", "chat"):
        reply = await ask(client, "open_webui", name)
        assert reply.headers["Access-Control-Allow-Origin"] == origin


async def test_langchain(client: Client, engine: FakeEngine) -> None:
    assert said(await ask(client, "langchain", "chat")) == TEXT
    assert engine.submitted[-1][1].max_tokens == 64
    for name in ("structured", "structured, strict"):
        message = (await ask(client, "langchain", name)).json["choices"][0]["message"]
        assert json.loads(message["content"]) == "a😸b中" and message.get("refusal") is None
    for name, choice in (("required", "required"), ("named", {"name": "get_weather"})):
        assert (await ask(client, "langchain", name)).status == 200
        assert engine.asked["tool_choice"] == choice
    refused = (await ask(client, "langchain", "image")).error
    assert refused["param"] == "messages[0].content[1].type" and "image" in refused["message"]
