"""Items of the Responses API as messages of the chat API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetero.server.errors import bad_field
from hetero.server.messages import merge_system, unsupported_part
from hetero.server.validate import type_name, wrong_type

Item = dict[str, Any]
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def read_items(value: Any) -> list[Item]:
    """The items of `input`: a text is the user's message. Raises ApiError."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array of items", value)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong_type(f"input[{i}]", "an object", item)
    return value


def to_messages(items: Sequence[Item], instructions: str | None, num_old: int = 0) -> list[Message]:
    """Messages for a Conversation; `instructions` and developers' messages go to its front.

    What the assistant thought, said and called in a row is one message. Raises ApiError naming the item;
    the first `num_old` items are not the request's own.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        where = f"input[{i - num_old}]"
        kind = "message" if item.get("type") is None else item["type"]
        add = _ADD.get(kind) if isinstance(kind, str) else None
        if add is None:
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
            raise bad_field(f"{where}.type", f"items of type {shown} are not supported by this server")
        add(messages, item, where)
    spoken = [m for m in messages if m["role"] != "assistant" or m["content"] or "tool_calls" in m]
    return merge_system(spoken)


def _message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    content = _text(item.get("content"), f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and "tool_calls" not in last:
        last["content"] += content
    else:
        messages.append({"role": role, "content": content})


def _reasoning(messages: list[Message], item: Item, where: str) -> None:
    name = "content" if item.get("content") else "summary"
    text = _text(item.get(name) or [], f"{where}.{name}")
    if text:
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _function_call(messages: list[Message], item: Item, where: str) -> None:
    name, arguments, call_id = (_string(item, key, where) for key in ("name", "arguments", "call_id"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _function_call_output(messages: list[Message], item: Item, where: str) -> None:
    call_id = _string(item, "call_id", where)
    message = {
        "role": "tool",
        "tool_call_id": call_id,
        "content": _text(item.get("output"), f"{where}.output"),
    }
    calls = [call for m in messages for call in m.get("tool_calls", ()) if call["id"] == call_id]
    if calls:
        message["name"] = calls[-1]["function"]["name"]
    messages.append(message)


_ADD: dict[str, Callable[[list[Message], Item, str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "a string", value)
    return value


def _text(content: Any, where: str) -> str:
    """The text of a string or of parts; only text is understood."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, "a string or an array of parts", content)
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise wrong_type(at, "an object", part)
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise unsupported_part(at, kind, "text")
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", at))
    return "\n".join(texts)
