"""Case z06: whatever reaches a worker's port, it goes on, and so does the stage that it runs meanwhile."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import psutil
import pytest
from frames import BAD_FRAMES, frame, head, ping
from tiny_models import tiny_model
from worker_tools import BLOCKS, SECRET, Load, Model, RunningWorker

from backends.base import DeviceSpec
from hetero.pipeline import handshake
from hetero.pipeline.channel import ChannelClosed, Kind
from hetero.pipeline.messages import open_header, step_arrays
from hetero.pipeline.part import ModelPart
from hetero.pipeline.remote import connect
from hetero.pipeline.wire import SocketChannel
from hetero.worker.server import MAX_HANDSHAKES

MEMORY_GROWTH = 50 << 20
IDS = list(range(10, 26))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_layers=2))


@contextlib.contextmanager
def running_requests(worker: RunningWorker, model: Model) -> Iterator[Load]:
    """Steps on the worker all the while; at the end none was lost or wrong."""
    here, batch = model.local(), model.batch(0, IDS)
    here.prepare(batch, None)
    expected = here.compute().copy()
    here.close()
    stage = model.remote(worker)
    load = Load(stage, batch, expected)
    try:
        load.wait_for(1, 90)
        yield load
        load.wait_for(1, 90)
    finally:
        load.stop()
        stage.close()
    assert (load.wrong, load.errors) == (0, [])


def dial(worker: RunningWorker) -> tuple[socket.socket, str]:
    """A connection, and what the worker's log calls it."""
    sock = socket.create_connection(("127.0.0.1", worker.port), 20)
    return sock, f"127.0.0.1:{sock.getsockname()[1]}:"


def assert_closed(sock: socket.socket) -> None:
    """The other end closes it; what it still says may be read."""
    sock.settimeout(90)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    sock.close()


NO_HANDSHAKES = {
    "random bytes": np.random.default_rng(1).bytes(5000),
    "truncated": b"HTRO\x01" + bytes(10),
    "a valid frame": ping(SECRET),
    "2^40 bytes": BAD_FRAMES["2^40 bytes"](SECRET),
    "pickle": pickle.dumps({"a": 1}) * 50,
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "wrong secret": b"HTRO\x01" + bytes(32) + bytes(32),
}


def test_before_the_handshake(worker, tiny):
    memory = worker.memory
    with running_requests(worker, tiny):
        sessions = len(worker.family())
        for _ in range(20):
            for name, sent in NO_HANDSHAKES.items():
                sock, peer = dial(worker)
                with contextlib.suppress(OSError):
                    sock.sendall(sent)
                    sock.shutdown(socket.SHUT_WR)
                assert_closed(sock)
                assert "closed, " in worker.wait_for_log("WARNING", peer), name
        assert len(worker.family()) == sessions  # none of them got a process
    assert worker.memory - memory < MEMORY_GROWTH


def test_connections_that_say_nothing(worker, tiny):
    """They are bounded in number and time, and the next one with the secret gets in."""
    with running_requests(worker, tiny):
        silent = [dial(worker) for _ in range(MAX_HANDSHAKES + 4)]
        for _, peer in silent[MAX_HANDSHAKES:]:
            assert "too many" in worker.wait_for_log(peer)
        for sock, peer in silent:
            assert_closed(sock)
            assert "closed, " in worker.wait_for_log(peer)
        channel, _ = connect(worker.address, SECRET)
        channel.close()


AFTER_HANDSHAKE = {
    **BAD_FRAMES,
    "truncated": lambda key: ping(key)[:-3],
    "out of place": lambda key: frame(head(Kind.STEP), key=key),
    "no size": lambda key: frame(head(Kind.WEIGHTS, header={"sha256": "0" * 64, "size": -1}), key=key),
    "no hash": lambda key: frame(head(Kind.WEIGHTS, header={"sha256": "../" * 20, "size": 9}), key=key),
}


def test_after_the_handshake(worker, tiny):
    """Whoever has the secret can no more harm others than who has not."""
    memory = worker.memory
    with running_requests(worker, tiny):
        opened = []
        for name, bad in AFTER_HANDSHAKE.items():
            sock, peer = dial(worker)
            keys = handshake.as_client(sock, SECRET)
            sock.sendall(bad(keys.send))
            sock.shutdown(socket.SHUT_WR)
            opened.append((name, sock, peer))
        for name, sock, peer in opened:
            assert_closed(sock)
            line = worker.wait_for_log("WARNING", peer)
            assert "closed, " in line or "refused, " in line, name
    assert worker.memory - memory < MEMORY_GROWTH
    assert "Traceback" not in worker.log


# array of a STEP, and what its values are raised by
BAD_STEPS = {"positions": 1, "cu_seqlens_q": 3, "logits_rows": 4, "slot_mapping": 10, "block_tables": 11}


def open_stage(worker: RunningWorker, tiny: Model, host_slots: tuple[int, ...] = ()) -> SocketChannel:
    """The bare channel of a stage that is open."""
    channel, _ = connect(worker.address, SECRET)
    part = ModelPart(tiny.gguf, tiny.config, 0, tiny.config.n_layer)
    channel.send(Kind.WEIGHTS, {"sha256": part.sha256(), "size": part.nbytes})
    if channel.receive(30).header["bytes"]:
        for chunk in part.chunks():
            channel.send(Kind.CHUNK, {}, [chunk])
        channel.receive(30)
    spec = replace(tiny.spec(), host_slots=host_slots)
    channel.send(Kind.OPEN, open_header(part.sha256(), DeviceSpec("CPU"), spec, tiny.config.n_embd))
    while (message := channel.receive(60)).kind == Kind.PROGRESS:
        pass
    assert message.kind == Kind.OPENED, message
    channel.max_payload = 1 << 20
    return channel


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_points_outside_of_the_pools(name, worker, tiny):
    seen, channel = worker.log.count("closed, a step"), open_stage(worker, tiny)
    arrays = step_arrays(tiny.batch(0, IDS), None)
    arrays[BAD_STEPS[name]] = arrays[BAD_STEPS[name]] + np.int32(1 << 20)
    channel.send(Kind.STEP, {"step": 1, "groups": 1, "hidden": False}, arrays)
    with pytest.raises(ChannelClosed):
        channel.receive(30)
    channel.close()
    assert worker.log.count("closed, a step") == seen + 1


@pytest.mark.parametrize(("array", "move"), [(6, (0, 1, 4)), (7, (0, BLOCKS, 0))], ids=["spills", "loads"])
def test_a_move_that_points_outside_of_pools_and_host_memory(array, move, worker, tiny):
    seen, channel = worker.log.count("closed, a move"), open_stage(worker, tiny, (4,))
    arrays = step_arrays(tiny.batch(0, IDS), None)
    for at in ((0, 1, 3), move):
        arrays[array] = np.array([at], np.int32)
        channel.send(Kind.STEP, {"step": 1, "groups": 1, "hidden": False}, arrays)
        if at is not move:
            assert channel.receive(30).header["moved_bytes"] > 0
    with pytest.raises(ChannelClosed):
        channel.receive(30)
    channel.close()
    assert worker.log.count("closed, a move") == seen + 1


def test_more_steps_at_once_than_there_are_buffers(worker, tiny):
    channel = open_stage(worker, tiny)
    with pytest.raises(ChannelClosed):
        for _ in range(1000):
            channel.send(
                Kind.STEP, {"step": 1, "groups": 1, "hidden": False}, step_arrays(tiny.batch(0, IDS), None)
            )
        while True:
            channel.receive(30)
    channel.close()
    worker.wait_for_log("WARNING", "closed, more than")


def test_it_listens_on_nothing_else(worker, tiny):
    with running_requests(worker, tiny):
        listening = [
            connection.laddr
            for process in [*worker.family(), psutil.Process()]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == [("127.0.0.1", worker.port)]
