"""What a request wants its answer to look like, by whatever name its client's usual server has for that.

response_format                                     OpenAI
grammar (GBNF or Lark), json_schema                 llama-server
guided_json, guided_regex, guided_choice, guided_grammar; structured_outputs with one of json, regex, choice,
grammar, json_object                                vLLM
format ("json" or a schema)                         Ollama, by `json_output`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hetero.server.errors import bad_field
from hetero.server.validate import Fields, wrong_type

Output = dict[str, Any]  # as in hetero.text.output

FORMATS = ("text", "json_object", "json_schema")
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
_SHAPES: dict[str, tuple[str, type[Any]]] = {
    "json_object": ("true or false", bool), "choice": ("an array of strings", list),
    "regex": ("a string", str), "grammar": ("a string", str),
}  # fmt: skip


def read_output(fields: Fields) -> Output | None:
    """The output that a body asks for, None for any text; ApiError 400 for a malformed one, or for two.

    Whether it can be enforced is found out when it is compiled.
    """
    outputs = list(_outputs(fields))
    if len(outputs) > 1:
        first, second = (output["field"] for output in outputs[:2])
        raise bad_field(second, f"cannot be combined with {first}")
    return outputs[0] if outputs else None


def json_output(schema: Any, field: str) -> Output | None:
    """For a field that holds a JSON schema, or "json" for any object; "" is none."""
    if schema is None or schema == "":
        return None
    if schema == "json":
        return {"type": "json_object", "field": field}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise bad_field(field, "is not the JSON of a schema") from None
    if not isinstance(schema, dict):
        raise wrong_type(field, "an object that is a JSON schema", schema)
    return {"type": "json_schema", "json_schema": {"schema": schema}, "field": field}


def _outputs(fields: Fields) -> Iterator[Output]:
    if (response_format := _response_format(fields)) is not None:
        yield response_format
    if grammar := fields.string("grammar"):
        yield {"type": "grammar", "grammar": grammar, "field": "grammar"}
    if fields.body.get("json_schema") not in (None, {}):
        yield json_output(fields.object("json_schema"), "json_schema") or {}
    for kind in ("json", "regex", "choice", "grammar"):
        yield from _structured(kind, fields.body.get(f"guided_{kind}"), f"guided_{kind}")
    structured = Fields(fields.object("structured_outputs") or {}, "structured_outputs.")
    for kind in _STRUCTURED:
        yield from _structured(kind, structured.body.get(kind), structured.name(kind))


def _response_format(fields: Fields) -> Output | None:
    given = fields.object("response_format")
    if given is None:
        return None
    inner = Fields(given, "response_format.")
    kind = given.get("type")
    if kind not in FORMATS:
        raise bad_field("response_format", f"type must be one of {', '.join(FORMATS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = inner.object("schema")
        return {"type": kind, "field": "response_format"} | ({} if schema is None else {"schema": schema})
    wrapper = inner.object("json_schema")
    if wrapper is None or Fields(wrapper, "response_format.json_schema.").object("schema") is None:
        raise bad_field("response_format", "json_schema needs an object `schema`")
    return {"type": kind, "json_schema": wrapper, "field": "response_format"}


def _structured(kind: str, value: Any, field: str) -> Iterator[Output]:
    """One of vLLM's fields. What is empty asks for nothing."""
    if kind == "json":
        output = json_output(None if value == {} else value, field)
        if output is not None:
            yield output
        return
    wanted, shape = _SHAPES[kind]
    if value is not None and not isinstance(value, shape):
        raise wrong_type(field, wanted, value)
    if not value:
        return
    if kind == "json_object":
        yield {"type": kind, "field": field}
        return
    if kind == "choice" and not all(isinstance(choice, str) for choice in value):
        raise wrong_type(field, wanted, value)
    yield {"type": kind, kind: value, "field": field}
