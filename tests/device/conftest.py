"""What tests of several devices share. The package is imported late: see the conftest.py above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worker_tools import RunningWorker


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of an RPC server."""
    from rpc_tools import RpcServer, has_rpc

    if not has_rpc():
        pytest.skip("this ggml was built without RPC")
    server = RpcServer()
    yield server.endpoint
    server.kill()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    from worker_tools import running_worker

    with running_worker(tmp_path_factory.mktemp("worker")) as it:
        yield it
