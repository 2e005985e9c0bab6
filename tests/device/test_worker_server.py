"""`hetero serve` with half of its layers on a worker, which is killed and stopped under load."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scale import scaled
from server.client import Reply
from server.real import Oracle, RealClient, RealServer, real_server, talking_to
from worker_tools import SECRET, RunningWorker

from hetero.worker.secret import VARIABLE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
LOSSES = scaled(2, 50)  # stopped, killed, stopped, ...
NOTICE_SECONDS = 5.0
SLACK_SECONDS = 3.0  # of a machine that has more to do than this test
BACK_SECONDS = 30.0
CLIENTS = 4
PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,", "Rivers flow to"]


class Workers:
    """One worker after another on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.now = RunningWorker(folder)

    def replace(self) -> None:
        self.now.kill()
        self.now = RunningWorker(self._folder, port=self.now.port)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    it = Workers(tmp_path_factory.mktemp("worker"))
    yield it
    it.now.kill()


@pytest.fixture(scope="module")
def server(
    workers: Workers, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, SECRET.decode())
        devices = ("--device", "CPU", "--device", f"worker={workers.now.address}", "--split", "10,20")
        folder = tmp_path_factory.mktemp("server")
        with real_server(folder, smollm2_path, *devices, "--kv-tokens", "4096") as it:
            yield it


def body(number: int) -> dict[str, object]:
    return {"prompt": PROMPTS[number], "max_tokens": 48, "temperature": 0, "ignore_eos": True}


class Traffic:
    """Clients that ask the same again and again. An answer is the right text, or an error that says why."""

    def __init__(self, client: RealClient, expected: list[str]) -> None:
        self.client, self.expected = client, expected
        self.answers = self.errors = 0
        self._ending = False

    async def ask(self, number: int) -> None:
        while not self._ending:
            reply = await self.client.post("/v1/completions", {**body(number), "stream": bool(number % 2)})
            if reply.status != 200:
                assert reply.status == 503 and reply.error["code"] == "device_unavailable", reply.text
                self.errors += 1
                await asyncio.sleep(0.1)
                continue
            text, reason, error = read(reply, streamed=bool(number % 2))
            if error is None:
                assert (text, reason) == (self.expected[number], "length")
                self.answers += 1
            else:
                assert error["code"] == "device_unavailable" and reason is None
                assert self.expected[number].startswith(text)
                self.errors += 1

    def end(self) -> None:
        self._ending = True


def read(reply: Reply, streamed: bool) -> tuple[str, str | None, dict | None]:
    """(text, finish reason, error) of an answer."""
    if not streamed:
        (choice,) = reply.json["choices"]
        return choice["text"], choice["finish_reason"], None
    text, reason = "", None
    for event in reply.events:
        if event == "[DONE]":
            continue
        if "error" in event:
            return text, reason, event["error"]
        text += event["choices"][0]["text"]
        reason = event["choices"][0]["finish_reason"] or reason
    return text, reason, None


async def until_health(client: RealClient, status: int, seconds: float) -> Reply:
    deadline = time.monotonic() + seconds
    while (reply := await client.get("/health")).status != status:
        assert time.monotonic() < deadline, reply.text
        await asyncio.sleep(0.02)
    return reply


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[str]:
    """What the model says on one machine, each prompt alone."""
    oracle = Oracle(smollm2_path)
    texts = [oracle(prompt, 48, ignore_eos=True).text for prompt in PROMPTS]
    oracle.close()
    return texts


async def test_the_worker_is_killed_and_stopped_under_load(server, workers, expected):
    """Noticed within 5 s, no wrong and no short answer, and back by itself within 30 s; nothing leaks."""
    rng = random.Random(5)
    async with talking_to(server) as client:
        traffic = Traffic(client, expected)
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(traffic.ask(number))
            for number in range(LOSSES):
                goal = traffic.answers + 2
                async with asyncio.timeout(BACK_SECONDS):
                    while traffic.answers < goal:
                        await asyncio.sleep(0.02)
                await asyncio.sleep(rng.uniform(0, 0.5))
                if number % 2:
                    workers.now.process.kill()
                else:
                    workers.now.suspend()
                unhealthy = await until_health(client, 503, NOTICE_SECONDS + SLACK_SECONDS)
                assert workers.now.address in unhealthy.json["reason"]
                await asyncio.to_thread(workers.replace)
                await until_health(client, 200, BACK_SECONDS)
            traffic.end()
        assert traffic.errors >= LOSSES
        await client.until_idle()
        await client.check_alive()
        metrics = await client.metrics()
        assert metrics['hetero_stage_restarts_total{stage="1"}'] == LOSSES
