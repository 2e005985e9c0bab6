"""The benchmark measures what it says, and refuses answers that are not what was asked for."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import kv_quality
import numpy as np
import pytest
from aiohttp import web
from attention import ORDINARY, Decode
from load import Timing, measure, send_all
from servers import metric
from workload import WORKLOADS, Job, text

from hetero.commands.quality_kv import Formats
from hetero.kv_types import KVTypes

METRICS_PAGE = """# TYPE hetero_steps_total counter
hetero_steps_total 7.0
hetero_kv_blocks{group="0"} 3.0
hetero_kv_blocks{group="1"} 4.5
hetero_steps_total_other 9.0
"""


def test_workloads_are_what_their_titles_say():
    drawn = {w.name: w.draw(random.Random(1)) for w in WORKLOADS}
    words = {name: [len(job.prompt.split()) for job in jobs] for name, jobs in drawn.items()}
    assert words["decode"] == [128] and words["prefill"] == [2000]
    assert words["shared"] == [1300] * 16
    assert len({job.prompt[:3000] for job in drawn["shared"]}) == 1
    assert len({job.prompt for job in drawn["shared"]}) == 16
    assert len(words["distinct"]) == 16 and all(128 <= n <= 300 for n in words["distinct"])
    assert len({tuple(job.prompt.split()[:8]) for job in drawn["distinct"]}) == 16
    assert text(random.Random(1), 9) != text(random.Random(2), 9)


def test_measure():
    found = measure([Timing(1.0 + i / 10, 3.0 + i / 10, 2000, 21) for i in range(16)])
    assert found["decode tok/s"] == pytest.approx(10.0)
    assert found["prefill tok/s"] == pytest.approx(2000.0)
    assert found["output tok/s"] == pytest.approx(16 * 21 / 4.5)
    assert found["p95 TTFT s"] == pytest.approx(2.5)


def test_the_attention_benchmark_attends_to_its_pools(monkeypatch):
    """All values are the same number, so their average is that; `nbytes` is keys and values of each token."""
    monkeypatch.setattr("attention.CACHE_BYTES", 1 << 17)
    decode = Decode((6, 2, 32), ("f16", "f16"), sequences=3, context=70, threads=2)
    assert decode.layers == 3 and decode.nbytes == 2 * 2 * 3 * 80 * 2 * 32  # whole blocks
    decode.out[:] = 0
    assert decode.seconds() > 0
    assert decode.out == pytest.approx(np.full((3, 6, 32), float(ORDINARY)), rel=1e-5)


async def _stream(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["ignore_eos"] is True and body["temperature"] == 0 and body["stream_options"]["include_usage"]
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    short = body["prompt"] == "short"
    usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"] - short}
    for event in (
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "a"}]},
        {"choices": [], "usage": usage},
    ):
        await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(0.05)
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(text=METRICS_PAGE)


@pytest.fixture
async def base():
    app = web.Application()
    app.router.add_post("/v1/completions", _stream)
    app.router.add_get("/metrics", _metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_streams_are_timed_to_the_first_text(base: str):
    (timing,) = await send_all(base, [Job("long", 9)])
    assert 0.05 <= timing.first_text < timing.end
    assert timing.end >= 0.15
    assert (timing.prompt_tokens, timing.output_tokens) == (5, 9)


async def test_an_answer_of_another_length_is_refused(base: str):
    with pytest.raises(RuntimeError, match="asked for 9 tokens"):
        await send_all(base, [Job("short", 9)])


async def test_metrics_are_read_by_exact_name(base: str):
    assert await asyncio.to_thread(metric, base, "hetero_steps_total") == 7.0
    assert await asyncio.to_thread(metric, base, "hetero_kv_blocks") == 7.5
    with pytest.raises(SystemExit, match="has no hetero_nothing"):
        await asyncio.to_thread(metric, base, "hetero_nothing")


def test_the_page_on_formats_says_what_was_measured_and_whether_it_is_enough():
    good = kv_quality.Row("m", 512, "fp8", 100, 0.004, 1e-4, 0.02, 0.99, 1.001)
    worse = replace(good, ctx=4096, kl=0.0123, top1=0.985)
    exact = replace(good, model=f"m, {kv_quality.EXACT}", kl=9.0)
    sizes = {"m": {"f16": 256, "fp8": 132}}
    page = kv_quality.page([good, worse, exact], sizes, [["keys", "a way", 0.5, 0.25]])
    assert "| keys | a way | 0.50000 | 25.00 % |" in page
    assert "0.01 nats is missed (largest: 0.01230, m at 4,096)" in page
    assert "98% of positions is kept (least: 98.50 %, m at 4,096)" in page
    assert "| m | fp8 | 132 | 1.94x |" in page
    assert "| 4,096 | fp8 | 0.01230 ± 0.00010 | 0.0200 | 98.50 % | 1.0010 | 100 |" in page
    assert f"## m, {kv_quality.EXACT}" in page and "is kept (largest" in kv_quality.page([good], sizes)


def test_formats_are_not_measured_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path))
    wanted = Formats("m.gguf", (KVTypes("fp8", "fp8"),), None, 512, 512)
    times = iter(range(9))
    for changed in (wanted, wanted, replace(wanted, ctx=256), replace(wanted, tokens=256), wanted):
        for what in ("fp8", "q8_0"):
            found = kv_quality.remembered(what, Path("m.gguf"), changed, lambda: [next(times)])
    assert found == [1] and next(times) == 6
