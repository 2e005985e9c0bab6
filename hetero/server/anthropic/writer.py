"""What the Messages API sends back: a message, and the events that it grows by.

Format: https://docs.anthropic.com/en/docs/build-with-claude/streaming. Tokens that were found in a cache are
counted apart: the whole prompt is input_tokens + cache_read_input_tokens.
"""

from __future__ import annotations

import json
from typing import Any

from hetero.server import sse
from hetero.server.collect import Block, Call, Change, Collected, Piece, Reasoning
from hetero.server.errors import ApiError, encode
from hetero.server.generate import Usage

# Clients only send thoughts back that are signed; what they send is not checked here.
SIGNATURE = "unsigned"
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(error: ApiError) -> dict[str, Any]:
    """`error` as Anthropic's API has it. Clients know a conversation that is too long by its words."""
    kind = _TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


class MessageWriter:
    content_type = sse.SSE

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._choice = Collected()

    def begin(self) -> str:
        usage = {
            "input_tokens": self._prompt_tokens, "output_tokens": 0, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }  # fmt: skip
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def keep_alive(self) -> str:
        return _event("ping")

    def piece(self, piece: Piece) -> str:
        return "".join([_block_events(change) for change in self._choice.add(piece)])

    def end(self, usage: Usage) -> str:
        delta = _stop(self._choice)
        return _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def failure(self, error: ApiError) -> str:
        return sse.event(encode(error_body(error)), "error")

    def whole(self, choices: list[Collected], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        content = [_block(block) for block in choice.blocks]
        return {**self._head, "content": content, **_stop(choice), "usage": _usage(usage)}


def _block_events(change: Change) -> str:
    kind, index, block, text = change
    if kind == "open":
        return _event("content_block_start", index=index, content_block=_empty(block))
    if kind == "more":
        return _event("content_block_delta", index=index, delta=_delta(block, text))
    signature = ""
    if isinstance(block, Reasoning):
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        signature = _event("content_block_delta", index=index, delta=delta)
    return signature + _event("content_block_stop", index=index)


def _empty(block: Block) -> dict[str, Any]:
    if isinstance(block, Call):
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if isinstance(block, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if isinstance(block, Call):
        return {"type": "input_json_delta", "partial_json": text}
    if isinstance(block, Reasoning):
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _block(block: Block) -> dict[str, Any]:
    """A whole block. The arguments of a call that was cut off are no JSON, and left out."""
    empty = _empty(block)
    if isinstance(block, Reasoning):
        return {**empty, "thinking": block.text, "signature": SIGNATURE}
    if not isinstance(block, Call):
        return {**empty, "text": block.text}
    try:
        return {**empty, "input": json.loads(block.arguments or "{}")}
    except ValueError:
        return empty


def _stop(choice: Collected) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish, "end_turn")
    if choice.stop_string is not None and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _event(kind: str, **fields: Any) -> str:
    return sse.event(encode({"type": kind, **fields}), kind)
