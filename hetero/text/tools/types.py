"""What a tool's schema says of a parameter's type, and a parameter's text as JSON of that type."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",),
    list: ("array",), dict: ("object",), type(None): ("null",),
}  # fmt: skip
ALL_TYPES = frozenset(name for names in _TYPES.values() for name in names)
_NUMBER = re.compile(r"\s*(-?(?:0|[1-9][0-9]*)((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?))\s*")
MAX_PYTHON_CHARS = 20_000
MAX_HOPS = 8  # from reference to reference, and union in union


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a plain reference into `root` leads to; `schema` itself where it is none."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        ref = schema["$ref"]
        steps = ref.split("/") if isinstance(ref, str) else []
        if len(steps) != 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
            return schema
        definitions = root.get(steps[1])
        beside = {"type", "enum", "const", "properties", "items", "anyOf", "oneOf", "allOf", "required"}
        if not isinstance(definitions, Mapping) or steps[2] not in definitions or beside & schema.keys():
            return schema
        schema = definitions[steps[2]]
    return schema


def types_of(schema: Any, root: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The JSON types that a value may have, as far as its schema says so in the plain way.

    `root` holds the definitions that it may refer to.
    """
    return _types_of(schema, root or {}, {}, MAX_HOPS)


def _types_of(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]], hops: int):
    """`known` has each reference's types: definitions may refer to each other in any number of ways."""
    ref = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(ref, str):
        if ref not in known:
            known[ref], target = ALL_TYPES, resolved(schema, root)
            if target is not schema:
                known[ref] = _types_of(target, root, known, hops)
        return known[ref]
    if not isinstance(schema, Mapping) or ref is not None or hops == 0:
        return ALL_TYPES
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(name for value in schema["enum"] for name in _TYPES.get(type(value), ()))
    if "const" in schema:
        return frozenset(_TYPES.get(type(schema["const"]), ()))
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return frozenset().union(*(_types_of(each, root, known, hops - 1) for each in schema[union]))
    if isinstance(schema.get("allOf"), list):
        return ALL_TYPES.intersection(*(_types_of(each, root, known, hops - 1) for each in schema["allOf"]))
    return ALL_TYPES


def json_of(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON: what it is as JSON if that is of one of the types, else a string.

    Where it may be none, what a string holds is tried too, and what Python reads: "5" for 5, {'a': True}.
    """
    number = _NUMBER.fullmatch(text)
    if number and (types & {"number"} or (types & {"integer"} and not number[2])):
        return number[1]  # with all its digits
    value = _value(text)
    if isinstance(value, float) and value.is_integer() and types & {"integer", "number"} == {"integer"}:
        value = int(value)
    if types.intersection(_TYPES[type(value)]):
        return json.dumps(value, ensure_ascii=False)
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str):
        for inner in (_value(value), _python_value(value)):
            if not isinstance(inner, str) and types.intersection(_TYPES[type(inner)]):
                return json.dumps(inner, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _python_value(text: str) -> Any:
    """Seed-OSS's template shows lists and objects as Python prints them."""
    if len(text) > MAX_PYTHON_CHARS or text.strip()[:1] not in ("[", "{"):
        return text
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that are none
            value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (list, dict)) else text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("too large")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
