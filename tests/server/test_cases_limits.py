"""Reported cases of prompts that are too long, just fit, or are empty or malformed, against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from scale import scaled

from .conftest import Serve
from .real import Oracle, RealClient, RealServer, talking_to

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
N_CTX = 512


@pytest.fixture(scope="module")
def short(serve: Serve, smollm2_path: Path) -> RealServer:
    """A context of 512 tokens, and a pool in which two such do not fit."""
    return serve(smollm2_path, "--ctx", str(N_CTX), "--kv-tokens", "768")


async def body_of(client: RealClient, route: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A request whose prompt has exactly `tokens` tokens, the template's included."""
    if route == COMPLETIONS:
        return {"prompt": [1000 + i % 50 for i in range(tokens)], "temperature": 0, **more}
    bare = (await client.chat(max_tokens=1)).json["usage"]["prompt_tokens"]
    text = "hi" + " the" * (tokens - bare)
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_l01_a_prompt_that_does_not_fit(short: RealServer, route: str, stream: bool) -> None:
    async with talking_to(short) as client:
        for tokens in (N_CTX, N_CTX + 1, 5000):
            body = await body_of(client, route, tokens, max_tokens=8, stream=stream)
            reply = await client.post(route, body)
            assert reply.status == 400 and "data:" not in reply.text
            assert reply.error["code"] == "context_length_exceeded"
            assert str(tokens) in reply.error["message"] and str(N_CTX) in reply.error["message"]
        for tokens, room in ((N_CTX - 1, 1), (500, 12)):
            body = await body_of(client, route, tokens, max_tokens=100, ignore_eos=True)
            if stream:
                body["stream_options"] = {"include_usage": True}
                answer = await client.stream(route, body)
                usage, reason = answer.usage, answer.finish_reason
            else:
                whole = (await client.post(route, body)).json
                usage, reason = whole["usage"], whole["choices"][0]["finish_reason"]
            assert usage is not None and usage["prompt_tokens"] == tokens
            assert (usage["completion_tokens"], reason) == (room, "length")


async def test_l01_others_that_fill_the_pool_are_nobodys_error(short: RealServer, oracle: Oracle) -> None:
    prompts = [[1000 + i * step % 997 for i in range(400)] for step in (3, 5)]
    async with talking_to(short) as client:
        body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
        replies = await asyncio.gather(*(client.post(COMPLETIONS, {**body, "prompt": p}) for p in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.status == 200
            assert reply.json["choices"][0]["text"] == oracle(prompt, 100, ignore_eos=True).text
        await client.until_idle()


async def test_l01_an_idle_server_is_idle(short: RealServer) -> None:
    async with talking_to(short) as client:
        await client.complete()
        await client.until_idle()
        process, seconds = psutil.Process(short.process.pid), scaled(3, 10)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(seconds)
        assert sum(process.cpu_times()[:2]) - before < 0.05 * seconds


BAD_PROMPTS: list[Any] = [[], [[]], [-1], [99999999], [1.5], None, 5, True, {}, [[1], "a"], [None], [[[1]]]]


async def check_prompts(client: RealClient, empty_status: int) -> None:
    async def status_of(body: dict[str, Any]) -> int:
        reply = await client.post(COMPLETIONS, {"max_tokens": 4, "temperature": 0, **body})
        if reply.status != 200:
            assert reply.error["param"] == "prompt", reply.text
        else:
            assert reply.json["usage"]["completion_tokens"] >= 1
        await client.check_alive()
        return reply.status

    for prompt in BAD_PROMPTS:
        assert await status_of({"prompt": prompt}) == 400, prompt
    assert await status_of({}) == 400
    for prompt in ("", [""], ["", ""]):
        assert await status_of({"prompt": prompt}) == empty_status, prompt
    assert [await status_of({"prompt": prompt}) for prompt in ([0], " ", [" ", "a"])] == [200] * 3


async def test_l03_empty_and_malformed_prompts(smollm2: RealClient) -> None:
    await check_prompts(smollm2, 400)


async def test_l03_a_model_with_bos_starts_from_it(gemma3: RealClient, gemma3_oracle: Oracle) -> None:
    await check_prompts(gemma3, 200)
    reply = await gemma3.complete(prompt="", max_tokens=8, temperature=0)
    bos = gemma3_oracle.encode("")
    assert len(bos) == reply.json["usage"]["prompt_tokens"] == 1
    assert reply.json["choices"][0]["text"] == gemma3_oracle(bos, 8).text


BAD_MESSAGES: list[Any] = [
    [], None, 5, "hi", {}, [{}], [None], ["hi"], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}], [{"role": "emperor", "content": "a"}], [{"content": "a"}],
    [{"role": "user", "content": [{}]}], [{"role": "user", "content": ["a"]}], [{"role": 1, "content": "a"}],
]  # fmt: skip


async def test_l03_empty_and_malformed_messages(smollm2: RealClient, gemma3: RealClient) -> None:
    absent: dict[str, Any] = {}
    for body in [absent, *({"messages": messages} for messages in BAD_MESSAGES)]:
        for client in (smollm2, gemma3):
            reply = await client.post(CHAT, {"max_tokens": 4, **body})
            assert reply.status == 400, (body, reply.text)
            assert (reply.error["param"] or "").startswith("messages"), (body, reply.text)
        await smollm2.check_alive()
    reply = await smollm2.post(CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 4})
    assert reply.status == 200
    await smollm2.check_alive()
    await gemma3.check_alive()
