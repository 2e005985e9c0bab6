"""Items of the Responses API as messages of the chat API."""

from __future__ import annotations

from collections.abc import Sequence
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
    turns = _Turns()
    for i, item in enumerate(items):
        turns.add(item, f"input[{i - num_old}]")
    front = [{"role": "system", "content": instructions}] if instructions else []
    return merge_system([*front, *turns.messages()])


class _Turns:
    """The messages so far. Texts that become one are joined at the end: there may be very many."""

    def __init__(self) -> None:
        self._messages: list[Message] = []  # the assistant's "content" is a list of texts
        self._called: dict[str, str] = {}  # ids of calls, and names of the tools

    def messages(self) -> list[Message]:
        """All of them that say something. Nothing can be added afterwards."""
        for message in self._messages:
            if message["role"] == "assistant":
                message["content"] = "".join(message["content"])
        return [m for m in self._messages if m["role"] != "assistant" or m["content"] or "tool_calls" in m]

    def add(self, item: Item, where: str) -> None:
        kind = "message" if item.get("type") is None else item["type"]
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._function_call(item, where)
        elif kind == "function_call_output":
            self._function_call_output(item, where)
        else:
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
            raise bad_field(f"{where}.type", f"items of type {shown} are not supported by this server")

    def _assistant(self) -> Message:
        """The assistant's message that goes on, or a new one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        content = _text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._messages.append({"role": role, "content": content})
        elif "tool_calls" in self._assistant():
            self._messages.append({"role": role, "content": [content]})
        else:
            self._assistant()["content"].append(content)

    def _reasoning(self, item: Item, where: str) -> None:
        name = "content" if item.get("content") else "summary"
        text = _text(item.get(name) or [], f"{where}.{name}")
        if text:
            self._messages.append({"role": "assistant", "content": [], "reasoning_content": text})

    def _function_call(self, item: Item, where: str) -> None:
        name, arguments, call_id = (_string(item, key, where) for key in ("name", "arguments", "call_id"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._called[call_id] = name

    def _function_call_output(self, item: Item, where: str) -> None:
        call_id = _string(item, "call_id", where)
        text = _text(item.get("output"), f"{where}.output")
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._called:
            message["name"] = self._called[call_id]
        self._messages.append(message)


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
