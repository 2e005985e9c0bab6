"""Aider: it has no tools; it edits files as the model's text says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server.background import KEY, in_background

from .conftest import Run
from .recorder import Exchange, Recorder, recording
from .scripted import ScriptedEngine

FLAGS = (
    "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes",
    "--analytics-disable", "--no-pretty", "--edit-format", "whole", "f.py",
)  # fmt: skip
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it looks for prices on the web
BEFORE, AFTER = "def f():\n    return 1\n", "def f():\n    return 42\n"


@pytest.fixture(autouse=True)
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.py"
    path.write_text(BEFORE)
    return path


def text_of(exchange: Exchange) -> str:
    """What a stream of OpenAI's or of Ollama's says."""
    if exchange.path.startswith("/api/"):
        return "".join(json.loads(line)["message"]["content"] for line in exchange.answer.splitlines())
    events = [line[6:] for line in exchange.answer.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(
    ("model", "path"), [("openai/smollm2", "/v1/chat/completions"), ("ollama_chat/smollm2", "/api/chat")]
)
def test_streamed_chat(real: Recorder, run: Run, tmp_path: Path, model: str, path: str) -> None:
    """What the model says is shown as it was sent."""
    limit = {"num_predict": 16} if path == "/api/chat" else {"max_tokens": 16}
    settings = [{"name": model, "extra_params": {"temperature": 0, **limit}}]
    (tmp_path / ".aider.model.settings.yml").write_text(json.dumps(settings))  # JSON is YAML too
    base = {"OPENAI_API_BASE": f"{real.base}/v1", "OPENAI_API_KEY": "x", "OLLAMA_API_BASE": real.base}
    shown = run("bin/aider", "--model", model, "--message", "What is f?", *FLAGS, **base, **OFFLINE)
    asked = real.to(path)
    assert asked and all(e.status == 200 and e.body["stream"] for e in asked), real.exchanges
    said = "".join(text_of(asked[0]).split())
    assert said and said in "".join(shown.split())
    if path == "/api/chat":
        shows = real.to("/api/show")
        assert shows and all(e.status == 200 for e in shows)
        assert json.loads(shows[0].answer)["model_info"]["llama.context_length"] == 8192


def test_an_edit(run: Run, file: Path) -> None:
    engine = ScriptedEngine(f"Sure, wörld:\n\nf.py\n```\n{AFTER}```\n")
    with in_background(engine) as base, recording(base) as recorder:
        keys = {"OPENAI_API_BASE": f"{recorder.base}/v1", "OPENAI_API_KEY": KEY}
        shown = run("bin/aider", "--model", "openai/m", "--message", "42!", *FLAGS, **keys, **OFFLINE)
    assert file.read_text() == AFTER and "Applied edit to f.py" in shown
    (exchange,) = recorder.exchanges
    assert (exchange.status, exchange.body["stream"]) == (200, True)
    (messages, *_) = engine.rendered[-1]
    assert any(BEFORE.strip() in message["content"] for message in messages)
