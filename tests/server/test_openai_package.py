"""The `openai` package against a server that listens, in its own thread as a program has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import openai
import pytest

from .client import running
from .fake_engine import FakeEngine

TEXT = "Hello, wörld 😸!"


@pytest.fixture(scope="module")
def api() -> Iterator[openai.OpenAI]:
    ready, box = threading.Event(), {}

    async def main() -> None:
        box["loop"], box["done"] = asyncio.get_running_loop(), asyncio.Event()
        async with running(FakeEngine(), api_keys=("sk-test",)) as client:
            box["base"] = client.base
            ready.set()
            await box["done"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(10)
    with openai.OpenAI(base_url=box["base"] + "/v1", api_key="sk-test", max_retries=0) as api:
        yield api
    box["loop"].call_soon_threadsafe(box["done"].set)
    thread.join(10)
    assert not thread.is_alive()


def test_chat_stream(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details is not None


def test_chat_and_models(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], n=2, seed=1)
    assert [c.message.content for c in answer.choices] == [TEXT, TEXT]
    assert [m.id for m in api.models.list()] == ["fake-model"]
    assert api.models.retrieve("fake-model").id == "fake-model"


def test_completions(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="m", prompt="x", max_tokens=5, logprobs=1)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_errors_are_the_packages_own(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 600}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="m", messages=[], temperature=9)
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()
