"""Tools and the choice among them, as OpenAI's APIs write them, in the form that Conversation wants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hetero.server.errors import bad_field
from hetero.server.validate import Fields, type_name, wrong_type

MAX_NAME_CHARS = 256
CHOICES = ("auto", "none", "required")
Tool = dict[str, Any]
ToolChoice = str | dict[str, Any]


def read_tools(fields: Fields, *, skip_others: bool = False) -> list[Tool]:
    """The functions in `tools`, nested in `function` as chat has them, or flat as responses has them.

    Tools of another type are a 400, or left out with `skip_others`. Raises ApiError naming the tool.
    """
    tools = []
    for i, tool in enumerate(fields.array("tools") or ()):
        where = fields.name(f"tools[{i}]")
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object", tool)
        kind = tool.get("type", "function")
        if kind != "function":
            if skip_others:
                continue
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
            raise bad_field(f"{where}.type", f"{shown} tools are not supported, only 'function'")
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise wrong_type(f"{where}.function", "an object", function)
        at = f"{where}.function" if "function" in tool else where
        tools.append(as_tool(function, "parameters", at))
    return tools


def as_tool(function: Mapping[str, Any], schema_name: str, where: str) -> Tool:
    """A tool with `name`, `description` and a schema of its arguments; without one it takes an empty object.

    Raises ApiError that names the field under `where`.
    """
    given = Fields(function, f"{where}.")
    name = given.string("name")
    if not name or len(name) > MAX_NAME_CHARS:
        raise bad_field(given.name("name"), f"must be a string of 1 to {MAX_NAME_CHARS} characters")
    schema = given.object(schema_name) or {}
    if "type" not in schema and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        schema = {"type": "object", "properties": {}, **schema}
    tool: Tool = {"name": name, "parameters": schema}
    description = given.string("description")
    if description:
        tool = {"name": name, "description": description, "parameters": schema}
    if given.boolean("strict"):
        tool["strict"] = True
    return {"type": "function", "function": tool}


def read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """ "auto", "none", "required", {"name": tool} or {"names": tools, "mode": "auto" or "required"}.

    Without tools there is nothing to choose: "none". Raises ApiError.
    """
    choice = fields.body.get("tool_choice")
    where = fields.name("tool_choice")
    if isinstance(choice, str) and choice not in CHOICES:
        raise bad_field(where, f"must be {', '.join(CHOICES)} or an object that names a tool")
    if not (choice is None or isinstance(choice, (str, dict))):
        raise wrong_type(where, "a string or an object", choice)
    if not tools:
        return "none"
    if not isinstance(choice, dict):
        return choice or "auto"
    kind = choice.get("type", "function")
    if kind == "function":
        return {"name": known_tool(_name_in(choice), {tool["function"]["name"] for tool in tools}, where)}
    if kind != "allowed_tools":
        shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
        raise bad_field(where, f"type {shown} is not supported, only 'function' and 'allowed_tools'")
    allowed = choice.get("allowed_tools", choice)
    if not isinstance(allowed, dict):
        raise wrong_type(f"{where}.allowed_tools", "an object", allowed)
    entries, mode = allowed.get("tools"), allowed.get("mode", "auto")
    if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
        raise bad_field(where, "allowed_tools needs a mode, auto or required, and a list of tools")
    known = {tool["function"]["name"] for tool in tools}
    names = [known_tool(_name_in(entry), known, where) for entry in entries]
    return {"names": names, "mode": mode}


def known_tool(name: Any, known: Collection[str], where: str) -> str:
    """`name`, if it is one of the `known` tools. Raises ApiError."""
    if not isinstance(name, str):
        raise bad_field(where, "must name a tool")
    if name not in known:
        raise bad_field(where, f"there is no tool {name[:100]!r} in tools")
    return name


def _name_in(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else choice.get("name")
