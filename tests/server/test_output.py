"""The names by which clients ask for structured output."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.server.errors import ApiError
from hetero.server.output import json_output, read_output
from hetero.server.validate import Fields

from .client import running, until
from .fake_engine import FakeEngine

SCHEMA = {"type": "object"}


def schema_output(field: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "field": field}


@pytest.mark.parametrize(
    "body, output",
    [
        ({}, None),
        (
            {"response_format": None, "grammar": "", "structured_outputs": {"regex": ""}, "json_schema": {}},
            None,
        ),
        ({"response_format": {"type": "text"}, "guided_choice": []}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "json_object", "field": "response_format"}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"type": "json_object", "schema": SCHEMA, "field": "response_format"},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            schema_output("response_format"),
        ),
        ({"json_schema": SCHEMA}, schema_output("json_schema")),
        ({"guided_json": '{"type": "object"}'}, schema_output("guided_json")),
        ({"structured_outputs": {"json": SCHEMA}}, schema_output("structured_outputs.json")),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"', "field": "grammar"}),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+", "field": "guided_regex"}),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            {"type": "choice", "choice": ["a", "b"], "field": "structured_outputs.choice"},
        ),
        (
            {"structured_outputs": {"json_object": True}},
            {"type": "json_object", "field": "structured_outputs.json_object"},
        ),
    ],
)
def test_every_name_asks_for_the_same(body, output):
    assert read_output(Fields(body)) == output


def test_ollamas_format():
    assert json_output("", "format") is None and json_output(None, "format") is None
    assert json_output("json", "format") == {"type": "json_object", "field": "format"}
    assert json_output(SCHEMA, "format") == schema_output("format")
    with pytest.raises(ApiError, match="format"):
        json_output("xml", "format")


async def test_the_vocabulary_is_indexed_when_the_server_has_started(monkeypatch) -> None:
    monkeypatch.setattr("hetero.server.app.WARM_UP_AFTER", 0.0)
    engine = FakeEngine()
    async with running(engine):
        await until(lambda: engine.warm)
    monkeypatch.setattr("hetero.server.app.WARM_UP_AFTER", 60.0)
    engine = FakeEngine()
    async with running(engine) as client:
        assert (await client.get("/health")).status == 200
    assert not engine.warm
