"""SIGTERM as an operator sends it: to a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from hetero.server.app import ServerSettings, create_app, serve
from tests.server.fake_engine import FakeEngine

engine = FakeEngine()
engine.token_seconds = 0.02
settings = ServerSettings(port=0, drain=20.0)
app = create_app(engine, settings)
asyncio.run(serve(app, settings, on_ready=lambda host, port: print(port, flush=True)))
print("drained", len(engine.running), flush=True)
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")


@contextmanager
def program() -> Iterator[tuple[subprocess.Popen[str], int]]:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def start_stream(port: int, body: dict[str, object]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": True, **body}))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {")
    return response


def test_sigterm_drains_and_a_second_one_does_not_wait() -> None:
    with program() as (process, port):
        response = start_stream(port, {"max_tokens": 15})
        process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.communicate(timeout=20)[0] == "drained 0\n" and process.returncode == 0
    with program() as (process, port):
        response = start_stream(port, {"max_tokens": 10_000, "ignore_eos": True})
        process.send_signal(signal.SIGTERM)
        while line := response.readline():
            if line.startswith(b"data: {") and process.poll() is None:
                process.send_signal(signal.SIGINT)
                break
        last = response.read().strip().splitlines()[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "aborted"
        assert process.communicate(timeout=20)[0] == "drained 0\n" and process.returncode == 0
