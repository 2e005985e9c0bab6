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
    turns = _Turns(_system(fields.body.get("system")))
    for i, value in enumerate(given):
        turns.add(value, f"messages[{i}]")
    return turns.messages()


def _system(value: Any) -> str:
    """The same text, whether it comes as a string or as blocks."""
    if value is None:
        return ""
    texts = [value] if isinstance(value, str) else _texts(value, "system")
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return "\n".join(filter(None, texts))


class _Turns:
    """The messages so far. Texts that become one are joined at the end: there may be very many."""

    def __init__(self, system: str):
        self._system = [system]
        self._messages: list[Message] = []  # "content" is a list of texts, but not of tools' results
        self._called: dict[str, str] = {}  # ids of calls, and names of the tools

    def messages(self) -> list[Message]:
        """All of them. Nothing can be added afterwards."""
        for message in self._messages:
            if message["role"] != "tool":
                message["content"] = ("\n\n" if message["role"] == "user" else "").join(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
        text = "\n\n".join(filter(None, self._system))
        return [{"role": "system", "content": text}, *self._messages] if text else self._messages

    def add(self, value: Any, where: str) -> None:
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
            self._system.append("\n".join(_texts(content, f"{where}.content")))
        elif role == "user":
            self._add_user(content, f"{where}.content")
        else:
            self._add_assistant(content, f"{where}.content")

    def _add_user(self, blocks: list[Any], where: str) -> None:
        """Results of tools are messages of their own, before what the user says."""
        texts = []
        for i, block in enumerate(blocks):
            at = f"{where}[{i}]"
            if _kind(block, at) == "tool_result":
                self._messages.append(self._tool_result(block, at))
            else:
                texts.append(_text(block, at))
        text = "\n".join(texts)
        if texts and self._messages and self._messages[-1]["role"] == "user":
            self._messages[-1]["content"].append(text)
        elif texts or not blocks:
            self._messages.append({"role": "user", "content": [text]})

    def _add_assistant(self, blocks: list[Any], where: str) -> None:
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or "tool_calls" in last:
            last = {"role": "assistant", "content": []}
            self._messages.append(last)
        for i, block in enumerate(blocks):
            at = f"{where}[{i}]"
            kind = _kind(block, at)
            if kind == "thinking":
                last.setdefault("reasoning_content", []).append(_string(block, "thinking", at))
            elif kind == "tool_use":
                call = _tool_use(block, at)
                self._called[call["id"]] = call["function"]["name"]
                last.setdefault("tool_calls", []).append(call)
            elif kind != "redacted_thinking":  # nobody here can read that
                last["content"].append(_text(block, at))

    def _tool_result(self, block: dict[str, Any], where: str) -> Message:
        call_id, content = _string(block, "tool_use_id", where), block.get("content")
        text = content if isinstance(content, str) else "\n".join(_texts(content or [], f"{where}.content"))
        if Fields(block, f"{where}.").boolean("is_error"):
            text = f"Error: {text}"
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._called.get(call_id)
        return message if name is None else {**message, "name": name}


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, call_id = _string(block, "name", where), _string(block, "id", where)
    arguments = Fields(block, f"{where}.").object("input") or {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": encode(arguments)}}


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
