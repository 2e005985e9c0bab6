"""Reported cases of streams and of clients that go away, against a real server; real clients; SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml
from scale import scaled

from .client import parse_events
from .conftest import Serve
from .real import Oracle, RealClient, RealServer, collect, read_until, real_server, talking_to

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ABSENT = object()


@pytest.mark.parametrize(
    "options", [ABSENT, None, {}, {"include_usage": False}, {"include_usage": None}, {"include_usage": True}]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_r01_usage_only_when_asked(smollm2: RealClient, path: str, options: Any) -> None:
    chat = path == CHAT
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    body |= {"max_tokens": 5, "stream": True}
    if options is not ABSENT:
        body["stream_options"] = options
    reply = await smollm2.post(path, body)
    assert reply.status == 200
    assert reply.headers["Content-Type"].partition(";")[0] == "text/event-stream"
    assert reply.text.endswith("data: [DONE]\n\n")
    answer = collect(reply)  # asserts one id and one created, the form of each event, the order of the ends
    chunks = answer.chunks
    if options == {"include_usage": True}:
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 5
    assert all(len(c["choices"]) == 1 and not c.get("usage") for c in chunks)
    if chat:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert not any("role" in c["choices"][0]["delta"] for c in chunks[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_r01_stream_options_without_stream_are_ignored(smollm2: RealClient) -> None:
    reply = await smollm2.chat(max_tokens=2, stream_options={"include_usage": True})
    assert reply.status == 200 and reply.json["usage"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def one_slot(serve: Serve, smollm2_path: Path) -> RealServer:
    return serve(smollm2_path, "--ctx", "4608", "--kv-tokens", "5120", "--max-num-seqs", "1")


@pytest.mark.parametrize("stream", [True, False])
async def test_r02_a_client_that_goes_away_frees_its_slot(
    one_slot: RealServer, oracle: Oracle, stream: bool
) -> None:
    async with talking_to(one_slot) as client, talking_to(one_slot) as other:
        before = await client.until_idle()
        long = {"prompt": "Tell", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": stream}
        request = asyncio.create_task(client.session.post(f"{client.base}{COMPLETIONS}", json=long))
        if stream:
            await read_until(await request, 20)
            (await request).close()
        else:
            generated = before["hetero_generated_tokens_total"]
            while (await other.metrics())["hetero_generated_tokens_total"] < generated + 20:
                await asyncio.sleep(0.01)
            request.cancel()  # closes the socket
        started = time.perf_counter()
        short = await other.complete(prompt="The capital of France is", max_tokens=8, temperature=0)
        seconds = time.perf_counter() - started
        assert short.json["choices"][0]["text"] == oracle("The capital of France is", 8).text
        assert seconds < 1.0, "8 tokens take far less once the slot is free"
        after = await other.until_idle()
        name = "hetero_requests_cancelled_total"
        assert after[name] == before[name] + 1
        assert after["hetero_generated_tokens_total"] - before["hetero_generated_tokens_total"] < 1000
    assert "Traceback" not in one_slot.log and "ERROR" not in one_slot.log


async def cancel_at_random(client: RealClient, rng: random.Random) -> None:
    """A request that is given up before, while or after it is sent, waits, or is answered."""
    kind = rng.choice(("before headers", "in time", "after events"))
    body = {
        "prompt": "word " * rng.choice((1, 20, 300)) + str(rng.random()),
        "max_tokens": rng.choice((8, 200)),
        "ignore_eos": True,
        "stream": kind == "after events" or rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 2)),
    }
    if kind == "before headers":
        _, writer = await asyncio.open_connection(client.host, client.port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n".encode()
        writer.write(head[: rng.randint(1, len(head))] + b'{"prompt": "x'[: rng.randint(0, 13)])
        await writer.drain()
        (writer.transport.abort if rng.random() < 0.5 else writer.close)()
        return
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with (
            asyncio.timeout(rng.random() ** 2 * 0.5 if kind == "in time" else 30),
            client.session.post(client.base + COMPLETIONS, json=body) as response,
        ):
            if body["stream"]:
                await read_until(response, rng.randint(0, 6))
                response.close()
            else:
                await response.read()


async def test_a_thousand_cancels_leave_nothing_behind(serve: Serve, smollm2_path: Path) -> None:
    rng, count = random.Random(3), scaled(500, 1000)
    server = serve(smollm2_path, "--kv-tokens", "4096")

    async def client_of(client: RealClient, count: int) -> None:
        for _ in range(count):
            await cancel_at_random(client, rng)

    async def a_round(client: RealClient, count: int) -> tuple[int, int]:
        await asyncio.gather(*(client_of(client, count // 20) for _ in range(20)))
        await client.until_idle(10.0)
        return server.threads, server.memory

    async with talking_to(server) as client:
        # What takes memory on its first use is used first: every KV page, and graphs of all sizes.
        assert (await client.complete(prompt=[5 + i % 999 for i in range(4090)], max_tokens=1)).status == 200
        threads, memory = await a_round(client, 200)
        threads_after, memory_after = await a_round(client, count)
        assert threads_after <= threads
        assert memory_after - memory < 32 << 20  # it settles; a request's worth each would be far more
        assert (await client.metrics())["hetero_requests_cancelled_total"] > 0.25 * (200 + count)
        await client.check_alive()
    assert "Traceback" not in server.log


def test_the_openai_package_streams_a_chat(smollm2_server: RealServer) -> None:
    with openai.OpenAI(base_url=f"{smollm2_server.base}/v1", api_key="x", max_retries=0) as api:
        asked: Any = {
            "model": api.models.list().data[0].id,
            "messages": [{"role": "user", "content": "Name a river."}],
            "max_tokens": 16,
            "temperature": 0,
        }
        whole = api.chat.completions.create(**asked)
        chunks = list(
            api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content and text
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16
        assert api.completions.create(model="m", prompt="hi", max_tokens=3).usage.completion_tokens == 3


def test_the_llm_package_streams_a_chat(smollm2_server: RealServer, tmp_path: Path) -> None:
    entry = {"model_id": "hetero", "model_name": "m", "api_base": f"{smollm2_server.base}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry]))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path), "OPENAI_API_KEY": "x"}
    command = [sys.executable, "-m", "llm", "-m", "hetero", "Name a river."]
    done = subprocess.run(
        [*command, "-o", "temperature", "0", "-o", "max_tokens", "16"],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with openai.OpenAI(base_url=f"{smollm2_server.base}/v1", api_key="x") as api:
        whole = api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Name a river."}], max_tokens=16, temperature=0
        )
    assert done.stdout.strip() == (whole.choices[0].message.content or "").strip()


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
async def test_sigterm_lets_a_running_stream_finish(
    smollm2_path: Path, oracle: Oracle, tmp_path: Path
) -> None:
    with real_server(tmp_path, smollm2_path, "--kv-tokens", "2048") as server:
        async with talking_to(server) as client, talking_to(server) as late:
            body = {"prompt": "Rivers", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
            async with client.session.post(
                client.base + COMPLETIONS, json={**body, "stream": True}
            ) as response:
                first = await response.content.readuntil(b"\n\n")
                assert (await late.get("/health")).status == 200  # so that a connection is open
                server.process.send_signal(signal.SIGTERM)
                while (health := await late.get("/health")).status == 200:
                    await asyncio.sleep(0.01)
                assert health.status == 503
                assert (await late.complete()).error["code"] == "draining"
                text = (first + await response.read()).decode()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and text.count('"finish_reason":"length"') == 1
        got = "".join(e["choices"][0]["text"] for e in parse_events(text)[:-1])
        assert got == oracle("Rivers", 600, ignore_eos=True).text
        assert server.process.wait(15) == 0
