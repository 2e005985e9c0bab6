"""Embeddings in the dialects that have them, and through the packages of their clients."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import ollama
import openai
import pytest
from tiny_models import tiny_model

from .client import running, until
from .fake_engine import FakeEngine
from .real import RealServer, real_server

ROUTES = {
    "/v1/embeddings": "input",
    "/api/embed": "input",
    "/api/embeddings": "prompt",
    "/embedding": "content",
    "/embeddings": "input",
}


def vector(length: int) -> list[float]:
    return [0.6, length / 1000, 0.1]


async def test_openai_inputs() -> None:
    engine = FakeEngine()
    async with running(engine) as client:
        for given, tokens in (
            ("four", [[*b"four"]]),
            (["a", "bcd"], [[97], [*b"bcd"]]),
            ([5, 6.0, 7], [[5, 6, 7]]),
            ([[5, 6], [7]], [[5, 6], [7]]),
        ):
            engine.submitted.clear()
            body = (await client.post("/v1/embeddings", {"input": given, "dimensions": None})).json
            assert [prompt for prompt, _, _ in engine.submitted] == tokens
            assert body["object"] == "list" and body["model"] == "fake-model"
            assert body["data"] == [
                {"object": "embedding", "index": i, "embedding": vector(len(ids))}
                for i, ids in enumerate(tokens)
            ]
            total = sum(map(len, tokens))
            assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
        packed = (await client.post("/v1/embeddings", {"input": "four", "encoding_format": "base64"})).json
        raw = base64.b64decode(packed["data"][0]["embedding"])
        assert np.array_equal(np.frombuffer(raw, "<f4"), np.array(vector(4), np.float32))


async def test_what_is_not_supported_is_named() -> None:
    async with running(FakeEngine()) as client:
        for body, named in (
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": ["a", ""]}, "input 1"),
            ({"input": 5}, "input"),
            ({"input": ["a", 5]}, "input"),
            ({"input": [["a"]]}, "input"),
            ({"input": ["a"] * 2049}, "2048"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "dimensions": 2}, "dimensions"),
        ):
            reply = await client.post("/v1/embeddings", body)
            assert reply.status == 400 and named in reply.json["error"]["message"], body
        reply = await client.post("/embedding", {"content": "a", "embd_normalize": 1})
        assert reply.status == 400 and "embd_normalize" in reply.text


@pytest.mark.parametrize(("path", "name"), ROUTES.items())
async def test_limits_are_those_of_the_route(path: str, name: str) -> None:
    engine = FakeEngine()
    async with running(engine) as client:
        reply = await client.post(path, {name: "x" * 600})
        assert reply.status == 400 and "600" in reply.text and "512" in reply.text
        engine.info.pooling = None
        reply = await client.post(path, {name: "x"})
        assert reply.status == 400 and "gives no embeddings" in reply.text
        assert isinstance(reply.json["error"], str) == path.startswith("/api/")


async def test_ollama_and_llamacpp() -> None:
    async with running(FakeEngine()) as client:
        reply = (await client.post("/api/embed", {"model": "m", "input": ["ab", "c"], "keep_alive": 5})).json
        assert reply["embeddings"] == [vector(2), vector(1)] and reply["prompt_eval_count"] == 3
        assert reply["model"] == "fake-model" and reply["total_duration"] > 0
        assert (await client.post("/api/embed", {"model": "m"})).json["embeddings"] == []
        cut = await client.post("/api/embed", {"input": "x" * 600, "truncate": True})
        assert cut.json["prompt_eval_count"] == 511
        assert (await client.post("/api/embeddings", {"prompt": "ab"})).json == {"embedding": vector(2)}
        assert (await client.post("/api/embeddings", {"prompt": ""})).json == {"embedding": []}
        assert (await client.post("/embedding", {"content": ["ab", "c"]})).json == [
            {"index": 0, "embedding": [vector(2)]},
            {"index": 1, "embedding": [vector(1)]},
        ]


async def test_a_client_that_leaves_is_noticed() -> None:
    engine = FakeEngine()
    engine.prefill_seconds = 30.0
    async with running(engine) as client:
        waiting = asyncio.create_task(client.post("/v1/embeddings", {"input": ["a", "b"]}))
        await until(lambda: len(engine.running) == 2)
        waiting.cancel()
        await until(lambda: not engine.running)
    assert engine.cancelled == 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("embeddings")
    model = tiny_model(folder / "tiny.gguf")
    with real_server(folder, model, "--ctx", "256", "--max-num-batched-tokens", "64") as server:
        yield server


def test_clients_packages(server: RealServer) -> None:
    texts = ["a small house", "the blue sea " * 12]
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="x", max_retries=0) as client:
        plain, packed = (
            client.embeddings.create(model="m", input=texts, **form)
            for form in ({"encoding_format": "float"}, {})  # base64 is what the package asks for by itself
        )
        with pytest.raises(openai.BadRequestError, match="256") as refused:
            client.embeddings.create(model="m", input="word " * 300)
    assert refused.value.code == "context_length_exceeded"
    assert [d.embedding for d in plain.data] == [d.embedding for d in packed.data]
    assert plain.usage == packed.usage and plain.usage.prompt_tokens > 50
    vectors = np.array([d.embedding for d in plain.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    client = ollama.Client(server.base)
    assert np.array_equal(np.array(client.embed("m", texts).embeddings), vectors)
    assert list(client.embeddings("m", texts[1]).embedding) == vectors[1].tolist()


async def test_embeddings_among_answers(server: RealServer) -> None:
    """Both kinds at a time give what each gives alone."""
    prompts = [f"number {i} of many texts, " * 4 for i in range(6)]

    def answer(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return server.complete(**body)["choices"][0]["text"]

    def embedded(prompt: str) -> list[float]:
        with openai.OpenAI(base_url=f"{server.base}/v1", api_key="x", max_retries=0) as client:
            return client.embeddings.create(model="m", input=prompt).data[0].embedding

    alone = [(await asyncio.to_thread(answer, p), await asyncio.to_thread(embedded, p)) for p in prompts]
    both = [asyncio.to_thread(work, p) for p in prompts for work in (answer, embedded)]
    together = await asyncio.gather(*both)
    assert list(zip(together[::2], together[1::2], strict=True)) == alone
