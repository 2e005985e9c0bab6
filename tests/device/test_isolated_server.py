"""What clients of a server see when the process of one of its stages goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server.client import Reply
from server.real import RealClient, RealServer, real_server, talking_to

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
LONG = {"prompt": "Once upon a time", "max_tokens": 1200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("isolated_server")
    with real_server(folder, smollm2_path, "--isolate", "all", "--ctx", "2048") as server:
        yield server


def stages(server: RealServer) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [c for c in children if any("spawn_main" in part for part in c.cmdline())]


async def health(client: RealClient, status: int, seconds: float) -> Reply:
    """The first answer of /health with this status, which must come within `seconds`."""
    deadline = time.monotonic() + seconds
    while (reply := await client.get("/health")).status != status:
        assert time.monotonic() < deadline, f"/health is {reply.status}: {reply.text}"
        await asyncio.sleep(0.02)
    return reply


async def started(client: RealClient, before: float) -> None:
    """Wait until the engine has generated more than `before` tokens and a few."""
    while (await client.metrics())["hetero_generated_tokens_total"] < before + 5:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_stage_and_its_return(server: RealServer, number: signal.Signals) -> None:
    (stage,) = stages(server)
    async with talking_to(server) as client:
        before = await client.metrics()
        whole = asyncio.create_task(client.post("/v1/completions", LONG))
        streamed = asyncio.create_task(client.post("/v1/completions", {**LONG, "stream": True}))
        await started(client, before["hetero_generated_tokens_total"])
        stage.send_signal(number)
        unhealthy = await health(client, 503, 30)
        assert unhealthy.json["reason"].startswith("device CPU was lost: ")
        refused = await client.post("/v1/completions", LONG)
        if refused.status != 200:  # it may be back already
            assert refused.status == 503 and refused.headers["Retry-After"] == "5"
            assert refused.error["code"] == "device_unavailable"
        ended = await whole
        assert ended.status == 503 and ended.error["code"] == "device_unavailable"
        assert ended.error["message"] == unhealthy.json["reason"] and "Retry-After" in ended.headers
        last = (await streamed).events[-1]
        assert last["error"]["code"] == "device_unavailable"
        await health(client, 200, 30)
        await client.check_alive()
        after = await client.until_idle()
        restarts = 'hetero_stage_restarts_total{stage="0"}'
        assert after[restarts] == before[restarts] + 1
        assert after['hetero_stage_busy_seconds_total{stage="0"}'] > 0
    assert stages(server)[0].pid != stage.pid


async def test_a_stage_lost_while_nothing_runs(server: RealServer) -> None:
    (stage,) = stages(server)
    async with talking_to(server) as client:
        await client.until_idle()
        stage.send_signal(signal.SIGSTOP)
        await health(client, 503, 30)
        await health(client, 200, 30)
        await client.check_alive()


def test_a_signal_to_all_processes_drains(smollm2_path: Path, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal and systemd send it: the stage must not go before the requests do."""
    with real_server(tmp_path, smollm2_path, "--isolate", "all", "--ctx", "2048") as server:
        (stage,) = stages(server)

        async def drain() -> Reply:
            async with talking_to(server) as client:
                before = (await client.metrics())["hetero_generated_tokens_total"]
                request = asyncio.create_task(client.post("/v1/completions", {**LONG, "max_tokens": 200}))
                await started(client, before)
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(stage.pid, number)
                server.process.send_signal(signal.SIGTERM)
                return await request

        reply = asyncio.run(drain())
        assert reply.status == 200 and reply.json["usage"]["completion_tokens"] == 200
        assert server.process.wait(30) == 0
        assert not psutil.pid_exists(stage.pid)
        assert "lost" not in server.log
