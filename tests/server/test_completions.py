"""/v1/completions."""

from __future__ import annotations

from typing import Any

import pytest

from .client import Client
from .fake_engine import BOS, FakeEngine

TEXT = "Hello, wörld 😸!"


async def test_answer_and_stream(client: Client) -> None:
    body = (await client.complete()).json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 2
    *chunks, done = (await client.complete(stream=True)).events
    assert done == "[DONE]" and {c["object"] for c in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "stop"]


async def test_default_length_is_that_of_the_api(client: Client, engine: FakeEngine) -> None:
    await client.post("/v1/completions", {"prompt": "x"})
    assert engine.submitted[-1][1].max_tokens == 16


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["x", ""], [[1], []]])
async def test_an_empty_prompt_is_refused_without_bos(client: Client, prompt: Any) -> None:
    """Case l03."""
    reply = await client.complete(prompt=prompt)
    assert reply.status == 400 and reply.error["param"] == "prompt" and "empty" in reply.error["message"]
    assert (await client.complete()).status == 200


async def test_an_empty_prompt_starts_from_bos(client: Client, engine: FakeEngine) -> None:
    engine.add_bos = True
    assert (await client.complete(prompt="")).status == 200
    assert engine.submitted[-1][0] == [BOS]
    assert (await client.complete(prompt=[])).status == 400


@pytest.mark.parametrize(
    "prompt",
    [None, 3, {}, True, [-1], [99999999], [1.5], [None], [True], ["x", 1], [1, "x"], [[1], "x"], [["x"]]],
)
async def test_bad_prompts_are_named(client: Client, prompt: Any) -> None:
    reply = await client.complete(prompt=prompt)
    assert reply.status == 400 and reply.error["param"] == "prompt"


async def test_an_absent_prompt(client: Client) -> None:
    reply = await client.post("/v1/completions", {})
    assert reply.status == 400 and reply.error["param"] == "prompt"


async def test_kinds_of_prompts(client: Client, engine: FakeEngine) -> None:
    for prompt, want in (
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([0], [[0]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        engine.submitted.clear()
        body = (await client.complete(prompt=prompt, n=2, seed=5, max_tokens=2)).json
        assert [ids for ids, _, _ in engine.submitted] == [ids for ids in want for _ in range(2)]
        assert [p.seed for _, p, _ in engine.submitted] == [5, 6] * len(want)
        assert [c["index"] for c in body["choices"]] == list(range(2 * len(want)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, want))
        assert body["usage"]["completion_tokens"] == 4 * len(want)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "x" * 512}, None),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_refused(client: Client, body: dict[str, Any], param: str | None) -> None:
    reply = await client.complete(**body)
    assert reply.status == 400
    if param:
        assert reply.error["param"] == param
    else:
        assert reply.error["code"] == "context_length_exceeded"


async def test_accepted(client: Client) -> None:
    for body in (
        {"best_of": 2, "n": 2},
        {"suffix": ""},
        {"suffix": None, "logprobs": None},
        {"max_tokens": -1},
    ):
        assert (await client.complete(**body)).status == 200


@pytest.mark.parametrize("stop", [None, "zzz"])
async def test_logprobs(client: Client, stop: Any) -> None:
    """Case s05 in the shape of this route."""
    whole = (await client.complete(logprobs=2, stop=stop)).json
    shown = whole["choices"][0]["logprobs"]
    assert set(shown) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(v) for v in shown.values()} == {whole["usage"]["completion_tokens"]}
    chunks = (await client.complete(logprobs=2, stop=stop, stream=True)).events[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert {k: [x for p in parts for x in p[k]] for k in shown} == shown
    assert shown["tokens"][:2] == ["H", "e"] and shown["token_logprobs"][0] == -0.25
    assert shown["top_logprobs"][0] == {"H": -0.25, "!": -2.0}
    assert shown["text_offset"][:3] == [0, 1, 2]
    assert shown["text_offset"][-1] == len(TEXT), "characters, not bytes"


async def test_echo(client: Client) -> None:
    assert (await client.complete(prompt="Q: ", echo=True)).json["choices"][0]["text"] == "Q: " + TEXT
    assert (await client.complete(prompt=[65, 66], echo=True)).json["choices"][0]["text"] == "AB" + TEXT
    chunks = (await client.complete(prompt=["a", "b"], echo=True, stream=True)).events[:-1]
    for index, prompt in enumerate("ab"):
        own = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(own) == prompt + TEXT
