from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .client import Client, running
from .fake_engine import FakeEngine
from .real import Oracle, RealClient, RealServer, real_server, talking_to

Serve = Callable[..., RealServer]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    async with running(engine) as client:
        yield client
        assert not engine.running, "a stream was left running"


# -- the real thing: servers as processes, started once for all tests that want the same --------------


@pytest.fixture(scope="session")
def smollm2_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """M_CHAT of the cases, with a context of 4,608 tokens and room for three such."""
    with real_server(
        tmp_path_factory.mktemp("smollm2"), smollm2_path, "--ctx", "4608", "--kv-tokens", "16384"
    ) as it:
        yield it


@pytest.fixture(scope="session")
def gemma3_server(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """M_SPM of the cases, with a pool of 2,048 tokens."""
    with real_server(tmp_path_factory.mktemp("gemma3"), gemma3_path, "--kv-tokens", "2048") as it:
        yield it


@pytest.fixture(scope="session")
def oracle(smollm2_path: Path) -> Iterator[Oracle]:
    it = Oracle(smollm2_path)
    yield it
    it.close()


@pytest.fixture(scope="session")
def gemma3_oracle(gemma3_path: Path) -> Iterator[Oracle]:
    it = Oracle(gemma3_path)
    yield it
    it.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts further servers, each for the rest of the module: serve(model, *flags)."""
    with ExitStack() as stack:
        yield lambda model, *flags: stack.enter_context(
            real_server(tmp_path_factory.mktemp("server"), model, *flags)
        )


@pytest.fixture
async def smollm2(smollm2_server: RealServer) -> AsyncIterator[RealClient]:
    async with talking_to(smollm2_server) as client:
        yield client


@pytest.fixture
async def gemma3(gemma3_server: RealServer) -> AsyncIterator[RealClient]:
    async with talking_to(gemma3_server) as client:
        yield client
