"""Grammars for answers around which a family of models writes something: reasoning, calls, headers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.text.output import WHITESPACE, literal
from hetero.text.reasoning import begun_in, tags_of
from hetero.text.tools.families import HARMONY, Family, family_of
from hetero.text.tools.harmony import START

MAX_PARALLEL_CALLS = 16
COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "not")
_MARK = re.compile(r"(<[^<>\s]{1,60}>|\[/?[A-Z_]{1,60}\])")
MarkToken = Callable[[str], int | None]  # the id of a mark that is a token which no text can write


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The answer calls tools: any of `tools`, one or several. With an output, it may be that instead.

    `tools` are names and the schemas of their arguments.
    """

    tools: Sequence[tuple[str, Mapping[str, Any]]]
    several: bool


def around(
    template: str,
    prompt_tail: str,
    mark_token: MarkToken,
    calls: ForcedCalls | None,
    has_output: bool,
) -> str | None:
    """A Lark grammar for the whole answer, which refers to the output's own as @output; None for just that.

    `template` is the chat template's source and `prompt_tail` the prompt's end, as for the answer's parser.
    """
    family = family_of(template)
    writer = _Writer(mark_token)
    alternatives = []
    if calls is not None:
        alternatives.append(_calls(family, calls, writer))
    if has_output:
        is_harmony = family is HARMONY and prompt_tail.endswith(f"{START}assistant")
        header = writer.write("<|channel|>final<|message|>") if is_harmony else ""
        alternatives.append(f"{header} @output")
    reasoning = _reasoning(template, family, prompt_tail, writer)
    if not reasoning and alternatives == [" @output"]:
        return None
    writer.rules.insert(0, f"start: {reasoning} answer")
    writer.rules.append(f"answer: {' | '.join(alternatives)}")
    return "\n".join(writer.rules)


class _Writer:
    """Lark for text with marks in it, and the rules that it needs."""

    def __init__(self, mark_token: MarkToken):
        self.rules: list[str] = []
        self._token = mark_token

    def write(self, text: str) -> str:
        pieces, plain = [], ""
        for part in _MARK.split(text):
            token_id = self._token(part) if _MARK.fullmatch(part) else None
            if token_id is None:
                plain += part
                continue
            pieces += [literal(plain)] * bool(plain) + [f"<[{token_id}]>"]
            plain = ""
        return " ".join(pieces + [literal(plain)] * bool(plain))

    def text_until(self, mark: str) -> str:
        """Any text and then the mark."""
        if self._token(mark) is not None:
            self.rules.append("ANY_TEXT: /(?s:.*)/")
            return f"ANY_TEXT {self.write(mark)}"
        self.rules.append(f"any_text[lazy]: /(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}/")
        return "any_text"


def _reasoning(template: str, family: Family, prompt_tail: str, writer: _Writer) -> str:
    if family is HARMONY:
        if not prompt_tail.endswith(f"{START}assistant"):
            return ""
        head, tail = writer.write("<|channel|>analysis<|message|>"), writer.write("<|start|>assistant")
        return f"({head} {writer.text_until('<|end|>')} {tail})?"
    tags = tags_of(template)
    if tags is None or prompt_tail.rstrip().endswith(tags[1]):
        return ""
    writer.rules.append(r"BLANKS: /\n{0,2}/")
    thought = f"{writer.text_until(tags[1])} BLANKS"
    return thought if begun_in(prompt_tail, tags) else f"({writer.write(tags[0])} {thought})?"


def _calls(family: Family, calls: ForcedCalls, writer: _Writer) -> str:
    names = []
    for index, (name, schema) in enumerate(calls.tools):
        place, shown = (
            ("{NAME}", json.dumps(name, ensure_ascii=False)) if "{NAME}" in family.call else ("{name}", name)
        )
        head = family.call.replace(place, shown)
        writer.rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
        writer.rules.append(
            f"call_{index}: {writer.write(head)} arguments_{index} {writer.write(family.after)}"
        )
        names.append(f"call_{index}")
    writer.rules.append(f"call: {' | '.join(names)}")
    more = ""
    if calls.several and family.between is not None:
        more = f"({writer.write(family.between)} call){{0,{MAX_PARALLEL_CALLS - 1}}}"
    return f"{writer.write(family.begin)} call {more} {writer.write(family.end)}"


def arguments_schemas(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Schemas for a tool's arguments, from what its author meant to what can always be enforced.

    A tool's schema describes more than a grammar can check, and is often sloppy: what is not enforced is
    left to the tool, as it is where nothing is forced.
    """
    schema = {key: value for key, value in parameters.items() if key != "x-guidance"}
    schema["type"] = "object"
    if not any(word in schema for word in COMBINATORS):
        schema.setdefault("additionalProperties", False)
    plain = _without(schema, ("pattern", "format", "not", "if", "then", "else", "patternProperties"))
    strict: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    lenient = {**strict, "lenient": True}
    return [
        {**candidate, "x-guidance": options} for candidate in (schema, plain) for options in (strict, lenient)
    ] + [{"type": "object", "x-guidance": strict}]


def _without(value: Any, words: Sequence[str]) -> Any:
    """A schema without these keywords, which may be the names of properties all the same."""
    if isinstance(value, list):
        return [_without(item, words) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, inner in value.items():
        if key in ("properties", "$defs", "definitions") and isinstance(inner, Mapping):
            kept[key] = {name: _without(schema, words) for name, schema in inner.items()}
        elif key in ("enum", "const", "default", "examples"):
            kept[key] = inner
        elif key not in words:
            kept[key] = _without(inner, words)
    return kept
