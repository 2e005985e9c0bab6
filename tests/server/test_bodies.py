"""Bodies that no client should send: none is a 500, none keeps anybody waiting."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import scaled
from tiny_models import tiny_model

from hetero.request import RequestError
from hetero.server.app import COMPUTING, GENERATING, ServerSettings, create_app
from hetero.server.context import Context
from hetero.server.errors import ApiError
from hetero.server.generate import Active
from hetero.server.recording import Recorder
from hetero.server.respond import Answer
from hetero.server.responses.route import Responses

from .client import Client, running
from .conftest import Serve
from .fake_engine import FakeEngine
from .mutations import GOOD, LIMITS, damaged
from .real import talking_to

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
AT_ONCE = 16
TOO_LONG = 20.0  # seconds; a guard against hanging, on however busy a machine


def test_every_route_with_a_body_is_tried() -> None:
    app = create_app(FakeEngine(), ServerSettings())  # type: ignore[arg-type]
    routes = {r.resource.canonical for r in app.router.routes() if r.method == "POST" and r.resource}
    assert routes == set(GOOD)


async def test_the_undamaged_ones_are_good() -> None:
    engine = FakeEngine()
    engine.fills_in, engine.info.name = True, "m"
    async with running(engine) as client:
        for path, bodies in GOOD.items():
            for body in bodies:
                reply = await client.post(path, body)
                assert reply.status == 200, (path, reply.text)


async def test_damaged_bodies_and_a_scripted_engine() -> None:
    engine = FakeEngine()
    engine.fills_in, engine.info.n_ctx = True, 4096
    async with running(engine) as client:
        await _send_damaged(client, scaled(600, 5000), seed=1)
        assert (await client.chat()).status == 200 and not engine.running


async def test_damaged_bodies_and_a_real_engine(serve: Serve, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m.gguf", chat_template=CHATML, n_ctx=1024)
    server = serve(model, "--kv-tokens", "4096")
    async with talking_to(server) as client:
        await _send_damaged(client, scaled(150, 20_000), seed=2)
        await client.check_alive()
        await client.until_idle(TOO_LONG)
        assert "Traceback" not in server.log, server.log[-5000:]


async def _send_damaged(client: Client, count: int, seed: int) -> None:
    rng = random.Random(seed)
    paths = sorted(GOOD)
    jobs = iter([(path := rng.choice(paths), damaged(rng, path)) for _ in range(count)])
    took: dict[int, list[float]] = {}

    async def send() -> None:
        for path, body in jobs:
            started = time.perf_counter()
            async with asyncio.timeout(TOO_LONG):
                reply = await client.post(path, body)
            took.setdefault(reply.status, []).append(time.perf_counter() - started)
            assert reply.status in (200, 400, 404), (path, body, reply.text[:1000])
            for word in ("internal error", "generation_failed", "Traceback"):
                assert word not in reply.text, (path, body, reply.text[-1000:])
            if reply.status != 200:
                assert json.loads(reply.text)["error"], (path, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send())
    assert {200, 400} <= took.keys() and (await client.get("/health")).status == 200
    for status, times in sorted(took.items()):
        times.sort()
        shown = ", ".join(f"{1e3 * times[int(q * (len(times) - 1))]:.0f}" for q in (0.5, 0.95, 1))
        print(f"{status}: {len(times)} answers, p50, p95 and longest {shown} ms")


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "5", "schema", "function", "name", "format"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
NAMES = sorted(
    {name for bodies in GOOD.values() for body in bodies for name in body if name not in LIMITS}
    | {
        "modalities", "best_of", "suffix", "stop_token_ids", "include", "previous_response_id", "images",
        "output_config", "reasoning_effort", "guided_choice", "metadata", "parallel_tool_calls",
    }
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=4), st.sampled_from(sorted(GOOD)))
@settings(max_examples=scaled(400, 6000), deadline=None)
def test_no_body_gets_past_the_validation_by_accident(body: dict[str, Any], path: str) -> None:
    async def run() -> None:
        engine, settings = FakeEngine(), ServerSettings()
        context = Context(engine, settings, Active(), Recorder(settings))  # type: ignore[arg-type]
        routes = {**GENERATING, **COMPUTING, "/v1/responses": Responses(context).prepare}
        answer = await routes[path]({**GOOD[path][0], **body}, context)
        if isinstance(answer, Answer):
            async with answer.generation:
                choices = await answer.generation.collect()
            answer = answer.writer.whole(choices, answer.generation.usage)
        if not isinstance(answer, web.Response):
            json.dumps(answer)

    try:
        asyncio.run(run())
    except ApiError as error:
        assert error.status in (400, 404)
    except RequestError:
        pass
