"""An answer's text as what it means: text, reasoning, tool calls, each as early as it is certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool is called. `index` counts the answer's calls 0, 1, 2 …; `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of the arguments of the call that started last."""

    index: int
    text: str


Part = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments


class PartsParser(Protocol):
    """Reads one answer. No part's text is empty; adjacent parts of one kind belong together."""

    @property
    def called_tools(self) -> bool:
        """Whether a call has started, and so the reason of an answer that ends by itself is `tool_calls`."""

    def push(self, text: str) -> list[Part]:
        """What the next text makes certain."""

    def finish(self) -> list[Part]:
        """The rest, when no more text comes, for whatever reason. Nothing may be pushed afterwards."""


class PlainParser:
    """All text is the answer."""

    called_tools = False

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def parser_for(
    template: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    thinking: bool | str | None,
    prompt_tail: str,
) -> PartsParser:
    """A parser for an answer to a prompt that the chat template `template` (its source) made.

    `tools` are OpenAI's (objects with a `function`); `tool_choice` is "auto", "none", "required" or
    {"name": …}; `thinking` is what was asked for, None for the template's default; `prompt_tail` the end of
    the prompt, which may have begun the reasoning.
    """
    return PlainParser()
