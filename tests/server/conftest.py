from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .client import Client, running
from .fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    async with running(engine) as client:
        yield client
        assert not engine.running, "a stream was left running"
