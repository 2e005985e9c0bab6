"""What an answer must look like, as clients ask for it, and the llguidance grammar for that.

An output is a dict with a `type`, and in `field` the client's name for it ("response_format" without one):

    {"type": "text"}                                any text
    {"type": "json_object"}                         a JSON object; with `schema` one that follows it
    {"type": "json_schema", "json_schema": {"schema": {…}}}
    {"type": "regex", "regex": …}                   the whole answer matches it
    {"type": "choice", "choice": ["…", …]}          one of them
    {"type": "grammar", "grammar": …}               llama.cpp's GBNF if it has "::=", else Lark
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

MAX_CHARS = 1 << 17  # of a schema or grammar; OpenAI's own bound for schemas is 120,000
MAX_CHOICES = 10_000
MAX_DEPTH = 400
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # their keys are names of the client's
_VALUES = ("enum", "const", "default", "examples")  # hold no schemas
# Between tokens of JSON: a space, or a new line with its indentation. Without an upper bound a small model
# can write blanks until its context is full.
WHITESPACE = r"( |\n[ \t]{0,40})"


class OutputError(ValueError):
    """An output that is malformed or cannot be enforced. `field` is the client's name for it."""

    def __init__(self, message: str, field: str = "response_format"):
        super().__init__(message if message.startswith(field) else f"{field}: {message}")
        self.field = field


def field_of(output: Any) -> str:
    field = output.get("field") if isinstance(output, Mapping) else None
    return field if isinstance(field, str) else "response_format"


def grammar_of(output: Any) -> dict[str, Any] | None:
    """One of llguidance's `grammars`, or None if any text will do. Raises OutputError."""
    field = field_of(output)
    if output is None:
        return None
    if not isinstance(output, Mapping):
        raise OutputError("must be an object", field)
    kind = output.get("type")
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema"):
        schema = _schema(output, field)
        grammar: dict[str, Any] = {
            "json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        }
    elif kind in ("regex", "choice", "grammar"):
        value = output.get(kind)
        lark = _choice(value, field) if kind == "choice" else _lark(kind, value, field)
        grammar = {"lark_grammar": lark}
    else:
        raise OutputError(f"{field}.type must be text, json_object or json_schema, not {kind!r}", field)
    try:
        size = len(json.dumps(grammar))
    except RecursionError:
        raise OutputError("it is nested too deeply", field) from None
    if size > MAX_CHARS:
        raise OutputError(f"it has more than {MAX_CHARS} characters", field)
    return grammar


def _schema(output: Mapping[str, Any], field: str) -> dict[str, Any]:
    if output["type"] == "json_object":
        schema = output.get("schema")
        if schema is None:
            return {"type": "object"}
        where = f"{field}.schema"
    else:
        wrapper = output.get("json_schema")
        if not isinstance(wrapper, Mapping):
            raise OutputError(f"{field}.json_schema must be an object", field)
        schema, where = wrapper.get("schema"), f"{field}.json_schema.schema"
    if not isinstance(schema, dict):
        raise OutputError(f"{where} must be an object", field)
    _check_counts(schema, field, 0)
    return schema


def _check_counts(schema: Any, field: str, depth: int) -> None:
    """Refuse a `minProperties` that a property written twice could seem to satisfy.

    llguidance, which refuses what else it does not enforce, counts properties that the schema does not name
    without looking whether they are different.
    """
    if depth > MAX_DEPTH:
        raise OutputError("it is nested too deeply", field)
    if isinstance(schema, list):
        for item in schema:
            _check_counts(item, field, depth + 1)
    if not isinstance(schema, dict):
        return
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > max(1, named):
        raise OutputError(f"minProperties {least} is enforced only up to the number of required ones", field)
    for key, inner in schema.items():
        if key in _NAMED and isinstance(inner, dict):
            inner = list(inner.values())
        if key not in _VALUES:
            _check_counts(inner, field, depth + 1)


def _choice(choices: Any, field: str) -> str:
    if not isinstance(choices, list) or not choices or len(choices) > MAX_CHOICES:
        raise OutputError(f"must be an array of 1 to {MAX_CHOICES} strings", field)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise OutputError("a choice must be a string that is not empty", field)
    return "start: " + " | ".join(map(literal, choices))


def _lark(kind: str, text: Any, field: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise OutputError("must be a string that is not empty", field)
    if len(text) > MAX_CHARS:
        raise OutputError(f"it has more than {MAX_CHARS} characters", field)
    if kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise OutputError(f"not a GBNF grammar: {error}", field) from None
    except RecursionError:
        raise OutputError("it is nested too deeply", field) from None
    except Exception as error:  # its other errors have no class of their own
        raise OutputError(f"not a GBNF grammar: {error}", field) from None


def literal(text: str) -> str:
    """`text` as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
