"""What a server does when what it takes for a worker is none, or a bad one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

from backends.base import DeviceInfo, DeviceSpec, StageLost
from backends.ggml.devices import DeviceError
from backends.ggml.models import read_config
from backends.ggml.stage import StageSpec
from hetero import __version__
from hetero.batch import Batch
from hetero.pipeline import handshake
from hetero.pipeline.channel import ChannelClosed, Kind
from hetero.pipeline.part import ModelPart
from hetero.pipeline.remote import RemoteStage, describe
from hetero.pipeline.wire import SocketChannel
from quant.gguf import open_gguf

SECRET = b"a secret for tests only"
DEVICE = DeviceInfo("CPU", "cpu", "a processor", 1 << 34, 1 << 33, "CPU", "CPU")
HELLO: dict[str, Any] = {"version": __version__, "devices": [asdict(DEVICE)]}
Script = Callable[[SocketChannel], None]


@contextmanager
def worker(script: Script, secret: bytes = SECRET) -> Iterator[str]:
    """An address where `script` plays the worker, once, after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(handshake.HandshakeError, ChannelClosed):
                channel = SocketChannel(sock, handshake.as_server(sock, secret), 8 << 20)
                script(channel)
                while channel.receive(10) is not None:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        thread.join(20)
        assert not thread.is_alive(), "the connection was left open"


def says(kind: Kind, header: dict[str, Any]) -> Script:
    return lambda channel: channel.send(kind, header)


def test_the_devices_of_a_worker():
    with worker(says(Kind.HELLO, HELLO)) as address:
        assert describe(address, SECRET) == [DEVICE]


def changed(**fields: Any) -> dict[str, Any]:
    return {"version": __version__, "devices": [{**asdict(DEVICE), **fields}]}


BAD_HELLOS: dict[str, tuple[Kind, dict[str, Any], str]] = {
    "another version": (Kind.HELLO, {**HELLO, "version": "0.0.1"}, "same version"),
    "no version": (Kind.HELLO, {"devices": []}, "same version"),
    "no devices": (Kind.HELLO, {"version": __version__}, "without devices"),
    "a name that is none": (Kind.HELLO, changed(name=3), "a device that is none"),
    "a size that is none": (Kind.HELLO, changed(free_bytes="much"), "a device that is none"),
    "a field too many": (Kind.HELLO, changed(more=1), "a device that is none"),
    "something else": (Kind.PONG, {}, "PONG where HELLO was due"),
    "a refusal": (Kind.FAILED, {"text": "no room\nfor you"}, "no room for you"),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_worker_that_says_something_else(name):
    kind, header, text = BAD_HELLOS[name]
    with worker(says(kind, header)) as address, pytest.raises(DeviceError, match=text) as caught:
        describe(address, SECRET)
    assert str(caught.value).startswith(f"worker {address}: ") and "\n" not in str(caught.value)


def test_a_worker_with_another_secret():
    with (
        worker(says(Kind.HELLO, HELLO), b"another secret, not ours") as address,
        pytest.raises(DeviceError, match="same secret"),
    ):
        describe(address, SECRET)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf")


def open_stage(model: Path, address: str, loaded: list[int] | None = None) -> RemoteStage:
    gguf = open_gguf(model)
    config = read_config(gguf)
    spec = StageSpec(0, config.n_layer, dict.fromkeys(range(config.n_layer), 0), (8,), 32, 4)
    part = ModelPart(gguf, config, 0, config.n_layer)
    progress = (loaded if loaded is not None else []).append
    return RemoteStage(part, config, DeviceSpec("CPU", worker=address), spec, SECRET, progress=progress)


def script_of(*answers: tuple[Kind, dict[str, Any], list[np.ndarray]]) -> Script:
    """Says HELLO, then one of `answers` to each message; what comes twice in a row answers one."""

    def run(channel: SocketChannel) -> None:
        channel.send(Kind.HELLO, HELLO)
        before = None
        for kind, header, arrays in answers:
            if kind != before:
                channel.receive(10)
            channel.send(kind, header, arrays)
            before = kind

    return run


HAS_IT = (Kind.WANTED, {"bytes": 0}, [])
OPENED = (Kind.OPENED, {"memory": {"kv": 5}}, [])


def test_each_byte_of_the_weights_counts_once(model):
    def keeps(channel: SocketChannel) -> None:
        channel.send(Kind.HELLO, HELLO)
        left = channel.receive(10).header["size"]
        channel.send(Kind.WANTED, {"bytes": left})
        while left:
            left -= channel.receive(10).arrays[0].nbytes
        channel.send(Kind.WANTED, {"bytes": 0})
        channel.receive(10)
        channel.send(Kind.PROGRESS, {"bytes": 1000})
        channel.send(*OPENED)

    def has_it(channel: SocketChannel) -> None:
        script_of(HAS_IT, (Kind.PROGRESS, {"bytes": 1000}, []))(channel)
        channel.send(*OPENED)

    sent: list[int] = []
    with worker(keeps) as address:
        stage = open_stage(model, address, sent)
        assert stage.memory() == {"kv": 5}
        stage.close()
    assert sum(sent) > model.stat().st_size // 2 and 1000 not in sent
    loaded: list[int] = []
    with worker(has_it) as address:
        open_stage(model, address, loaded).close()
    assert loaded == [1000]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(Kind.FAILED, {"text": "the disk is full"}, [])], "the disk is full"),
        ([(Kind.WANTED, {"bytes": 9}, []), (Kind.WANTED, {"bytes": 9}, [])], "twice"),
        ([HAS_IT, (Kind.FAILED, {"text": "device CPU is in use"}, [])], "device CPU is in use"),
        ([(Kind.RESULT, {}, [])], "RESULT where WANTED was due"),
    ],
)
def test_a_stage_that_cannot_be_opened(answers, text, model):
    with worker(script_of(*answers)) as address, pytest.raises(DeviceError, match=text) as caught:
        open_stage(model, address)
    assert str(caught.value).startswith(f"worker {address}: ")


@pytest.mark.parametrize(
    ("header", "rows", "text"),
    [
        ({}, np.zeros((1, 3), np.float32), "wrong shape"),
        ({}, np.zeros((1, 311), np.int32), "wrong shape"),
        ({"graph_seconds": "long"}, np.zeros((1, 311), np.float32), "wrong shape"),
        ({"step": 2}, np.zeros((1, 311), np.float32), "another step"),
        ({}, np.zeros(4 << 20, np.uint8), "garbage"),
    ],
    ids=["width", "dtype", "seconds", "step", "size"],
)
def test_a_result_that_is_none_loses_the_stage(header, rows, text, model):
    answer = (Kind.RESULT, {"step": 1, "graph_seconds": 0.1, "argmax": False, **header}, [rows])
    one = np.zeros(1, np.int32)
    batch = Batch(0, one, one, [one], [one[None]], one + 1, np.array([0, 1], np.int32), one, [])
    with worker(script_of(HAS_IT, OPENED, answer)) as address:
        stage = open_stage(model, address)
        stage.prepare(batch, None)
        with pytest.raises(StageLost, match=text):
            stage.compute()
        stage.close()
