"""The OpenAPI document against the application, and requests that schemathesis makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from scale import scaled
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from hetero.server.app import ServerSettings, create_app
from hetero.server.openapi.__main__ import render_docs
from hetero.server.openapi.document import document
from hetero.server.openapi.fields import MAX_CHOICES

from .background import HERMES, KEY, WEATHER, in_background
from .client import Client
from .fake_engine import FakeEngine

DOCUMENT = document()
SCHEMA = schemathesis.openapi.from_dict(document())
LASTS = "GET /recording"  # as long as it is asked to
OPERATIONS = [op for result in SCHEMA.get_all_operations() if (op := result.ok()).label != LASTS]
BY_LABEL = {operation.label: operation for operation in OPERATIONS}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def test_every_route_is_described_and_there_is_no_other() -> None:
    app = create_app(FakeEngine(), ServerSettings())  # type: ignore[arg-type]
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {
        (method, path)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert served == described


def test_the_document_is_valid() -> None:
    OPENAPI_31_VALIDATOR.validate(DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    missing = {name for name in references(DOCUMENT) if resolve(name) is None}
    assert not missing
    unused = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert unused <= references(DOCUMENT)


def modes(operation: Any) -> list[GenerationMode]:
    """Only where there is a body can it be wrong."""
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.method == "post" else [])]


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(references, value.values()))


def resolve(name: str) -> Any:
    value: Any = DOCUMENT
    for key in name.removeprefix("#/").split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def test_the_file_in_docs_is_that_of_the_code() -> None:
    path = Path(__file__).parents[2] / "docs" / "openapi.yaml"
    assert path.read_text(encoding="utf-8") == render_docs(), "run `make docs`"
    assert ServerSettings().max_choices == MAX_CHOICES


async def test_it_is_served(client: Client) -> None:
    reply = await client.get("/openapi.json")
    assert reply.status == 200 and reply.json == DOCUMENT


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    engine = FakeEngine(script=f"So: {WEATHER} then")
    engine.template_source = HERMES
    engine.info.n_ctx, engine.fills_in = 128, True
    with in_background(engine) as base:
        yield base


@pytest.mark.parametrize(("label", "mode"), [(op.label, mode) for op in OPERATIONS for mode in modes(op)])
def test_requests_made_of_the_document(address: str, label: str, mode: GenerationMode) -> None:
    """No 500; statuses, content types, headers and bodies are as described; what it forbids is refused."""
    operation = BY_LABEL[label]
    count = scaled(2, 120) if operation.method == "post" else scaled(1, 10)

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case: Any) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        case.call_and_validate(base_url=address, checks=CHECKS, headers=headers)

    run()
