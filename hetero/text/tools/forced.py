"""Grammars for answers around which a family of models writes something: reasoning, calls, headers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.text.output import MAX_CHARS, WHITESPACE
from hetero.text.reasoning import begun_in, tags_of
from hetero.text.tools.families import HARMONY, Family, family_of
from hetero.text.tools.harmony import START
from hetero.text.tools.lark import Inexpressible, LarkWriter, MarkToken
from hetero.text.tools.native import native_call

MAX_PARALLEL_CALLS = 16
MAX_OWN_CHARS = 1 << 20  # of the rules for calls that are not in JSON
COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "not")


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The answer calls tools: any of `tools`, one or several. With an output, it may be that instead.

    `tools` are names, the schemas of their arguments, and whether calls are in the family's own form.
    """

    tools: Sequence[tuple[str, Mapping[str, Any], bool]]
    several: bool


def own_form(template: str, name: str, schema: Mapping[str, Any], mark_token: MarkToken) -> str | None:
    """A grammar for one call in the form of the template's family; None where that is JSON, or where the
    schema cannot be followed in it. Whether it compiles is another question."""
    writer = LarkWriter(mark_token, MAX_CHARS)
    try:
        writer.rules.insert(0, f"start: {native_call(family_of(template).name, name, schema, writer)}")
    except Inexpressible:
        return None
    return "\n".join(writer.rules)


def around(
    template: str,
    prompt_tail: str,
    mark_token: MarkToken,
    calls: ForcedCalls | None,
    has_output: bool,
) -> str | None:
    """A Lark grammar for the whole answer, which refers to the output's own as @output; None for just that.

    `template` is the chat template's source and `prompt_tail` the prompt's end, as for the answer's parser.
    Inexpressible if calls in the family's own form are too long, all of them together.
    """
    family = family_of(template)
    has_own = calls is not None and any(is_own for *_, is_own in calls.tools)
    writer = LarkWriter(mark_token, MAX_OWN_CHARS if has_own else None)
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


def _reasoning(template: str, family: Family, prompt_tail: str, writer: LarkWriter) -> str:
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


def _calls(family: Family, calls: ForcedCalls, writer: LarkWriter) -> str:
    names = []
    for index, (name, schema, is_own) in enumerate(calls.tools):
        call = (
            native_call(family.name, name, schema, writer)
            if is_own
            else _json_call(family, name, schema, writer)
        )
        writer.rules.append(f"call_{index}: {call}")
        names.append(f"call_{index}")
    writer.rules.append(f"call: {' | '.join(names)}")
    more = ""
    if calls.several and family.between is not None:
        more = f"({writer.write(family.between)} call){{0,{MAX_PARALLEL_CALLS - 1}}}"
    return f"{writer.write(family.begin)} call {more} {writer.write(family.end)}"


def _json_call(family: Family, name: str, schema: Mapping[str, Any], writer: LarkWriter) -> str:
    in_json = "{NAME}" in family.call
    place, shown = ("{NAME}", json.dumps(name, ensure_ascii=False)) if in_json else ("{name}", name)
    head = family.call.replace(place, shown)
    return f"{writer.write(head)} {writer.json(schema)} {writer.write(family.after)}"


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
