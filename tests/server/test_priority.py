"""`priority` in the routes that have it."""

from __future__ import annotations

import pytest

from .client import running
from .fake_engine import FakeEngine

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_priorities_reach_the_engine(path: str) -> None:
    engine = FakeEngine()
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
            reply = await client.post(path, {**ROUTES[path], "priority": wrong})
            assert reply.status == 400 and reply.json["error"]["param"] == "priority"
