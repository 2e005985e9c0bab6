"""A stage on ggml's RPC server, which goes away while requests run.

HETERO_TEST_SCALE=full kills and stops the server 50 times instead of 3.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import moves_tools
import pytest
from isolated_tools import gone, isolate, posix, spec_of
from rpc_tools import RpcServer, has_rpc
from scale import scaled
from served import Served
from tiny_models import tiny_model
from worker_tools import Model

from backends.base import DeviceSpec, StageLost
from backends.ggml.devices import DeviceError
from hetero.pipeline import deadlines, isolated, supervise

pytestmark = [posix, pytest.mark.skipif(not has_rpc(), reason="ggml was built without -DGGML_RPC=ON")]
ACCIDENTS = scaled(3, 50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("rpc") / "tiny.gguf", n_layers=4)


@pytest.fixture
def server() -> Iterator[RpcServer]:
    server = RpcServer()
    yield server
    server.kill()


def test_nobody_at_the_endpoint_is_one_line(model: Path, server: RpcServer) -> None:
    server.kill()
    with pytest.raises(DeviceError, match="cannot connect"):
        isolate(model, spec_of(model), DeviceSpec("RPC0", endpoint=server.endpoint))


def test_blocks_come_back_over_the_network(model: Path, server: RpcServer) -> None:
    """To the memory of the process that computes by the server, which this one reaches."""
    whole = Model(model)
    device = DeviceSpec("RPC0", endpoint=server.endpoint)
    stage = isolate(model, moves_tools.spec_of(whole), device)
    moves_tools.there_and_back(whole, [stage])
    assert stage.host_memory is not None and stage.host_memory.view(0, 0).size > 0
    stage.close()


def test_a_server_that_does_not_answer_is_given_up(
    model: Path, server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel still accepts connections for a stopped process; ggml then waits for ever."""
    monkeypatch.setattr(isolated, "OPENING_RPC_SECONDS", 3.0)
    server.send(signal.SIGSTOP)
    with pytest.raises(StageLost, match="was lost: it was not opened after 3 s"):
        isolate(model, spec_of(model), DeviceSpec("RPC0", endpoint=server.endpoint))


def test_a_server_killed_and_stopped_at_random_moments(
    model: Path, server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "BACKOFF", (0.2,))
    monkeypatch.setattr(deadlines, "STEP_SECONDS", 2.0)
    device = DeviceSpec("RPC0", endpoint=server.endpoint)
    served, rng = Served(model, [(0, 2), (2, 4)], {2: device}), random.Random(2)
    alone = served.answers_alone()
    for accident in range(ACCIDENTS):
        number = (signal.SIGKILL, signal.SIGSTOP)[accident % 2]
        timer = threading.Timer(rng.uniform(0.0, 0.3), server.send, (number,))
        timer.start()
        assert served.work_until_lost(rng, alone) > 0
        timer.join()
        if accident % 4 == 1:
            server.send(signal.SIGCONT)
        else:
            server.restart()
        served.work_again(alone)
    assert sum(served.runner.restarts) >= ACCIDENTS
    served.runner.close()
    assert all(gone(child.pid) for child in served.children)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_lost_while_nothing_runs(model: Path, server: RpcServer, number: signal.Signals) -> None:
    stage = isolate(model, spec_of(model), DeviceSpec("RPC0", endpoint=server.endpoint), label="the box")
    try:
        stage.check()
        server.send(number)
        with pytest.raises(StageLost, match="device the box was lost: "):
            for _ in range(100):  # a process stops, and its connections end, in its own time
                stage.check()
                time.sleep(0.02)
    finally:
        stage.close()
