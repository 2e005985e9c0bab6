"""An HTTP client that sends jobs to /v1/completions as streams and takes the times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from workload import Job


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer: seconds since the jobs were sent, and the server's own token counts."""

    first_text: float
    end: float
    prompt_tokens: int
    output_tokens: int


async def send_all(base: str, jobs: list[Job]) -> list[Timing]:
    """Send all jobs at once and wait for the last one. Raises RuntimeError when an answer is wrong."""
    timeout = aiohttp.ClientTimeout(total=1800)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as session:
        started = time.perf_counter()
        return await asyncio.gather(*(_send(session, job, started) for job in jobs))


async def _send(session: aiohttp.ClientSession, job: Job, started: float) -> Timing:
    body = {
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = None
    usage = None
    async for event in completion_events(session, body):
        if first is None and any(choice.get("text") for choice in event["choices"]):
            first = time.perf_counter()
        usage = event.get("usage") or usage
    end = time.perf_counter()
    if usage is None or usage["completion_tokens"] != job.max_tokens:
        raise RuntimeError(f"asked for {job.max_tokens} tokens, usage is {usage}")
    return Timing((first or end) - started, end - started, usage["prompt_tokens"], usage["completion_tokens"])


async def completion_events(
    session: aiohttp.ClientSession, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed /v1/completions. Raises RuntimeError when it fails."""
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event


def measure(timings: list[Timing]) -> dict[str, float]:
    """All metrics of one run of a workload. Tokens per second, and seconds."""
    one = timings[0]
    first = sorted(t.first_text for t in timings)
    wall = max(t.end for t in timings)
    return {
        "decode tok/s": (one.output_tokens - 1) / max(one.end - one.first_text, 1e-9),
        "prefill tok/s": one.prompt_tokens / one.first_text,
        "output tok/s": sum(t.output_tokens for t in timings) / wall,
        "p95 TTFT s": first[min(len(first) - 1, int(0.95 * len(first)))],
    }
