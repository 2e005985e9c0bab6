"""Continue's command: OpenAI's chat, and its own tools."""

from __future__ import annotations

import json
from pathlib import Path

from server.background import KEY, in_background

from .conftest import Run
from .recorder import Recorder, recording
from .scripted import ScriptedEngine

CN = "node_modules/.bin/cn"
PATH = "/v1/chat/completions"
QUIET = {"CONTINUE_TELEMETRY_ENABLED": "0"}


def config(folder: Path, base: str, key: str, max_tokens: int = 1000) -> str:
    model = {
        "name": "hetero", "provider": "openai", "model": "smollm2", "apiBase": f"{base}/v1", "apiKey": key,
        "roles": ["chat"], "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"maxTokens": max_tokens, "temperature": 0},
    }  # fmt: skip
    path = folder / "cn.yaml"
    path.write_text(json.dumps({"name": "hetero", "version": "0.0.1", "schema": "v1", "models": [model]}))
    return str(path)


def test_streamed_chat(real: Recorder, run: Run, tmp_path: Path) -> None:
    shown = run(CN, "--config", config(tmp_path, real.base, "x", 24), "-p", "Name a river.", **QUIET)
    (exchange,) = real.to(PATH)
    assert (exchange.status, exchange.body["stream"]) == (200, True)
    assert exchange.body["tools"] and exchange.answer.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in exchange.answer.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said.strip() and shown.strip() == said.strip()


def test_a_tool(run: Run, tmp_path: Path) -> None:
    """The model asks for a file, and is told what is in it."""
    note = tmp_path / "note.txt"
    note.write_text("the river is the Loire\n")
    engine = ScriptedEngine("It is the Loire, wörld.", "Read", {"filepath": str(note)})
    with in_background(engine) as base, recording(base) as recorder:
        shown = run(CN, "--config", config(tmp_path, recorder.base, KEY), "-p", "Which river?", **QUIET)
    assert "It is the Loire, wörld." in shown
    (result,) = engine.results
    assert "the river is the Loire" in result
    first, second = recorder.to(PATH)
    assert '"finish_reason":"tool_calls"' in first.answer and '"finish_reason":"stop"' in second.answer
    (call,) = next(m["tool_calls"] for m in second.body["messages"] if m.get("tool_calls"))
    assert json.loads(call["function"]["arguments"]) == {"filepath": str(note)}
