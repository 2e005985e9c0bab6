"""Messages as OpenAI's chat API has them, checked, in the form that Conversation wants."""

from __future__ import annotations

from typing import Any

from hetero.server.errors import ApiError, bad_field
from hetero.server.validate import Fields, type_name, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(fields: Fields) -> tuple[list[dict[str, Any]], bool]:
    """(messages for the template, whether the last one is an assistant's to be continued).

    A developer message is a system message: it joins the one at the front, or becomes it. A missing or null
    content of an assistant is the empty string. Raises ApiError naming the message's field.
    """
    given = fields.array("messages")
    if not given:
        raise bad_field("messages", "must be an array with at least one message")
    messages = [_message(value, f"messages[{i}]") for i, value in enumerate(given)]
    if any(m["role"] == "developer" for m in messages):
        messages = merge_system(messages)
    prefill = is_prefill(messages)
    if fields.has("continue_final_message"):
        wanted = fields.boolean("continue_final_message")
        if wanted and not prefill:
            raise bad_field("continue_final_message", "needs an assistant message at the end")
        prefill = wanted
    if not fields.boolean("add_generation_prompt", True) and not prefill:
        raise bad_field("add_generation_prompt", "false is not supported by this server")
    return messages, prefill


def is_prefill(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is an assistant's words, which the answer continues."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the front: a leading system message, then every developer's, by blank lines."""
    front: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        is_front = message["role"] == "developer" or (i == 0 and message["role"] == "system")
        (front if is_front else rest).append(message)
    if not front:
        return rest
    text = "\n\n".join(filter(None, (text_of(m["content"]) for m in front)))
    return [{"role": "system", "content": text}, *rest]


def text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    fields = Fields(value, f"{where}.")
    role = value.get("role")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    message = {k: v for k, v in value.items() if v is not None}  # a null is as good as absent
    for name in ("name", "tool_call_id", "reasoning_content"):
        fields.string(name)
    calls = fields.array("tool_calls") or []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"{where}.tool_calls[{i}]", "must have a function with a name")
    message["content"] = _content(value, role, where)
    return message


def _content(message: dict[str, Any], role: str, where: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise bad_field(f"{where}.content", "is missing")
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or an array of parts", content)
    for i, part in enumerate(content):
        at = f"{where}.content[{i}]"
        if not isinstance(part, dict):
            raise wrong_type(at, "an object", part)
        if part.get("type") != "text":
            raise unsupported_part(at, part.get("type"))
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{at}.text", "a string", part.get("text"))
    return content


def unsupported_part(where: str, kind: Any, supported: str = "'text'") -> ApiError:
    """The 400 for a part of a message that is no text."""
    shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
    return bad_field(f"{where}.type", f"{shown} parts are not supported by this model, only {supported}")
