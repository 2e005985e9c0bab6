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
    prompt_tail: str,
    parallel: bool = True,
) -> PartsParser:
    """A parser for an answer to a prompt that the chat template `template` (its source) made.

    `tools` are OpenAI's (objects with a `function`); without any nothing is taken for a call. `prompt_tail`
    is the end of the prompt, which may have begun the reasoning. Not `parallel`: only the first call counts.
    """
    from hetero.text.reasoning import ReasoningParser, begun_in, tags_of
    from hetero.text.tools.families import HARMONY, family_of, tool_parser
    from hetero.text.tools.harmony import HarmonyParser

    family = family_of(template)
    if family is HARMONY:
        return HarmonyParser(prompt_tail, parallel)
    parser: PartsParser = PlainParser()
    if tools:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        parser = tool_parser(family, schemas, parallel)
    tags = tags_of(template)
    ends = family.ends_thought if tools else ()
    return parser if tags is None else ReasoningParser(parser, tags, begun_in(prompt_tail, tags), ends)


def marks_of(template: str, with_tools: bool) -> frozenset[str]:
    """The texts that the parser for this chat template must see even where they are control tokens."""
    from hetero.text.reasoning import tags_of
    from hetero.text.tools.families import HARMONY, family_of

    family = family_of(template)
    marks = family.marks if with_tools or family is HARMONY else frozenset()
    return marks.union(tags_of(template) or ())


def capabilities(template: str | None) -> tuple[str, ...]:
    """What a model with this chat template can do, in Ollama's words. Tools need no help of the template."""
    from hetero.text.reasoning import tags_of
    from hetero.text.tools.families import HARMONY, family_of

    if template is None:
        return ("completion",)
    thinks = tags_of(template) is not None or family_of(template) is HARMONY
    return ("completion", "tools", "thinking") if thinks else ("completion", "tools")
