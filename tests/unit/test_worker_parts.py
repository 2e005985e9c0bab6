"""What a worker keeps: sent parts of models, its secret, and which connection holds which device."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from backends.base import DeviceSpec
from backends.ggml.models import read_config
from backends.ggml.models.config import ModelError
from backends.ggml.stage import StageSpec
from hetero.pipeline.messages import open_header
from hetero.pipeline.part import ModelPart
from hetero.pipeline.session import Opener, Refused
from hetero.worker import secret as secrets
from hetero.worker.cache import CacheError, PartCache
from hetero.worker.secret import SecretError, find_secret
from hetero.worker.server import Session, Worker
from quant.gguf import open_gguf
from quant.gguf_writer import gguf_head, padded


def part_of(size: int, fill: int) -> tuple[str, bytes]:
    data = bytes([fill]) * size
    return hashlib.sha256(data).hexdigest(), data


def put(cache: PartCache, sha256: str, data: bytes) -> Path:
    with cache.receive(sha256, len(data)) as incoming:
        for start in range(0, len(data), 7):
            incoming.write(data[start : start + 7])
        assert incoming.complete
        return incoming.finish()


operations = st.lists(
    st.tuples(st.sampled_from(["put", "find", "lie", "break off"]), st.integers(1, 40), st.integers(0, 5)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_a_cache_keeps_whole_parts_within_its_limit(tmp_path_factory, operations):
    cache = PartCache(tmp_path_factory.mktemp("cache"), limit=60)
    for number, (operation, size, fill) in enumerate(operations):
        sha256, data = part_of(size, fill)
        if operation == "put":
            path = put(cache, sha256, data)
            os.utime(path, (number, number))
            assert cache.find(sha256, size) == path and path.read_bytes() == data
        elif operation == "find":
            found = cache.find(sha256, size)
            assert found is None or found.read_bytes() == data
        elif operation == "lie":
            with pytest.raises(CacheError, match="not what was announced"):
                put(cache, hashlib.sha256(b"other").hexdigest(), data)
        else:
            with cache.receive(sha256, size) as incoming:
                incoming.write(data[: size // 2])
        cache.check_invariants()
        assert [p for p in cache.folder.iterdir() if p.suffix != ".gguf"] == []


def test_the_oldest_part_makes_room(tmp_path):
    cache = PartCache(tmp_path, limit=100)
    names = []
    for fill in range(3):
        sha256, data = part_of(40, fill)
        if fill == 2:
            assert cache.find(names[0], 40)  # now the first is not the oldest any more
        path = put(cache, sha256, data)
        os.utime(path, (fill + 1, fill + 1))
        names.append(sha256)
    assert [cache.find(name, 40) is not None for name in names] == [True, False, True]


def test_a_part_larger_than_the_cache_or_with_a_false_name(tmp_path):
    cache = PartCache(tmp_path, limit=100)
    with pytest.raises(CacheError, match="--cache-size"):
        cache.receive("0" * 64, 101)
    for name in ("../" + "0" * 61, "0" * 63, "A" * 64, "0" * 64 + "\n"):
        with pytest.raises(CacheError):
            cache.receive(name, 10)
        with pytest.raises(CacheError):
            cache.find(name, 10)
    with cache.receive("0" * 64, 3) as incoming, pytest.raises(CacheError, match="more bytes"):
        incoming.write(b"four")


@pytest.fixture
def data_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(secrets, "secret_path", lambda: tmp_path / "data" / "worker-secret")
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    return tmp_path / "data"


def test_a_secret_is_made_once_and_for_this_user_alone(data_folder):
    made = find_secret(create=True)
    path = data_folder / "worker-secret"
    assert len(made.value) >= 32 and path.read_bytes().strip() == made.value
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret(create=True) == find_secret() == made
    assert made.value.decode() not in repr(made) + str(made)
    assert list(data_folder.iterdir()) == [path]


def test_where_a_secret_comes_from(data_folder, tmp_path, monkeypatch):
    with pytest.raises(SecretError, match="HETERO_WORKER_SECRET"):
        find_secret()
    find_secret(create=True)
    monkeypatch.setenv(secrets.VARIABLE, "from the environment ")
    assert find_secret().value == b"from the environment"
    (tmp_path / "file").write_text("from the file, a line\n")
    assert find_secret(tmp_path / "file").value == b"from the file, a line"
    (tmp_path / "file").write_text("too short\n")
    for file in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(SecretError, match=file.name):
            find_secret(file)


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_secret_that_others_can_read_is_mentioned(data_folder, tmp_path, caplog):
    (tmp_path / "file").write_text("a secret that is no secret")
    (tmp_path / "file").chmod(0o644)
    find_secret(tmp_path / "file")
    assert "chmod 600" in caplog.text and "that is no secret" not in caplog.text


@contextmanager
def worker_without_children() -> Iterator[Worker]:
    worker = Worker([], secrets.Secret(b"x" * 16, "test"), print, {}, exclusive=lambda name: name == "CPU")
    yield worker
    worker.check_invariants()


def session(peer: str) -> Session:
    nothing: Any = SimpleNamespace()
    return Session(peer, nothing, nothing)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["CPU", "CUDA0", "end"])), min_size=1, max_size=12)
)
def test_an_exclusive_device_has_one_holder(moves):
    with pytest.MonkeyPatch.context() as patch, worker_without_children() as worker:
        patch.setattr("hetero.worker.server.RELEASE_SECONDS", 0.0)
        sessions = [session(str(i)) for i in range(4)]
        worker._sessions.update(sessions)
        for index, move in moves:
            if move == "end":
                worker._sessions.discard(sessions[index])
                sessions[index] = session(str(index))
                worker._sessions.add(sessions[index])
            else:
                held = [s.peer for s in worker._sessions if s.device == "CPU" and s is not sessions[index]]
                answer = worker._claim(sessions[index], move)
                if move == "CPU" and held:
                    assert answer == {"refused": f"device CPU of this worker is in use by {held[0]}"}
                else:
                    assert answer == {"granted": move}
            worker.check_invariants()


def test_a_claim_waits_for_a_holder_that_is_about_to_end():
    with worker_without_children() as worker:
        first, second = session("first"), session("second")
        worker._sessions.update((first, second))
        worker._claim(first, "CPU")

        def leave() -> None:
            with worker._lock:
                worker._sessions.discard(first)
                worker._lock.notify_all()

        timer = threading.Timer(0.1, leave)
        timer.start()
        assert worker._claim(second, "CPU") == {"granted": "CPU"}
        timer.join()


def test_closing_a_worker_frees_its_port():
    sock = socket.create_server(("127.0.0.1", 0))
    address = sock.getsockname()
    worker = Worker([sock], secrets.Secret(b"x" * 16, "test"), print, {}, exclusive=lambda name: True)
    worker.start()
    with pytest.raises(OSError):
        socket.create_server(address)
    worker.close()
    socket.create_server(address).close()


VALUES: dict[str, object] = {
    "general.architecture": "llama", "a": 3, "b": -3, "c": 0.1, "d": True, "e": "ü\n", "f": [], "g": 2**63,
}  # fmt: skip


def test_experts_stay_on_the_device():
    device = SimpleNamespace(name="CUDA0", kind="gpu")
    opener = Opener(None, None, Path("abc.part"), {"CUDA0": device}, 1)
    spec = StageSpec(0, 1, {0: 0}, (4,), 16, 16, host_experts=1)
    with pytest.raises(Refused, match="device CUDA0: a worker keeps no experts in its main memory"):
        opener.open(open_header("abc", DeviceSpec("CUDA0"), spec, 64), lambda done: None)


def test_a_head_reads_back(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_head(VALUES, []) + bytes(8))
    with open_gguf(tmp_path / "a.gguf") as file:
        assert dict(file.metadata) == VALUES
        again = gguf_head(file.metadata, [])  # now with arrays that know their type
    assert (tmp_path / "a.gguf").read_bytes()[: len(again)] == again
    with pytest.raises(ValueError, match="'x'"):
        gguf_head({"x": None}, [])


@pytest.fixture(scope="module", params=["tied", "untied", "gemma3"])
def model(request, tmp_path_factory) -> Path:
    options: dict[str, Any] = {"tied": request.param != "untied", "n_layers": 3}
    arch = "gemma3" if request.param == "gemma3" else "llama"
    return tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", arch, rope_freqs=arch == "llama", **options)


@pytest.mark.parametrize("layers", [(0, 3), (0, 1), (1, 2), (2, 3)])
def test_a_part_is_a_file_of_its_own(layers, model, tmp_path):
    with open_gguf(model) as whole:
        config = read_config(whole)
        part = ModelPart(whole, config, *layers)
        data = b"".join(chunk.tobytes() for chunk in part.chunks())
        assert len(data) == part.nbytes == padded(len(data))
        assert part.sha256() == hashlib.sha256(data).hexdigest()
        (tmp_path / "part.gguf").write_bytes(data)
        with open_gguf(tmp_path / "part.gguf") as file:
            there = read_config(file, layers)
            assert there.present <= config.present  # it speaks of tensors of its layers only
            assert replace(there, present=config.present) == config
            assert not [key for key in file.metadata if key.startswith("tokenizer")]
            for name in file.tensors:
                np.testing.assert_array_equal(file.tensor_data(name), whole.tensor_data(name))
            others = {i for i in range(3) if not layers[0] <= i < layers[1]}
            assert not [name for name in file.tensors if any(name.startswith(f"blk.{i}.") for i in others)]
            if layers != (0, 3):
                with pytest.raises(ModelError):
                    read_config(file)
            for wrong in ((layers[0], 4), (0, 0), (-1, 2)):
                with pytest.raises(ModelError):
                    read_config(file, wrong)
