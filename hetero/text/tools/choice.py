"""Which tools a request lets the model call, and which it makes it call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero.request import RequestError

Tools = Sequence[Mapping[str, Any]]


def choose(tools: Tools, choice: str | Mapping[str, Any], parallel: bool) -> tuple[Tools, bool, bool]:
    """(the tools that the model is told, whether it must call one, whether it may call several).

    `choice` is "auto", "none", "required", {"name": tool} or {"names": [...], "mode": "auto" or "required"}.
    RequestError, field `tool_choice`, for a tool that is not there.
    """
    if not tools or choice == "none":
        return (), False, False
    if isinstance(choice, str):
        return tools, choice == "required", parallel
    names = {choice["name"]} if "name" in choice else set(choice["names"])
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    missing = names - {tool["function"]["name"] for tool in chosen}
    if missing:
        raise RequestError(f"tool_choice: there is no tool {min(missing)!r}", field="tool_choice")
    forced = "name" in choice or choice.get("mode") == "required"
    return chosen, forced, parallel and "name" not in choice
