"""`hetero serve`, `run` and `chat` as processes, on the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cli"]
SMALL = ["--kv-tokens", "2048", "--threads", "2"]


def get(url: str, body: dict | None = None, headers: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "keys").write_text("sesame\n")
    model = smollm2_path
    if sys.platform == "linux":  # where a file's name need not be text
        model = folder / os.fsdecode(b"odd \xff.gguf")
        model.symlink_to(smollm2_path)
    port = free_port()
    out = folder / "out"
    with out.open("wb") as stdout, (folder / "err").open("wb") as stderr:
        arguments = ["serve", str(model), "--port", str(port), "--model-name", "tiny", *SMALL]
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--api-key-file", str(folder / "keys")],
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
        )
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 240  # the first start on a machine compiles
    try:
        while True:
            try:
                get(f"{base}/health")
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, (folder / "err").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield process, base, folder
    finally:
        process.kill()
        process.wait()


def test_it_answers_with_its_settings(server):
    _, base, _ = server
    key = {"Authorization": "Bearer sesame"}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = get(f"{base}/v1/chat/completions", body, key)
    assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] == 4
    model = get(f"{base}/v1/models", headers=key)["data"][0]
    assert (model["id"], model["meta"]["n_ctx"], model["meta"]["n_params"]) == ("tiny", 2048, 134_515_008)
    assert get(f"{base}/status", headers=key)["ok"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"{base}/v1/models")


def test_the_start_screen_says_what_runs_where(server):
    _, base, folder = server
    text = (folder / "out").read_text()
    wanted = [
        "tiny  (llama, 135M parameters, Q4_1",
        "2,048 tokens of KV cache",
        "CPU (2 threads): layers 0 to 29",
    ]
    wanted += [f"base URL: {base}/v1", f"curl {base}/v1/chat/completions -H 'Authorization: Bearer KEY'"]
    wanted += ["requests are limited to the 2,048 tokens of the KV cache; the model could take 8,192"]
    assert [w for w in wanted if w not in text] == []
    assert "\x1b" not in text and "sesame" not in text
    phases = (folder / "err").read_text()
    assert "reading the vocabulary" in phases and "running the model once" in phases


def test_a_second_server_on_the_port_is_refused_at_once(server):
    _, base, _ = server
    arguments = ["serve", "--port", base.rpartition(":")[2]]
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "taken" in done.stderr
    assert done.stderr.count("\n") == 1, "nothing was loaded before"


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM on Windows")
def test_sigterm_ends_it_cleanly(server):  # the last test of the module: it stops the server
    process, _, folder = server
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert "Traceback" not in (folder / "err").read_text()


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM on Windows")
def test_sigterm_while_it_loads_ends_it_cleanly():
    command = [*COMMAND, "serve", "--port", str(free_port())]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert "reading the vocabulary" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments, *SMALL], cwd=ROOT, capture_output=True, text=True, input=text, timeout=240
    )


def test_run_prints_only_the_answer():
    first = run("run", "Name three rivers.", "--max-tokens", "12", "--seed", "7")
    assert first.returncode == 0 and first.stdout.strip() and "Traceback" not in first.stderr
    assert (
        run("run", "-", "--max-tokens", "12", "--seed", "7", text="Name three rivers.").stdout == first.stdout
    )


def test_run_explains_a_model_without_template(gemma3_path: Path):
    done = run("run", "hello", "--model", str(gemma3_path))
    assert done.returncode == 1 and "--raw" in done.stderr.splitlines()[-1]


def test_a_chat_template_that_fails_is_named(tmp_path: Path):
    (tmp_path / "bad.jinja").write_text("{{ nobody.name.first }}")
    done = run("chat", "--chat-template", str(tmp_path / "bad.jinja"), text="Hello\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("hetero: the chat template refuses")


def test_a_chat_template_that_does_not_compile_is_one_line(tmp_path: Path):
    (tmp_path / "bad.jinja").write_text("{% for x in %}")
    done = run("run", "hello", "--chat-template", str(tmp_path / "bad.jinja"))
    assert done.returncode == 1 and "--chat-template" in done.stderr.splitlines()[-1]


def test_chat_keeps_the_conversation():
    done = run("chat", "--max-tokens", "6", "--temperature", "0", text="Hello\nAgain\n\nnever read\n")
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2
