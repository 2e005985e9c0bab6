"""What /api/chat and /api/generate send back: lines of JSON, the last one with `done` and the costs.

Format: https://github.com/ollama/ollama/blob/main/docs/api.md. Durations are in nanoseconds.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from hetero.server import openai, sse
from hetero.server.collect import Call, Change, Collected, Piece, Reasoning
from hetero.server.errors import ApiError, encode
from hetero.server.generate import Usage
from hetero.server.ollama.models import timestamp
from hetero.server.timings import sum_of

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def loaded(model: str, chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks for the model to be loaded: it is."""
    what: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {**_head(model), **what, "done": True, "done_reason": "load"}


class OllamaWriter:
    content_type = sse.NDJSON

    def __init__(self, engine: AsyncEngine, chat: bool, with_logprobs: bool) -> None:
        self._engine = engine
        self._chat = chat
        self._with_logprobs = with_logprobs
        self._began = time.monotonic()
        self._choice = Collected()

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return self._line({})  # lines of JSON know no comments

    def piece(self, piece: Piece) -> str:
        contents = [content for change in self._choice.add(piece) if (content := _content(change))]
        logprobs = self._logprobs(piece.delta.logprobs)
        if logprobs and not contents:
            contents.append({})
        lines = []
        for content in contents:
            lines.append(self._line(content, **logprobs))
            logprobs = {}  # once for all tokens behind the piece
        return "".join(lines)

    def end(self, usage: Usage) -> str:
        return self._line({}, **self._done(self._choice, usage))

    def failure(self, error: ApiError) -> str:
        return encode(error_body(error)) + "\n"

    def whole(self, choices: list[Collected], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        content: dict[str, Any] = {"content": choice.text}
        if reasoning := choice.reasoning:
            content["thinking"] = reasoning
        if calls := [call for call in map(_call, choice.calls) if call]:
            content["tool_calls"] = calls
        return self._body(content, **self._done(choice, usage), **self._logprobs(choice.logprobs))

    def _line(self, content: dict[str, Any], **more: Any) -> str:
        return encode(self._body(content, **more)) + "\n"

    def _body(self, content: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self._chat:
            what: dict[str, Any] = {"message": {"role": "assistant", "content": "", **content}}
        else:
            what = {"response": content.get("content", "")}
            what |= {name: value for name, value in content.items() if name != "content"}
        return {**_head(self._engine.info.name), **what, "done": False, **more}

    def _done(self, choice: Collected, usage: Usage) -> dict[str, Any]:
        done: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if choice.finish == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }
        if usage.timings:
            timings = sum_of(usage.timings)
            done["prompt_eval_duration"] = _nanoseconds(timings.prompt_seconds)
            # All may have come at once, guessed; clients divide by this, and llama-server says 1 us then too.
            done["eval_duration"] = max(1000, _nanoseconds(timings.predicted_seconds))
        return done

    def _logprobs(self, logprobs: Any) -> dict[str, Any]:
        if not (self._with_logprobs and logprobs):
            return {}
        return {"logprobs": openai.chat_logprobs(self._engine, logprobs)["content"]}


def _content(change: Change) -> dict[str, Any] | None:
    """Text as it comes; tool calls only when they are whole."""
    kind, _, block, text = change
    if isinstance(block, Call):
        call = _call(block) if kind == "close" else None
        return {"tool_calls": [call]} if call else None
    if kind != "more":
        return None
    return {"thinking": text} if isinstance(block, Reasoning) else {"content": text}


def _call(call: Call) -> dict[str, Any] | None:
    """None for a call that was cut off: there is no way to write half of one."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return {"id": call.id, "function": function}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time())}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
