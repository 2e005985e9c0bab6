"""Reported cases of many clients, a full KV pool and the prefix cache, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scale import FULL, scaled

from hetero.kv_types import parse_kv_types

from .conftest import Serve
from .real import Alone, Oracle, RealClient, RealServer, read_until, talking_to

COMPLETIONS = "/v1/completions"
WORDS = ("river", "stone", "cloud", "seven", "under", "quick", "blue", "twelve", "walks", "because", "house")


@dataclass
class Job:
    prompt: str | list[int]
    max_tokens: int
    alone: Alone
    nonce: str = ""
    ignore_eos: bool = False

    async def check(self, client: RealClient, stream: bool) -> dict[str, Any]:
        """Ask; assert that text, reason and the bits of every log-probability are the oracle's. The usage."""
        body = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "logprobs": 0}
        body |= {"ignore_eos": self.ignore_eos}
        if stream:
            answer = await client.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
            text, reason, usage = answer.text, answer.finish_reason, answer.usage
            logprobs = [v for part in answer.logprobs for v in part["token_logprobs"]]
        else:
            reply = await client.post(COMPLETIONS, body)
            assert reply.status == 200, reply.text
            choice, usage = reply.json["choices"][0], reply.json["usage"]
            text, reason, logprobs = (
                choice["text"],
                choice["finish_reason"],
                choice["logprobs"]["token_logprobs"],
            )
        assert (text, reason) == (self.alone.text, self.alone.finish_reason)
        assert logprobs == [entry.logprob for entry in self.alone.logprobs]
        assert usage is not None
        details = usage["prompt_tokens_details"]
        assert 0 <= details["cached_tokens"] < usage["prompt_tokens"]
        assert usage["completion_tokens"] == len(self.alone.token_ids)
        return usage


# (--kv-type, --ram-cache): what must not make a difference
EVERYDAY, OTHERS = ("f16", "64M"), (("f16", "off"), ("fp8", "64M"), ("q8_0", "64M"), ("k=q8_0,v=fp8", "off"))


@pytest.fixture(scope="module", params=[EVERYDAY, *OTHERS] if FULL else [EVERYDAY], ids=" ".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def flags(kind: tuple[str, str], kv_tokens: int) -> list[str]:
    return ["--kv-tokens", str(kv_tokens), "--kv-type", kind[0], "--ram-cache", kind[1]]


@pytest.fixture(scope="module")
def judge(kind: tuple[str, str], oracle: Oracle, smollm2_path: Path) -> Iterator[Oracle]:
    """The oracle that keeps its contexts in the same format."""
    if kind[0] == "f16":
        yield oracle
        return
    other = Oracle(smollm2_path, parse_kv_types(kind[0]))
    yield other
    other.close()


@pytest.fixture(scope="module")
def crowded(serve: Serve, smollm2_path: Path, kind: tuple[str, str]) -> RealServer:
    """A pool of 3,072 tokens: a few of the clients' requests fill it."""
    return serve(smollm2_path, *flags(kind, 3072))


async def test_k01_answers_are_never_mixed(crowded: RealServer, judge: Oracle) -> None:
    oracle = judge
    rng = random.Random(4)
    count, longest, rounds = scaled(40, 64), scaled(64, 200), scaled(2, 10)
    jobs = []
    for i in range(count):
        words = int(1500 ** rng.random())  # log-uniform: short ones among long ones
        nonce = f"N{i}Q{rng.randrange(10**6):06}"
        ids = oracle.encode(f"{nonce}: {' '.join(rng.choices(WORDS, k=words))}. Again: {nonce[:3]}")[:1500]
        prompt = oracle.tokenizer.decode(ids)
        max_tokens = int(longest ** rng.random())
        jobs.append(Job(prompt, max_tokens, oracle(prompt, max_tokens), nonce))
    jobs.append(Job([oracle.encode(" the")[0]], 20, oracle(oracle.encode(" the"), 20), "-"))  # one token

    async def client_of(own: list[Job], seed: int) -> None:
        own_rng = random.Random(seed)
        async with talking_to(crowded) as client:
            for job in own:
                await asyncio.sleep(own_rng.random() * 0.05)
                usage = await job.check(client, own_rng.random() < 0.5)
                assert usage["prompt_tokens"] < 1600
                # The answers are the oracle's, and no oracle's has another's nonce.
                assert not [j.nonce for j in jobs if j is not job and j.nonce in job.alone.text]

    for round_number in range(rounds):
        rng.shuffle(jobs)
        await asyncio.gather(*(client_of(jobs[c::32], 100 * round_number + c) for c in range(32)))
    async with talking_to(crowded) as client:
        metrics = await client.until_idle()
        assert not [k for k in metrics if k.startswith("hetero_http_answers") and 'status="5' in k]
        await client.check_alive()


SMALL_POOL = scaled(1024, 2048)


@pytest.fixture(scope="module")
def small_pool(serve: Serve, smollm2_path: Path, kind: tuple[str, str]) -> RealServer:
    return serve(smollm2_path, *flags(kind, SMALL_POOL))


async def check_full_pool(client: RealClient, oracle: Oracle, pool: int, new_tokens: int) -> None:
    """Eight requests of 128 + `new_tokens` tokens, then one that nearly fills `pool` beside small ones."""

    def job(seed: int, prompt_tokens: int, max_tokens: int) -> Job:
        rng = random.Random(seed)
        ids = [rng.randrange(1000, 9000) for _ in range(prompt_tokens)]
        return Job(ids, max_tokens, oracle(ids, max_tokens, ignore_eos=True), ignore_eos=True)

    before = await client.until_idle()
    eight = [job(seed, 128, new_tokens) for seed in range(8)]
    await asyncio.gather(*(j.check(client, i % 2 == 0) for i, j in enumerate(eight)))
    after = await client.until_idle()
    name = "hetero_preemptions_total"
    # That no single one is preempted more often, and that no step is empty while somebody waits, the
    # simulation of the scheduler checks.
    assert after[name] - before[name] <= 4 * 8
    if 8 * (128 + new_tokens) > 2 * pool:
        assert after[name] > before[name], "the pool was to be too small for all"

    large, small = job(20, pool - 148, 100), [job(30 + i, 20 + i, 24) for i in range(4)]
    await asyncio.gather(*(j.check(client, True) for j in (large, *small)))

    reply = await client.complete(prompt=[1000] * (pool + 52), max_tokens=8)
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    metrics = await client.until_idle()
    assert not [k for k in metrics if k.startswith("hetero_http_answers") and 'status="5' in k]
    await client.check_alive()


async def test_k03_a_full_pool(small_pool: RealServer, judge: Oracle) -> None:
    async with talking_to(small_pool) as client:
        await check_full_pool(client, judge, SMALL_POOL, scaled(160, 512))


async def test_k03_a_full_pool_with_sliding_windows(gemma3: RealClient, gemma3_oracle: Oracle) -> None:
    await check_full_pool(gemma3, gemma3_oracle, 2048, scaled(160, 512))


def a_prefix_tree(rng: random.Random, count: int, oracle: Oracle) -> list[list[int]]:
    """Prompts that share beginnings of 1 to 1,000 tokens and part inside and at the borders of blocks."""
    vocabulary = [oracle.encode(f" {word}")[0] for word in WORDS] + list(range(1000, 1100))
    prompts = [rng.choices(vocabulary, k=rng.choice((16, 64, 200, 700)))]
    while len(prompts) < count:
        parent = rng.choice(prompts)
        cut = rng.randint(1, min(1000, len(parent)))
        if rng.random() < 0.5:
            cut = max(1, cut // 16 * 16)
        prompts.append(parent[:cut] + rng.choices(vocabulary, k=rng.choice((0, 1, 2, 15, 16, 17, 40, 130))))
        if rng.random() < 0.2:
            prompts.append(list(parent))
    return prompts[:count]


async def test_x01_the_cache_never_changes_an_answer(
    crowded: RealServer, judge: Oracle, kind: tuple[str, str]
) -> None:
    rng, oracle = random.Random(5), judge
    new_tokens = scaled(8, 32)
    prompts = a_prefix_tree(rng, scaled(120, 300), oracle)
    known: dict[tuple[int, ...], Alone] = {}
    for prompt in prompts:
        known.setdefault(tuple(prompt), oracle(prompt, new_tokens))
    jobs = [Job(prompt, new_tokens, known[tuple(prompt)]) for prompt in prompts]

    async def cancel(client: RealClient, job: Job) -> None:
        body = {"prompt": job.prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(rng.choice((0.002, 0.02, 5.0))),
                client.session.post(client.base + COMPLETIONS, json=body) as response,
            ):
                await read_until(response, rng.randint(1, 8))
                response.close()

    async def client_of(client: RealClient, own: list[Job]) -> int:
        cached = 0
        for job in own:
            if rng.random() < 0.2:
                await cancel(client, job)
                continue
            usage = await job.check(client, rng.random() < 0.5)
            assert usage["prompt_tokens"] == len(job.prompt)
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    async with talking_to(crowded) as client:
        for _ in range(2):
            found = await asyncio.gather(*(client_of(client, jobs[c::4]) for c in range(4)))
            assert sum(found) > sum(len(p) for p in prompts) // 10, "the cache was to be used"
            rng.shuffle(jobs)
        metrics = await client.until_idle()
        if kind[1] != "off":
            assert metrics['hetero_kv_prompt_tokens_total{source="host"}'] > 100
            assert metrics['hetero_kv_moved_bytes_total{to="device"}'] > 0
        await client.check_alive()
