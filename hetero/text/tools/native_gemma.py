"""Gemma 4's form of forced calls: `call:NAME{key:<|"|>text<|"|>,n:3,list:[1]}`.

Keys are in the order in which the template shows them, without regard to case. Where a schema cannot be
followed in this form its value is written as JSON, which the reader takes in any place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.text.tools.gemma import QUOTE
from hetero.text.tools.lark import Inexpressible, LarkWriter, one_of
from hetero.text.tools.native import MAX_DEPTH, MAX_PARTS, in_json, is_lenient, members
from hetero.text.tools.strings import constraints, string_forms
from hetero.text.tools.types import resolved

MAX_ITEMS = 1000
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def gemma_call(name: str, schema: Mapping[str, Any], writer: LarkWriter) -> str:
    arguments = _Values(schema, writer).members_of(schema, 0)
    return f"{writer.write(f'<|tool_call>call:{name}')} {arguments} {writer.write('<tool_call|>')}"


class _Values:
    def __init__(self, root: Mapping[str, Any], writer: LarkWriter):
        self._root = root
        self._writer = writer
        self._parts = 0

    def value(self, schema: Any, depth: int) -> str:
        """A rule, or an expression of one."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise Inexpressible
        try:
            return self._native(resolved(schema, self._root), depth)
        except Inexpressible:
            if self._parts > MAX_PARTS:
                raise
            return in_json(schema, self._root, self._writer)

    def _native(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            raise Inexpressible
        words, kind = constraints(schema), schema.get("type")
        if words & {"enum", "const"}:
            return self._listed(schema, words)
        if words == {"anyOf"} and isinstance(schema["anyOf"], list):
            return self._any_of([self.value(each, depth + 1) for each in schema["anyOf"]])
        if isinstance(kind, list):
            return self._any_of([self.value({**schema, "type": each}, depth + 1) for each in kind])
        if kind == "string":
            return self._quoted(string_forms(schema, is_lenient(self._root)))
        if kind == "object":
            return self.members_of(schema, depth + 1)
        if kind == "array":
            return self._array(schema, words, depth)
        raise Inexpressible

    def _quoted(self, forms: Sequence[str]) -> str:
        quote, text = self._writer.write(QUOTE), self._writer.text_without(QUOTE, forms=forms)
        return self._writer.rule(f"{quote} {text}")

    def _any_of(self, rules: list[str]) -> str:
        if not rules:
            raise Inexpressible
        return self._writer.rule(" | ".join(rules))

    def members_of(self, schema: Mapping[str, Any], depth: int) -> str:
        """An object. Rules from its end: the members from one on, with a comma before them and without."""
        properties, required = members(schema)
        if not properties and schema.get("additionalProperties") is not False:
            raise Inexpressible
        writer, empty = self._writer, '""'
        behind, first = empty, empty
        for key in sorted(properties, key=str.lower, reverse=True):
            shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
            member = f"{writer.write(shown + ':')} {self.value(properties[key], depth)}"
            with_it, alone = f'"," {member} {behind}', f"{member} {behind}"
            behind = writer.rule(with_it if key in required else f"{with_it} | {behind}")
            first = writer.rule(alone if key in required else f"{alone} | {first}")
        return writer.rule(f'"{{" {first} "}}"')

    def _array(self, schema: Mapping[str, Any], words: frozenset[str], depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        counts = all(isinstance(count, int) and 0 <= count <= MAX_ITEMS for count in (least, most or 0))
        if words - {"type", "items", "minItems", "maxItems"} or "items" not in words or not counts:
            raise Inexpressible
        if most is not None and most < max(least, 1):
            raise Inexpressible
        item = self.value(schema["items"], depth + 1)
        more = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._writer.rule(f'"[" {more} "]"' if least else f'"[" ({more})? "]"')

    def _listed(self, schema: Mapping[str, Any], words: frozenset[str]) -> str:
        values = schema["enum"] if "enum" in words else [schema["const"]]
        if words - {"type", "enum", "const"} or words >= {"enum", "const"} or not isinstance(values, list):
            raise Inexpressible
        if schema.get("type", "string") != "string" or not all(isinstance(each, str) for each in values):
            raise Inexpressible
        if not values or any(QUOTE in each for each in values):
            raise Inexpressible
        return self._quoted([one_of(values)])
