"""`hetero worker` as a process of its own: the same numbers as here, and back again after it was lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from moves_tools import SLOTS, spec_of, there_and_back
from scale import scaled
from tiny_hybrid import tiny_hybrid
from tiny_models import tiny_model
from worker_tools import ROOT, SECRET, Load, Model, RunningWorker, greedy, run, running_worker

from backends.base import StageLost
from backends.ggml.devices import DeviceError, open_device
from backends.ggml.stage import GgmlStage
from hetero.pipeline import supervise
from hetero.pipeline.remote import describe
from hetero.pipeline.supervise import Supervised

LOSSES = scaled(2, 50)  # half of them stopped, half killed
NOTICE_SECONDS = 5.0
SLACK_SECONDS = 3.0  # of a machine that has more to do than this test
BACK_SECONDS = 30.0
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 60)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_layers=3))


def test_it_offers_what_this_machine_has(worker):
    (device,) = (d for d in describe(worker.address, SECRET) if d.name == "CPU")
    assert device.kind == "cpu" and 0 < device.free_bytes <= device.total_bytes


MODELS = {
    "tied llama": {"arch": "llama", "rope_freqs": True},
    "gemma3 with windows": {"arch": "gemma3", "n_layers": 3, "sliding_window_pattern": 2},
    "untied, quantized": {"arch": "llama", "tied": False, "weight_type": "Q8_0", "n_embd": 64},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_this_machine(name, worker, tmp_path):
    model = Model(tiny_model(tmp_path / "m.gguf", seed=4, **MODELS[name]))
    here = model.local()
    expected = run(model, [here], IDS, 32)
    here.close()
    there = model.remote(worker)
    np.testing.assert_array_equal(run(model, [there], IDS, 32), expected)
    assert there.memory()["kv"] > 0
    there.close()


def test_states_of_recurrent_layers(worker, tmp_path):
    """They are where the layers are, here and there; what they take is counted."""
    model = Model(tiny_hybrid(tmp_path / "m.gguf", n_layers=5))
    here = model.local()
    expected = run(model, [here], IDS, 32)
    here.close()
    there = model.remote(worker)
    np.testing.assert_array_equal(run(model, [there], IDS, 32), expected)
    there.close()
    with pytest.raises(DeviceError, match="free, the layers and their KV cache need"):
        model.remote(worker, states=1 << 30)


def test_two_workers_hold_a_model_between_them(worker, tmp_path, tiny):
    here = tiny.local()
    expected = run(tiny, [here], IDS, 20)
    here.close()
    with running_worker(tmp_path / "second") as second:
        stages = [tiny.remote(worker, 0, 1), tiny.remote(second, 1, 3)]
        np.testing.assert_array_equal(run(tiny, stages, IDS, 20), expected)
        for stage in stages:
            stage.close()


def test_greedy_text_of_a_real_model(worker, smollm2_path):
    model, prompt = Model(smollm2_path), list(range(100, 120))
    here = model.local()
    expected = greedy(model, [here], prompt, 24)
    here.close()
    there = model.remote(worker)
    assert greedy(model, [there], prompt, 24) == expected
    there.close()


def test_blocks_in_the_memory_of_a_worker(worker, tmp_path, tiny):
    here = GgmlStage(tiny.gguf, tiny.config, open_device("CPU", 1), spec_of(tiny, 0, 1))
    there = tiny.remote(worker, 1, 3, host_slots=(SLOTS,))
    assert there.host_memory is None and there.memory()["host"] > SLOTS * 1000
    there_and_back(tiny, [here, there])
    here.close()
    there.close()
    with pytest.raises(DeviceError, match="main memory left, the blocks that --ram-cache would keep"):
        tiny.remote(worker, host_slots=(1 << 30,))


def test_weights_are_sent_once(worker, tmp_path):
    model = Model(tiny_model(tmp_path / "m.gguf", seed=77))
    sizes = []
    for _ in range(2):
        stage = model.remote(worker)
        sizes.append(stage.channel.bytes_sent)
        stage.close()
    assert sizes[0] > model.path.stat().st_size // 2 > 50 * 1024 > 10 * sizes[1]


def test_weights_that_are_not_what_they_claim_are_not_kept(worker, tiny):
    from hetero.pipeline.channel import Kind
    from hetero.pipeline.remote import connect

    channel, _ = connect(worker.address, SECRET)
    channel.send(Kind.WEIGHTS, {"sha256": "0" * 64, "size": 1000})
    assert channel.receive(20).header == {"bytes": 1000}
    channel.send(Kind.CHUNK, {}, [np.zeros(1000, np.uint8)])
    answer = channel.receive(20)
    assert answer.kind == Kind.FAILED and "not what was announced" in answer.header["text"]
    channel.close()
    assert not [p for p in Path(worker.facts["cache"]).iterdir() if p.name.startswith("0" * 64)]


def test_a_device_that_is_in_use(worker, tiny):
    first = tiny.remote(worker)
    with pytest.raises(DeviceError, match="CPU of this worker is in use by"):
        tiny.remote(worker)
    first.close()
    tiny.remote(worker).close()  # free again


def test_too_little_memory(worker, tiny):
    with pytest.raises(DeviceError, match="free, the layers and their KV cache need"):
        tiny.remote(worker, blocks=1 << 30)


def test_a_wrong_secret(worker):
    with pytest.raises(DeviceError, match="same secret"):
        describe(worker.address, b"x" + SECRET)
    worker.wait_for_log("wrong secret", "closed")


def test_nobody_listens():
    with pytest.raises(DeviceError, match="is `hetero worker` running there"):
        describe("127.0.0.1:9", SECRET)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGSTOP")
def test_it_is_killed_and_stopped_under_load(tiny, tmp_path, monkeypatch):
    """Each time: noticed within 5 s, an error and not a wrong number, and back by itself within 30 s."""
    monkeypatch.setattr(supervise, "BACKOFF", (0.2,))  # the wait between attempts is not the subject
    rng = random.Random(8)
    batch = tiny.batch(0, IDS[:8])
    here = tiny.local()
    here.prepare(batch, None)
    expected = here.compute().copy()
    here.close()
    worker = RunningWorker(tmp_path / "w")
    stage = Supervised(lambda: tiny.remote(worker), "there")
    load = Load(stage, batch, expected)
    load.on_error = stage.acknowledge
    try:
        for number in range(LOSSES):
            load.wait_for(3, BACK_SECONDS)
            time.sleep(rng.uniform(0, 0.3))
            lost, errors = time.monotonic(), len(load.errors)
            if number % 2:
                worker.suspend()
            else:
                worker.process.kill()
            while len(load.errors) == errors:
                assert time.monotonic() - lost < NOTICE_SECONDS + SLACK_SECONDS, "not noticed"
                time.sleep(0.01)
            error = load.errors[errors]
            assert isinstance(error, StageLost), error
            worker.kill()
            worker = RunningWorker(tmp_path / "w", port=worker.port)
        load.wait_for(3, BACK_SECONDS)
    finally:
        load.stop()
        stage.close()
        worker.kill()
    assert load.wrong == 0
    assert all(isinstance(error, StageLost) for error in load.errors)
    assert stage.restarts == LOSSES


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGSTOP")
def test_a_session_that_is_stopped_does_not_keep_the_device(tiny, tmp_path):
    """Its client gives it up, and the worker ends it."""
    with running_worker(tmp_path / "w") as worker:
        first = tiny.remote(worker)
        (_, *sessions) = worker.family()
        for process in sessions:
            process.suspend()
        with pytest.raises(StageLost):
            first.check()
        first.close()
        worker.wait_for_log("no sign of life")
        tiny.remote(worker).close()


def test_a_server_that_vanishes_frees_the_stage(tiny, tmp_path):
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/device']\n"
        "from worker_tools import Model; from types import SimpleNamespace as S; from pathlib import Path\n"
        "stage = Model(Path(sys.argv[1])).remote(S(address=sys.argv[2]))\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    with running_worker(tmp_path / "w") as worker:
        client = subprocess.Popen(
            [sys.executable, "-c", code, str(tiny.path), worker.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline().strip() == b"open"
        with contextlib.closing(client.stdout), contextlib.closing(client.stdin):
            client.kill()
            client.wait()
        tiny.remote(worker).close()


@pytest.mark.skipif(os.name != "posix", reason="Windows has neither the signal nor the modes")
def test_ctrl_c_ends_it_and_its_secret_is_private(tmp_path):
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "cli", "worker", "--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(5)]
    secret = tmp_path / "hetero" / "worker-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    text = secret.read_text().strip()
    assert len(text) >= 32
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert str(secret) in "".join(shown) and text not in "".join(shown) + out + err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--listen", "0.0.0.0:0"), ("--trusted-network", "not encrypted", "ssh -N -L")),
        (("--listen", "127.0.0.1"), ("--listen", "ADDR:PORT")),
        (("--device", "CUDA9"), ("--device CUDA9", "CPU")),
        (("--secret-file", "no/such/file"), ("no/such/file",)),
        (("--secret-file", os.devnull), ("at least 16 characters",)),
    ],
)
def test_what_cannot_be_listened_on_is_one_line(flags, words, tmp_path):
    command = [sys.executable, "-m", "cli", "worker", "--listen", "127.0.0.1:0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("hetero: ") and done.stderr.count("\n") == 1
    assert [w for w in words if w not in done.stderr] == []
