"""`hetero serve` as a process of its own, and an oracle: the same model alone, with a cold cache.

The tests of the reported cases (test_cases_*.py) use these through the fixtures in conftest.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from scale import THREADS, scaled  # noqa: F401  tests may take it from here

from hetero.kv_types import F16, KVTypes
from hetero.launch import launch
from hetero.request import OutputDelta, Request, TokenLogprob
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings

from .client import Client, Reply

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cli"]
START_SECONDS = 240.0  # the first start on a machine compiles kernels
ALIVE = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


class RealServer:
    """A running `hetero serve`. `first_answer` is what it said to ALIVE when it had just started."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", str(model), "--port", str(self.port), "--threads", str(THREADS), *flags],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_healthy()
            self.first_answer = self.complete(**ALIVE)["choices"][0]["text"]
        except BaseException:
            self.kill()
            raise

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                assert self.process.poll() is None, self.log
                assert time.monotonic() < deadline, "the server does not come up"
                time.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def threads(self) -> int:
        return psutil.Process(self.process.pid).num_threads()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.base + path, timeout=30) as answer:
            return answer.read()

    def complete(self, **body: Any) -> dict[str, Any]:
        """One completion, for use outside of an event loop."""
        request = urllib.request.Request(f"{self.base}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and what must be so after every test: exit code 0 and no traceback in the log."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        assert "Traceback" not in self.log, self.log


@contextmanager
def real_server(folder: Path, model: Path, *flags: str) -> Iterator[RealServer]:
    """A server for the length of the block; a clean end is asserted."""
    server = RealServer(folder, model, *flags)
    try:
        yield server
        server.stop()
    finally:
        server.kill()


class RealClient(Client):
    """`Client` for a process, with what its metrics say."""

    def __init__(self, server: RealServer, session: aiohttp.ClientSession) -> None:
        super().__init__("127.0.0.1", server.port, asyncio.Event(), session)
        self.server = server

    async def metrics(self) -> dict[str, float]:
        """Sample name with its labels -> value."""
        lines = (await self.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def check_alive(self) -> None:
        """/health is 200 and a fixed greedy request has its earlier answer."""
        assert (await self.get("/health")).status == 200
        answer = await self.post("/v1/completions", ALIVE)
        assert answer.json["choices"][0]["text"] == self.server.first_answer

    async def until_idle(self, seconds: float = 5.0) -> dict[str, float]:
        """Wait until nothing runs or waits and every KV block is free again; the metrics then."""
        deadline = time.monotonic() + seconds
        while True:
            now = await self.metrics()
            busy = now["hetero_requests_running"] + now["hetero_requests_waiting"]
            blocks = {k: v for k, v in now.items() if k.startswith("hetero_kv_blocks{")}
            held = [k for k, v in blocks.items() if now[k.replace("blocks{", "blocks_free{")] != v]
            if not busy and not held:
                return now
            assert time.monotonic() < deadline, f"still {busy:g} requests, blocks of {held} held"
            await asyncio.sleep(0.01)

    async def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """A streamed answer, read to its end. Asserts status, form, one id and one created."""
        reply = await self.post(path, {**body, "stream": True})
        assert reply.status == 200, reply.text
        return collect(reply)


@asynccontextmanager
async def talking_to(server: RealServer) -> AsyncIterator[RealClient]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield RealClient(server, session)


@dataclass
class Streamed:
    """Choice 0 of a stream, its pieces joined."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # the chunks' logprobs objects


def collect(reply: Reply) -> Streamed:
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    result = Streamed(chunks=chunks)
    for chunk in chunks:
        result.usage = chunk.get("usage") or result.usage
        for choice in chunk["choices"]:
            assert result.finish_reason is None, "something came after the finish_reason"
            result.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            result.finish_reason = choice["finish_reason"]
            if choice["logprobs"]:
                result.logprobs.append(choice["logprobs"])
    return result


@dataclass
class Alone:
    """What the model says to a prompt when nobody else is there and nothing is cached."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob]


class Oracle:
    """The model in this process, each request alone from an empty cache."""

    def __init__(self, model: Path, kv_type: KVTypes = F16) -> None:
        settings = Settings(model=str(model), threads=THREADS, kv_tokens=8192, kv_type=kv_type)
        self._async_engine = launch(settings, lambda *_: None)
        self._engine = self._async_engine._engine
        self.tokenizer = self._engine.tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, parse_special=True, add_special=True)

    def __call__(self, prompt: str | Sequence[int], max_tokens: int, **params: Any) -> Alone:
        """Greedy; `params` are further SamplingParams."""
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._engine.scheduler.kv.clear_cache()
        deltas: list[OutputDelta] = []
        chosen = SamplingParams(**{"temperature": 0.0, "logprobs": 0, "max_tokens": max_tokens, **params})
        self._engine.add(Request("alone", ids, chosen), deltas.append)
        while self._engine.step():
            pass
        self._engine.check_invariants()
        last = deltas[-1]
        assert last.num_cached_tokens == 0 and last.finish_reason is not None, last
        return Alone(
            "".join(d.text for d in deltas),
            [t for d in deltas for t in d.token_ids],
            last.finish_reason.value,
            [entry for d in deltas for entry in d.logprobs],
        )

    def close(self) -> None:
        asyncio.run(self._async_engine.close())


def _children_seconds() -> float:
    """CPU time of the processes that were started here and have ended; 0 on Windows."""
    now = os.times()
    return now.children_user + now.children_system


def refusal_of(*arguments: str, seconds: float = 10.0) -> tuple[str, float]:
    """Run a command that must fail: exit code 1, one line on stderr. That line, and its CPU seconds.

    Those are what a user waits for on a machine of his own, however busy this one is.
    """
    before = _children_seconds()
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    took = _children_seconds() - before
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip(), took


async def read_until(response: aiohttp.ClientResponse, tokens: int) -> None:
    """Read a stream up to the event of its `tokens`-th token."""
    seen = -1  # the first event of a chat stream has no text
    with contextlib.suppress(asyncio.IncompleteReadError):
        while seen < tokens:
            line = await response.content.readuntil(b"\n\n")
            seen += line.startswith(b"data: ")
