"""Forced calls in a family's own form, where that is not JSON: tags around keys and values, or Gemma's.

What a grammar made here lets a model write, the family's parser reads as arguments that follow the schema.
Inexpressible is raised where that cannot be had; such a tool's calls are then forced as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.text.tools.lark import Inexpressible, LarkWriter, one_of
from hetero.text.tools.strings import constraints, string_forms
from hetero.text.tools.types import json_of, resolved, types_of

MAX_DEPTH = 20
MAX_PARTS = 5000
DEFINITIONS = ("$defs", "definitions")
_GUIDANCE = "x-guidance"  # llguidance's own options, in a schema
_NAME = re.compile(r"[^\s<>{}:]{1,64}")
_LOCAL_REF = re.compile(r"#/(\$defs|definitions)/")
# Complements would say it more plainly, and take seconds where there is a maxLength.
_NO_BREAK_AT_EDGES = r"/(?s:([^\n](.*[^\n])?)?)/"
# Text that no reader takes for the beginning of JSON in which the closing tag may stand.
_NOT_BRACKETED = r'/(?s:(\s*[^\s"{\[].*)?)/'


@dataclass(frozen=True, slots=True)
class TagForm:
    """head GAP (key GAP opening inside VALUE inside close GAP)* end; {name} and {key} are put in.

    optional_gap   the line break between parts need not be there: versions of the family differ
    trims          the reader takes off a line break at either end of a value
    """

    head: str
    key: str
    close: str
    end: str
    opening: str = ""
    inside: str = ""
    optional_gap: bool = False
    trims: bool = False


TAG_FORMS = {
    "qwen-coder": TagForm(
        "<tool_call>\n<function={name}>",
        "<parameter={key}>",
        "</parameter>",
        "</function>\n</tool_call>",
        inside="\n",
        trims=True,
    ),
    "seed": TagForm(
        "<seed:tool_call>\n<function={name}>",
        "<parameter={key}>",
        "</parameter>",
        "</function>\n</seed:tool_call>",
        trims=True,
    ),
    "glm": TagForm(
        "<tool_call>{name}",
        "<arg_key>{key}</arg_key>",
        "</arg_value>",
        "</tool_call>",
        opening="<arg_value>",
        optional_gap=True,
    ),
}


def native_call(family: str, name: str, schema: Mapping[str, Any], writer: LarkWriter) -> str:
    """An expression for one call; `schema` is of the arguments. Raises Inexpressible."""
    if not _NAME.fullmatch(name):
        raise Inexpressible
    properties, required = members(schema)
    if family == "gemma":
        from hetero.text.tools.native_gemma import gemma_call

        return gemma_call(name, schema, writer)
    if family not in TAG_FORMS:
        raise Inexpressible
    return _Tags(TAG_FORMS[family], schema, writer).call(name, properties, required)


def members(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """(properties, names of the required ones) of an object that has no others, or need not."""
    if constraints(schema) - {"type", "properties", "required", "additionalProperties"}:
        raise Inexpressible
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
    required = schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise Inexpressible
    # What may have any name is JSON's to write; beside members with names it can be done without.
    if others is not False and not (properties and others in (True, {})):
        raise Inexpressible
    if not set(required) <= properties.keys():
        raise Inexpressible
    known = {key: inner for key, inner in properties.items() if inner is not False or key in required}
    return known, frozenset(required)


def in_json(schema: Any, root: Mapping[str, Any], writer: LarkWriter) -> str:
    """`schema`, a part of `root`, as JSON."""
    if not isinstance(schema, Mapping):
        schema = {} if schema is True else {"not": {}}
    shared = {key: root[key] for key in DEFINITIONS if key in root} if refers(schema) else {}
    for part in (schema, *shared.values()):
        for ref in _refs(part):
            if not isinstance(ref, str) or not _LOCAL_REF.match(ref):
                raise Inexpressible
    return writer.json({**schema, **shared, _GUIDANCE: root.get(_GUIDANCE, {})})


def refers(schema: Any) -> bool:
    return any(True for _ in _refs(schema))


def _refs(schema: Any):
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, (list, tuple)):
        for inner in schema:
            yield from _refs(inner)


def is_lenient(root: Mapping[str, Any]) -> bool:
    return bool(root.get(_GUIDANCE, {}).get("lenient"))


class _Tags:
    def __init__(self, form: TagForm, root: Mapping[str, Any], writer: LarkWriter):
        self._form = form
        self._root = root
        self._parts = 0  # of schemas that were looked at: definitions may refer to each other again and again
        self._writer = writer

    def call(self, name: str, properties: Mapping[str, Any], required: frozenset[str]) -> str:
        writer, form = self._writer, self._form
        gap = '"\\n"' + "?" * form.optional_gap
        pieces = [writer.write(form.head.replace("{name}", name)), gap]
        for key, schema in properties.items():
            if not key or key != key.strip() or re.search(r"[<>\n]", key):
                raise Inexpressible
            opening = [writer.write(form.key.replace("{key}", key))]
            if form.opening:
                opening += [gap, writer.write(form.opening)]
            if form.inside:
                opening.append(writer.write(form.inside))
            value = writer.rule(" ".join((*opening, f"({self._value(schema)})", gap)))
            pieces.append(value if key in required else f"{value}?")
        return " ".join((*pieces, writer.write(form.end)))

    def _value(self, schema: Any) -> str:
        """The value and its closing tag."""
        types = types_of(schema, self._root)
        schema = resolved(schema, self._root)
        if types == {"string"} and isinstance(schema, Mapping):
            return self._string(schema)
        if _is_loose(schema, self._root) and "string" in types:
            return f"{self._raw([_NOT_BRACKETED])} | {self._json(schema)}"
        return " | ".join(self._alternatives(schema, types))

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise Inexpressible

    def _alternatives(self, schema: Any, types: frozenset[str], depth: int = 0) -> list[str]:
        self._count()
        schema = resolved(schema, self._root)
        words = constraints(schema) if isinstance(schema, Mapping) else frozenset()
        if words == {"anyOf"} and isinstance(schema["anyOf"], list) and depth < MAX_DEPTH:
            return [each for inner in schema["anyOf"] for each in self._alternatives(inner, types, depth + 1)]
        values = _listed(schema, words)
        if values is not None:
            return [self._raw([one_of([self._written(value, types) for value in values])])]
        return [self._json(schema)]

    def _written(self, value: Any, types: frozenset[str]) -> str:
        """A value among others of other types: as it is, if it is read as itself, else as JSON."""
        if isinstance(value, str) and self._holds(value) and _same(json_of(value, types), value):
            return value
        text = json.dumps(value, ensure_ascii=False)
        if not _same(json_of(text, types), value) or self._form.close in text:
            raise Inexpressible
        return text

    def _string(self, schema: Any, depth: int = 0) -> str:
        """Of a property that is nothing but a string, and so is read as it is."""
        self._count()
        if depth > MAX_DEPTH or not isinstance(schema, Mapping):
            raise Inexpressible
        words = constraints(schema)
        for union in ("anyOf", "oneOf", "allOf"):
            inner = schema.get(union)
            if union in words and words <= {union, "type"} and isinstance(inner, list):
                if union != "anyOf" and len(inner) > 1:
                    raise Inexpressible
                return " | ".join(self._string(resolved(each, self._root), depth + 1) for each in inner)
        values = _listed(schema, words)
        if values is not None:
            texts = [value for value in values if isinstance(value, str)]
            if not texts or not all(map(self._holds, texts)):
                raise Inexpressible
            return self._raw([one_of(texts)])
        return self._raw(string_forms(schema, is_lenient(self._root)))

    def _holds(self, text: str) -> bool:
        """Whether the reader gives this very text back."""
        at_edge = self._form.trims and not self._form.inside and (text[:1] == "\n" or text[-1:] == "\n")
        return self._form.close not in text and not at_edge

    def _raw(self, forms: Sequence[str]) -> str:
        form = self._form
        if form.trims and not form.inside:
            forms = [*forms, _NO_BREAK_AT_EDGES]
        return self._writer.text_without(form.close, form.inside, forms)

    def _json(self, schema: Any) -> str:
        end = self._writer.write(self._form.inside + self._form.close)
        return f"{in_json(schema, self._root, self._writer)} {end}"


def _listed(schema: Any, words: frozenset[str]) -> Sequence[Any] | None:
    """The values of an enumeration that says no more than them and their types."""
    if not words <= {"type", "enum", "const"} or len(words & {"enum", "const"}) != 1:
        return None
    values = schema["enum"] if "enum" in words else [schema["const"]]
    if not isinstance(values, list):
        raise Inexpressible
    types = types_of({"type": schema["type"]}) if "type" in words else None
    kept = [value for value in values if types is None or types & types_of({"const": value})]
    if not kept:
        raise Inexpressible
    return kept


def _is_loose(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether it says no more of a value than its type, of which there may be several."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return schema is True
    words = constraints(schema)
    if words == {"anyOf"} and isinstance(schema["anyOf"], list):
        return all(constraints(each) <= {"type"} for each in schema["anyOf"] if isinstance(each, Mapping))
    return words <= {"type"}


def _same(text: str, value: Any) -> bool:
    return text == json.dumps(value, ensure_ascii=False)
