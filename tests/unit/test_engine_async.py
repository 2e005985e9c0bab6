"""The asyncio side of the engine over a fake device."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_runner import N_VOCAB, ByteTokenizer, FakeRunner, make_engine, text_after

from hetero.async_engine import FAILED_STEPS, STUCK_SECONDS, AsyncEngine, ModelInfo, RequestStream
from hetero.request import CLIENT, FinishReason, OutputDelta, RequestError
from hetero.sampling.params import SamplingParams
from hetero.text.output import OutputError
from hetero.text.template import TemplateError

INFO = ModelInfo("fake", "llama", 512, N_VOCAB, 1024, 8, 1, 1, "F32", 0, True)


class Template:
    source = ""

    def render(self, messages: Any, **options: Any) -> list[tuple[str, bool]]:
        if not messages:
            raise TemplateError("no messages here")
        return [(m["content"], False) for m in messages]


class Compiler:
    def compile(self, response_format: dict[str, Any]) -> None:
        if response_format["type"] != "text":
            raise OutputError("cannot")


@asynccontextmanager
async def running(
    runner: FakeRunner, template: Any = None, cache_by_client: bool = False, **options: Any
) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(runner, **options)
    served = AsyncEngine(engine, ByteTokenizer(), template, Compiler(), INFO, cache_by_client)  # type: ignore[arg-type]
    served.start()
    try:
        yield served
    finally:
        await served.close()
        assert runner.closed and not served.health()[0]
        if "died" not in served.health()[1]:
            engine.check_invariants()


def submit(engine: AsyncEngine, prompt: str, request_id: str, **params: Any) -> RequestStream:
    return engine.submit(list(prompt.encode()), SamplingParams(**params), request_id=request_id)


async def read(stream: RequestStream) -> tuple[str, OutputDelta]:
    text, last = "", OutputDelta()
    async for last in stream:
        text += last.text
    return text, last


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), 10)


def is_empty(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0 and all(total == free for total, free in stats.kv_blocks)


async def test_streams_side_by_side() -> None:
    async with running(FakeRunner(2)) as engine:
        assert engine.health() == (True, "")
        streams = [submit(engine, f"prompt {i}", f"r{i}", max_tokens=10 + i) for i in range(12)]
        answers = await asyncio.gather(*map(read, streams))
        for i, (text, last) in enumerate(answers):
            assert text == text_after(f"prompt {i}", 10 + i)
            assert last.finish_reason is FinishReason.LENGTH and last.num_output_tokens == 10 + i
        assert is_empty(engine) and engine.stats().finished["length"] == 12
        with pytest.raises(StopAsyncIteration):
            await streams[0].__anext__()


@pytest.mark.parametrize("how", ["break", "abort", "drop", "cancel"])
async def test_leaving_early_frees_the_blocks(how: str) -> None:
    async with running(FakeRunner(step_seconds=0.001)) as engine:
        stream = submit(engine, "leave me", "r", max_tokens=400, ignore_eos=True)
        if how == "break":
            async for _ in stream:
                break
        elif how == "abort":
            await stream.__anext__()
            stream.abort()
            stream.abort()
            _, last = await read(stream)
            assert last.finish_reason is FinishReason.ABORT
        elif how == "drop":
            await stream.__anext__()
            del stream
            gc.collect()
        else:
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: is_empty(engine))
        stats = engine.stats()
        assert stats.cancelled == 1 and stats.generated_tokens < 400


async def test_random_cancels_leak_nothing() -> None:
    rng = random.Random(5)

    async def client(engine: AsyncEngine, i: int) -> None:
        prompt = "shared " * rng.randrange(12) + str(i)
        stream = submit(engine, prompt, f"r{i}", max_tokens=rng.randint(1, 60), ignore_eos=True)
        await asyncio.sleep(rng.random() * 0.05)
        patience, text = rng.choice([0, 1, 5, 1000]), ""
        async for delta in stream:
            text += delta.text
            patience -= 1
            if patience < 0:
                break
        assert text == text_after(prompt, len(text))

    async with running(FakeRunner(2), num_blocks=24, window=50, max_model_len=200) as engine:
        await asyncio.gather(*(client(engine, i) for i in range(200)))
        await until(lambda: is_empty(engine))
        stats = engine.stats()
        assert stats.cancelled > 50 and sum(stats.finished.values()) == 200
        text, _ = await read(submit(engine, "shared next", "next", max_tokens=20))
        assert text == text_after("shared next", 20)


async def test_a_dead_engine_tells_everybody() -> None:
    runner = FakeRunner(step_seconds=0.001)
    async with running(runner) as engine:
        streams = [submit(engine, "x", f"r{i}", max_tokens=400, ignore_eos=True) for i in range(20)]
        await streams[0].__anext__()
        runner.explode = AssertionError("a bug")
        answers = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 10)
        assert {last.finish_reason for _, last in answers} == {FinishReason.ERROR}
        assert all(last.error == "the engine died: AssertionError: a bug" for _, last in answers)
        assert engine.health() == (False, "the engine died: AssertionError: a bug")
        with pytest.raises(RequestError) as refused:
            submit(engine, "x", "late", max_tokens=1)
        assert refused.value.code == "unavailable"


async def test_failed_steps_are_survived() -> None:
    runner = FakeRunner()
    async with running(runner) as engine:
        runner.fail_steps = FAILED_STEPS
        for i in range(FAILED_STEPS):
            assert engine.health()[0]
            _, last = await read(submit(engine, "x", f"r{i}", max_tokens=4))
            assert last.finish_reason is FinishReason.ERROR
        assert engine.health() == (False, f"the device failed in the last {FAILED_STEPS} steps")
        text, _ = await read(submit(engine, "x", "again", max_tokens=4))
        assert text == text_after("x", 4) and engine.health()[0]


async def test_a_stuck_device_is_unhealthy() -> None:
    runner, late = FakeRunner(), [0.0]
    async with running(runner, clock=lambda: time.monotonic() + late[0]) as engine:
        late[0] = 2 * STUCK_SECONDS
        assert engine.health()[0], "idle is not stuck"
        runner.gate.clear()
        stream = submit(engine, "x", "r", max_tokens=3)
        await until(lambda: engine.stats().running == 1)
        assert engine.health()[0]
        late[0] = 4 * STUCK_SECONDS
        assert not engine.health()[0]
        runner.gate.set()
        await read(stream)
        assert engine.health()[0]


@pytest.mark.parametrize(("drain", "reason"), [(10.0, FinishReason.LENGTH), (0.0, FinishReason.ABORT)])
async def test_close_drains_then_aborts(drain: float, reason: FinishReason) -> None:
    async with running(FakeRunner(step_seconds=0.002)) as engine:
        readers = [
            asyncio.create_task(read(submit(engine, "x", f"r{i}", max_tokens=50, ignore_eos=True)))
            for i in range(10)
        ]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.close(drain))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            submit(engine, "x", "late", max_tokens=1)
        assert refused.value.code == "draining"
        await closing
        assert {last.finish_reason for _, last in await asyncio.gather(*readers)} == {reason}
        assert is_empty(engine)


async def test_an_idle_engine_sleeps() -> None:
    async with running(FakeRunner()) as engine:
        await read(submit(engine, "x", "r", max_tokens=3))
        before = time.process_time()
        await asyncio.sleep(0.4)
        assert time.process_time() - before < 0.05 * 0.4


async def refusal(action: Awaitable[Any]) -> RequestError:
    with pytest.raises(RequestError) as error:
        await action
    return error.value


async def test_requests_that_cannot_run_are_refused() -> None:
    async with running(FakeRunner()) as engine:
        with pytest.raises(RequestError, match="512") as refused:
            submit(engine, "x" * 512, "r")
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(RequestError, match="259"):
            engine.submit([1, N_VOCAB], SamplingParams(), request_id="r")
        assert (await refusal(engine.text.chat([]))).field == "messages"
        assert (await refusal(engine.text.compile_grammar({"type": "x"}))).field == "response_format"
        assert await engine.text.compile_grammar({"type": "text"}) is None
        first = submit(engine, "x", "same", max_tokens=400, ignore_eos=True)
        _, last = await read(submit(engine, "x", "same", max_tokens=1))
        assert last.finish_reason is FinishReason.ERROR and "same" in (last.error or "")
        first.abort()


async def test_text_methods() -> None:
    async with running(FakeRunner(), Template()) as engine:
        assert (await engine.text.chat([{"content": "ab"}, {"content": "c"}])).token_ids == [97, 98, 99]
        assert (await refusal(engine.text.chat([]))).field == "messages"
        assert await engine.text.tokenize("é") == [195, 169]
        assert engine.text.decode([195, 169]) == "é" and engine.text.token_bytes(195) == b"\xc3"
        assert engine.text.token_text(256) == "<256>"


@pytest.mark.parametrize("apart", [True, False])
async def test_caches_are_apart_by_client_where_that_is_asked_for(apart: bool) -> None:
    found = []
    async with running(FakeRunner(), cache_by_client=apart) as engine:
        for i, client in enumerate(("one", "other", "one")):
            CLIENT.set(client)
            stream = engine.submit(list(range(97, 97 + 40)), SamplingParams(max_tokens=1), request_id=str(i))
            found.append([delta async for delta in stream][-1].num_cached_tokens)
    assert found == ([0, 0, 39] if apart else [0, 39, 39])


async def test_before_the_start_nothing_is_accepted() -> None:
    engine = AsyncEngine(make_engine(FakeRunner()), ByteTokenizer(), None, Compiler(), INFO)  # type: ignore[arg-type]
    assert engine.health() == (False, "the engine is not started")
    with pytest.raises(RequestError):
        submit(engine, "x", "r")
    await engine.close()
    await engine.close()


async def test_a_lost_device_refuses_until_it_is_back() -> None:
    runner = FakeRunner(2, step_seconds=0.001)
    async with running(runner) as engine:
        streams = [submit(engine, f"prompt {i}", str(i), max_tokens=400, ignore_eos=True) for i in range(3)]
        await streams[0].__anext__()
        runner.unavailable = "device X was lost"
        runner.changed()
        for stream in streams:
            last = (await read(stream))[1]
            assert last.finish_reason is FinishReason.ERROR
            assert (last.error, last.error_code) == ("device X was lost", "device_unavailable")
        assert engine.health() == (False, "device X was lost") and is_empty(engine)
        with pytest.raises(RequestError, match="device X was lost") as refused:
            submit(engine, "more", "more")
        assert refused.value.code == "device_unavailable"
        runner.back = True
        runner.changed()  # with no work: the engine's thread sleeps until then
        await until(lambda: engine.health() == (True, ""))
        assert (await read(submit(engine, "more", "more", max_tokens=5)))[0] == text_after("more", 5)
