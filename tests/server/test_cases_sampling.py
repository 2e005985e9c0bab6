"""Reported cases of seeds, biases, log-probabilities and stop strings, against a real server."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from scale import scaled

from .real import Oracle, RealClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STORY = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 1.0, "top_p": 0.95}


async def texts_of(client: RealClient, *bodies: dict[str, Any]) -> list[str]:
    """The answers to all bodies, sent at the same time."""
    replies = await asyncio.gather(*(client.post(COMPLETIONS, body) for body in bodies))
    assert [r.status for r in replies] == [200] * len(bodies)
    return [r.json["choices"][0]["text"] for r in replies]


async def test_s01_a_seed_is_a_text(smollm2: RealClient) -> None:
    seeded = {**STORY, "seed": 42}
    alone = [(await texts_of(smollm2, seeded))[0] for _ in range(5)]
    others = [{**STORY, "prompt": f"{i} {'word ' * 9 * i}", "seed": i, "max_tokens": 40} for i in range(8)]
    mixed = [body for pair in zip([seeded] * 8, others, strict=True) for body in pair]
    crowded = (await texts_of(smollm2, *mixed))[::2]
    assert len(alone[0]) > 50
    assert {*alone, *crowded} == {alone[0]}


async def test_s01_other_seeds_and_none_are_other_texts(smollm2: RealClient) -> None:
    seeds = [{**STORY, "seed": seed} for seed in range(1, 21)]
    assert len(set(await texts_of(smollm2, *seeds))) >= 15
    assert len(set(await texts_of(smollm2, *[STORY] * 20))) >= 15


async def test_s01_greedy_ignores_the_seed(smollm2: RealClient, oracle: Oracle) -> None:
    bodies = [{**STORY, "temperature": 0, "seed": 1 + i % 2} for i in range(8)]
    assert set(await texts_of(smollm2, *bodies)) == {oracle(STORY["prompt"], 64).text}


BAD_BIASES: list[dict[str, Any]] = [
    {"191222": -100, "5": 5}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"": 1}, {"5": "x"}, {"5": None}, {"5": 1e9},
]  # fmt: skip


async def test_s03_a_bad_bias_is_a_400_and_disturbs_nobody(smollm2: RealClient, oracle: Oracle) -> None:
    long = {"prompt": "My favourite rivers are", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    other = asyncio.create_task(smollm2.stream(COMPLETIONS, long))
    for bias in BAD_BIASES:
        reply = await smollm2.chat(max_tokens=4, logit_bias=bias)
        assert reply.status == 400 and reply.error["param"] == "logit_bias", (bias, reply.text)
    assert not other.done(), "it was to run beside the bad ones"
    assert (await other).text == oracle(str(long["prompt"]), 200, ignore_eos=True).text
    await smollm2.check_alive()


async def test_s03_a_bias_bans_and_forces(smollm2: RealClient, oracle: Oracle) -> None:
    async def first(**more: Any) -> str:
        reply = await smollm2.chat(max_tokens=1, temperature=0, logprobs=True, **more)
        entry: str = reply.json["choices"][0]["logprobs"]["content"][0]["token"]
        return entry

    greedy = await first()
    token_id = oracle.encode(greedy)[0]
    assert oracle.tokenizer.token_text(token_id) == greedy
    assert await first(logit_bias={str(token_id): -100}) != greedy
    assert await first(logit_bias={"5": 100}) == oracle.tokenizer.token_text(5)


COUNT = "Count to five"


def flat(logprobs: dict[str, Any], chat: bool) -> list[tuple[str, float, dict[str, float], Any]]:
    """(token, logprob, top, bytes or text offset) of each token; the keys are checked."""
    if chat:
        assert set(logprobs) == {"content", "refusal"}
        entries = logprobs["content"]
        assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in entries)
        tops = [{t["token"]: t["logprob"] for t in e["top_logprobs"]} for e in entries]
        return [(e["token"], e["logprob"], top, e["bytes"]) for e, top in zip(entries, tops, strict=True)]
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert set(logprobs) == set(keys)
    return list(zip(*(logprobs[key] for key in keys), strict=True))


@pytest.mark.parametrize("chat", [True, False])
async def test_s05_logprobs_come_in_every_mode(smollm2: RealClient, oracle: Oracle, chat: bool) -> None:
    path = CHAT if chat else COMPLETIONS
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": COUNT}]} if chat else {"prompt": COUNT}
    want: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    found = []
    for stop in (None, ["zzz"]):
        body = {**ask, **want, "max_tokens": 16, "temperature": 0, "stop": stop}
        whole = (await smollm2.post(path, body)).json
        found.append(flat(whole["choices"][0]["logprobs"], chat))
        assert len(found[-1]) == whole["usage"]["completion_tokens"]
        streamed = await smollm2.stream(path, body)
        found.append([entry for part in streamed.logprobs for entry in flat(part, chat)])
    assert len(found[0]) == 16 and all(len(entry[2]) == 3 for entry in found[0])
    assert found == [found[0]] * 4
    if not chat:
        alone = oracle(COUNT, 16)
        assert [entry[1] for entry in found[0]] == [entry.logprob for entry in alone.logprobs]
        assert [entry[0] for entry in found[0]] == [oracle.tokenizer.token_text(t) for t in alone.token_ids]


async def test_s05_bounds(smollm2: RealClient) -> None:
    reply = await smollm2.chat(max_tokens=2, logprobs=True, top_logprobs=0)
    entries = reply.json["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2 and all(e["top_logprobs"] == [] for e in entries)
    for fields in (
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": False, "top_logprobs": 3},
        {"top_logprobs": 3},
    ):
        reply = await smollm2.chat(max_tokens=2, **fields)
        assert reply.status == 400 and reply.error["param"] == "top_logprobs"


LETTERS = "A B C D E F G H I J K"


async def test_p01_a_stop_string_is_found_wherever_it_lies(smollm2: RealClient, oracle: Oracle) -> None:
    alone = oracle(LETTERS, 64, ignore_eos=True)
    text = alone.text
    # covered[k]: characters of the text that the first k + 1 tokens make
    covered = [len(oracle.tokenizer.decode(alone.token_ids[: k + 1])) for k in range(64)]
    assert covered[-1] == len(text)
    rng = random.Random(1)

    def draw() -> str:
        start = rng.randrange(len(text) - 12)
        return text[start : start + rng.randint(1, 12)]

    async def check(stops: list[str], stream: bool) -> None:
        # The earliest is the one that is complete first; generation cannot go on to see another's end.
        end, start = min((text.index(s) + len(s), text.index(s)) for s in stops)
        body: dict[str, Any] = {"prompt": LETTERS, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        body |= {"stop": stops if len(stops) > 1 else stops[0]}
        if stream:
            answer = await smollm2.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
            got, reason, usage = answer.text, answer.finish_reason, answer.usage
        else:
            whole = (await smollm2.post(COMPLETIONS, body)).json
            choice, usage = whole["choices"][0], whole["usage"]
            got, reason = choice["text"], choice["finish_reason"]
        tokens = next(k + 1 for k, characters in enumerate(covered) if characters >= end)
        assert (got, reason) == (text[:start], "stop"), stops
        assert usage is not None and usage["completion_tokens"] == tokens, stops

    stops = [[draw()] for _ in range(70)] + [[draw(), draw()] for _ in range(30)]
    for at in range(0, 100, 10):
        batch = stops[at : at + 10]
        await asyncio.gather(*(check(s, stream) for s in batch for stream in (True, False)))


async def test_p01_many_and_empty_stops(smollm2: RealClient, oracle: Oracle) -> None:
    body = {"prompt": LETTERS, "max_tokens": 16, "temperature": 0}
    many = await smollm2.post(COMPLETIONS, {**body, "stop": [f"never {i}" for i in range(16)]})
    assert many.json["choices"][0]["text"] == oracle(LETTERS, 16).text
    for stop in ([f"never {i}" for i in range(17)], "", ["a", ""], [1], 5):
        reply = await smollm2.post(COMPLETIONS, {**body, "stop": stop})
        assert reply.status == 400 and reply.error["param"] == "stop", stop


async def test_a_greedy_text_is_the_oracles_bit_for_bit(smollm2: RealClient, oracle: Oracle) -> None:
    """Also its log-probabilities, among as many others as the server computes at the same time."""
    words = ["river", "stone", "cloud", "seven", "under", "the", "quick", "and", "12", "{x}", "é\n"]
    rng = random.Random(2)
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 120))) for _ in range(scaled(24, 128))]
    body = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    replies = await asyncio.gather(*(smollm2.post(COMPLETIONS, {**body, "prompt": p}) for p in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        choice, alone = reply.json["choices"][0], oracle(prompt, 24)
        assert (choice["text"], choice["finish_reason"]) == (alone.text, alone.finish_reason)
        assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in alone.logprobs]
