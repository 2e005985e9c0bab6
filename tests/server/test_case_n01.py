"""Case n01: guessing tokens ahead changes no answer, whatever a request asks for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from .real import ROOT, RealClient, RealServer, real_server, scaled, talking_to

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVING = {"prompt": "serving " * 48, "temperature": 0, "max_tokens": 32, "seed": 42}
MODES = [["--spec", "store", "--spec-tokens", "16"], ["--spec", "ngram", "--spec-tokens", "4"]]


def prompts(count: int) -> list[str]:
    """Code to be edited, lists, repeated text and random words."""
    rng = random.Random(7)
    code = (ROOT / "hetero" / "kv" / "prefix_tree.py").read_text().splitlines()
    words = [w for line in code for w in line.split() if w.isalpha()]
    made = []
    for i in range(count):
        start = rng.randrange(len(code) - 14)
        piece = "\n".join(code[start : start + 10])
        made.append(
            [
                f"{piece}\n# the same again\n{piece[: len(piece) // 3]}",
                "\n".join(f"{n}. item {n * (i + 1)}" for n in range(1, 12)),
                f"{words[i % len(words)]} and {words[2 * i % len(words)]}, " * 8,
                " ".join(rng.choice(words) for _ in range(30)),
            ][i % 4]
        )
    return made


@pytest.fixture(scope="module")
def plain(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("off")
    with real_server(folder, smollm2_path, "--kv-tokens", "8192", "--spec", "off") as server:
        yield server


@pytest.fixture(scope="module", params=MODES[: scaled(1, 2)], ids=lambda flags: flags[1])
def guessing(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("on")
    with real_server(folder, smollm2_path, "--kv-tokens", "8192", *request.param) as server:
        yield server


@pytest.fixture
async def off(plain: RealServer) -> AsyncIterator[RealClient]:
    async with talking_to(plain) as client:
        yield client


@pytest.fixture
async def on(guessing: RealServer) -> AsyncIterator[RealClient]:
    async with talking_to(guessing) as client:
        yield client


async def answer(client: RealClient, body: dict[str, Any]) -> tuple[Any, Any]:
    reply = await client.post(body.pop("path", COMPLETIONS), body)
    assert reply.status == 200, reply.text
    usage = reply.json["usage"]
    return reply.json["choices"], (usage["prompt_tokens"], usage["completion_tokens"])


async def eight_at_once(client: RealClient, bodies: list[dict[str, Any]]) -> list[Any]:
    answers: list[Any] = []
    for start in range(0, len(bodies), 8):
        answers += await asyncio.gather(*(answer(client, dict(b)) for b in bodies[start : start + 8]))
    return answers


async def compare(off: RealClient, on: RealClient, bodies: list[dict[str, Any]]) -> list[Any]:
    """The answers, which must be the same, alone and eight at once."""
    plain = await eight_at_once(off, bodies)
    assert await eight_at_once(on, bodies) == plain
    assert [await answer(on, dict(body)) for body in bodies[::4]] == plain[::4]
    return plain


async def test_greedy_answers(off: RealClient, on: RealClient) -> None:
    before = await on.metrics()
    bodies = [SERVING, *({**SERVING, "prompt": p, "max_tokens": 24} for p in prompts(scaled(7, 200)))]
    await compare(off, on, bodies)
    after = await on.until_idle()
    accepted = [name for name in after if name.startswith("hetero_draft_tokens_accepted_total")]
    assert sum(after[name] - before[name] for name in accepted) > 0, "nothing was guessed right"
    reply = await on.post(COMPLETIONS, SERVING)
    timings = reply.json["timings"]
    assert timings["predicted_n"] == reply.json["usage"]["completion_tokens"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    streamed = await on.stream(COMPLETIONS, SERVING)
    assert streamed.chunks[-1]["timings"]["draft_n_accepted"] > 0


VARIANTS: list[dict[str, Any]] = [
    {"stop": ["ing serv"]},
    {"stop": ["\n\n", "item 3", "def "]},
    {"max_tokens": 5},
    {"max_tokens": 1},
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"logit_bias": {"260": 5, "28": -100}},
    {"logprobs": 3},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": 2},
]


async def test_whatever_is_asked_for_acts_on_each_token(off: RealClient, on: RealClient) -> None:
    some = [str(SERVING["prompt"]), *prompts(scaled(1, 12))]
    bodies = [{**SERVING, "prompt": p, "max_tokens": 20, **v} for v in VARIANTS for p in some]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    messages = [{"role": "user", "content": "Give me a number in JSON."}]
    bodies.append(
        {"path": CHAT, "messages": messages, "response_format": form, "max_tokens": 24, "temperature": 0}
    )
    answers = await compare(off, on, bodies)
    assert {c["finish_reason"] for choices, _ in answers for c in choices} >= {"stop", "length"}


async def test_sampled_tokens_with_a_seed(off: RealClient, on: RealClient) -> None:
    """The same tokens for each seed, so the same distribution."""
    bodies = [
        {**SERVING, "prompt": p, "temperature": 0.8, "seed": seed, "max_tokens": 8}
        for seed, p in enumerate(prompts(scaled(8, 2000)))
    ]
    answers = await compare(off, on, bodies)
    assert len({choices[0]["text"] for choices, _ in answers}) > len(bodies) / 2
