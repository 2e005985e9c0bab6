"""Tools for models whose chat template knows none: told, called and answered in plain messages.

The words are those of the Hermes format, which many models have seen whatever their template says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INTRODUCTION = """\
You can call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with nothing but a JSON object of its name and arguments in <tool_call></tool_call> tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools with what templates take for granted in their parameters: an object's `properties`."""
    shown = []
    for tool in tools:
        function = dict(tool["function"])
        parameters = function.get("parameters") or {}
        if "properties" not in parameters and parameters.get("type", "object") == "object":
            function["parameters"] = {"type": "object", "properties": {}, **parameters}
        shown.append({**tool, "function": function})
    return shown


def in_plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation without tools, tool calls and tool messages, all told in words.

    Tools are told in the system message, if there is one, else in front of the first message: not every
    template has a place for a system message. Answers of tools become one message of the user.
    """
    plain: list[dict[str, Any]] = []
    answers: list[str] = []  # in a row, and what the user says to them; joined at the end of the row
    for message in messages:
        role = message.get("role")
        if role in ("tool", "function"):
            answers.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        entry = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            entry["content"] = "\n".join(filter(None, (_text(message), *map(_call, calls))))
        if answers and role == "user":
            entry["content"] = "\n".join((*answers, _text(entry)))
        elif answers:
            plain.append({"role": "user", "content": "\n".join(answers)})
        answers = []
        plain.append(entry)
    if answers:
        plain.append({"role": "user", "content": "\n".join(answers)})
    if tools and plain:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        told = INTRODUCTION.format(tools="\n".join(lines))
        first = plain[0]
        is_system = first.get("role") in ("system", "developer")
        order = (_text(first), told) if is_system else (told, _text(first))
        plain[0] = {**first, "content": "\n\n".join(filter(None, order))}
    return plain


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return content if isinstance(content, str) else ""


def _call(call: Any) -> str:
    """A call as the model writes it; the arguments stay as they are, JSON or not."""
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name", ""), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
