"""`priority` in every route that generates or embeds."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.server.app import GENERATING

from .client import Reply, running
from .fake_engine import FakeEngine

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/completions": {"prompt": "hi"},
    "/infill": {"input_prefix": "hi", "input_suffix": ""},
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/embedding": {"content": "hi"},
    "/embeddings": {"input": "hi"},
}


def test_no_route_is_missing() -> None:
    assert ROUTES.keys() == {*GENERATING, "/v1/responses"}


def refused(reply: Reply, path: str) -> bool:
    """Whether it is a 400 about the field in the route's dialect."""
    error = reply.json["error"]
    message = error if path.startswith("/api/") else error["message"]
    named = "param" not in error or error["param"] == "priority"
    return reply.status == 400 and message.startswith("priority: ") and named


@pytest.mark.parametrize("path", ROUTES)
async def test_priorities_reach_the_engine(path: str) -> None:
    engine = FakeEngine()
    engine.fills_in = True
    async with running(engine) as client:
        for given, want in (
            ({}, 0),
            ({"priority": None}, 0),
            ({"priority": 7.0}, 7),
            ({"priority": -1000}, -1000),
        ):
            assert (await client.post(path, {**ROUTES[path], **given})).status == 200
            assert engine.priorities.pop() == want
        for wrong in (1001, -1001, 0.5, "high", True):
            assert refused(await client.post(path, {**ROUTES[path], "priority": wrong}), path)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_operator_lets_nobody_go_first(path: str) -> None:
    engine = FakeEngine()
    engine.fills_in = True
    async with running(engine, yield_only=True) as client:
        assert refused(await client.post(path, {**ROUTES[path], "priority": -1}), path)
        for fine in (0, 1000):
            assert (await client.post(path, {**ROUTES[path], "priority": fine})).status == 200
            assert engine.priorities.pop() == fine


@pytest.mark.parametrize("raw", [{"raw": True}, {"suffix": "x"}])
async def test_ollamas_other_ways_to_generate(raw: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.fills_in = True
    async with running(engine) as client:
        assert (await client.post("/api/generate", {"prompt": "hi", "priority": 5, **raw})).status == 200
    assert engine.priorities == [5]
