"""Words to write JSON Schemas with (draft 2020-12, which OpenAPI 3.1 has)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def integer(low: int | None = None, high: int | None = None, **more: Any) -> Schema:
    return {"type": "integer", **_bounds(low, high), **more}


def number(low: float | None = None, high: float | None = None, **more: Any) -> Schema:
    return {"type": "number", **_bounds(low, high), **more}


def _bounds(low: float | None, high: float | None) -> Schema:
    return ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": high})


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    bounds = ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})
    return {"type": "array", "items": items, **bounds}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def described(schema: Schema, text: str) -> Schema:
    return {**schema, "description": text}


def body(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """An object of a request. A null is as good as absent there; fields not named are ignored."""
    properties = {**required, **{name: or_null(schema) for name, schema in optional.items()}}
    needs = {"required": list(required)} if required else {}
    return {"type": "object", **needs, "properties": properties}


def answer(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of an answer, with nothing that is not named."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def or_null(schema: Schema) -> Schema:
    if not schema or schema.get("type") == "null":
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*(v for v in schema["enum"] if v is not None), None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return either(schema, NULL)


def neutral(table: Mapping[str, Any]) -> dict[str, Schema]:
    """Fields that are not supported, with the only value that may be given: the one that asks for nothing."""
    return {
        name: described(NULL if value is None else enum(value), "Not supported: only what asks for nothing.")
        for name, value in table.items()
    }
