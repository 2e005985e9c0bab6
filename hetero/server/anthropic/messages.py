"""Messages of Anthropic's API, made of blocks, as messages of the chat API."""

from __future__ import annotations

from typing import Any

from hetero.server.errors import bad_field, encode
from hetero.server.messages import unsupported_part
from hetero.server.validate import Fields, wrong_type

Message = dict[str, Any]

ROLES = ("user", "assistant", "system")
# Claude Code begins its system prompt with a line that differs from request to request, for Anthropic's
# accounting alone: it would keep every prompt from being found in the cache.
BILLING = "x-anthropic-billing-header"


def read_messages(fields: Fields) -> list[Message]:
    """Messages for a Conversation: all of the system's at the front, turns of one role in a row as one.

    Raises ApiError naming the block.
    """
    given = fields.array("messages")
    if not given:
        raise bad_field("messages", "must be an array with at least one message")
    system, messages = [_system(fields.body.get("system"))], list[Message]()
    for i, value in enumerate(given):
        _add(messages, system, value, f"messages[{i}]")
    text = "\n\n".join(filter(None, system))
    return [{"role": "system", "content": text}, *messages] if text else messages


def _system(value: Any) -> str:
    """The same text, whether it comes as a string or as blocks."""
    if value is None:
        return ""
    texts = [value] if isinstance(value, str) else _texts(value, "system")
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return "\n".join(filter(None, texts))


def _add(messages: list[Message], system: list[str], value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or an array of blocks", content)
    if role == "system":
        system.append("\n".join(_texts(content, f"{where}.content")))
    elif role == "user":
        _add_user(messages, content, f"{where}.content")
    else:
        _add_assistant(messages, content, f"{where}.content")


def _add_user(messages: list[Message], blocks: list[Any], where: str) -> None:
    """Results of tools are messages of their own, before what the user says."""
    texts = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if _kind(block, at) == "tool_result":
            messages.append(_tool_result(messages, block, at))
        else:
            texts.append(_text(block, at))
    text = "\n".join(texts)
    if texts and messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{text}"
    elif texts or not blocks:
        messages.append({"role": "user", "content": text})


def _add_assistant(messages: list[Message], blocks: list[Any], where: str) -> None:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        kind = _kind(block, at)
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_tool_use(block, at))
        elif kind != "redacted_thinking":  # nobody here can read that
            texts.append(_text(block, at))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        message["content"] = messages.pop()["content"] + message["content"]
    messages.append(message)


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, call_id = _string(block, "name", where), _string(block, "id", where)
    arguments = Fields(block, f"{where}.").object("input") or {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": encode(arguments)}}


def _tool_result(messages: list[Message], block: dict[str, Any], where: str) -> Message:
    call_id, content = _string(block, "tool_use_id", where), block.get("content")
    text = content if isinstance(content, str) else "\n".join(_texts(content or [], f"{where}.content"))
    if Fields(block, f"{where}.").boolean("is_error"):
        text = f"Error: {text}"
    message = {"role": "tool", "tool_call_id": call_id, "content": text}
    names = [
        call["function"]["name"]
        for earlier in messages
        for call in earlier.get("tool_calls", ())
        if call["id"] == call_id
    ]
    return {**message, "name": names[-1]} if names else message


def _texts(blocks: Any, where: str) -> list[str]:
    if not isinstance(blocks, list):
        raise wrong_type(where, "a string or an array of blocks", blocks)
    return [_text(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def _text(block: Any, where: str) -> str:
    """The text of a block, or of a document that is text."""
    kind = _kind(block, where)
    if kind == "text":
        return _string(block, "text", where)
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(source, "data", f"{where}.source")
    raise unsupported_part(where, kind, "text")


def _kind(block: Any, where: str) -> Any:
    if not isinstance(block, dict):
        raise wrong_type(where, "an object", block)
    return block.get("type")


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "a string", value)
    return value
