"""One streamed request to an OpenAI-compatible server, and the times of what came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

from hetero.bench.workload import Message

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `url` without /v1. `model` and `path` as requests name them."""

    name: str
    url: str
    model: str
    path: str = CHAT
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, messages: Sequence[Message], max_tokens: int, seed: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.path == CHAT:
            return {**asked, "messages": list(messages)}
        return {**asked, "prompt": "\n".join(str(m.get("content") or "") for m in messages)}


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the run began; `error` is None when the answer was complete.

    `due` is when it should have been sent, `sent` when it was. `arrivals` are the times at which pieces of
    the answer came, the first one of them that has text first.
    """

    session: int
    turn: int
    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    queued: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = field(default="", repr=False)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no second, or all came at once."""
        if self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces of the answer."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def e2e(self) -> float:
        return self.end - self.sent


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    record: Record,
    messages: Sequence[Message],
    max_tokens: int,
    seed: int,
    started: float,
) -> None:
    """Send a request and fill in `record`. Whatever goes wrong is in record.error; only a cancel raises."""
    record.sent = time.perf_counter() - started
    try:
        body = target.body(messages, max_tokens, seed)
        async with session.post(target.url + target.path, json=body, headers=target.headers) as answer:
            if answer.status != 200:
                record.error = f"HTTP {answer.status}: {_short(await answer.text())}"
            else:
                await _read(answer, record, started)
                record.error = _what_is_wrong(record, max_tokens, target.ignore_eos)
    except asyncio.CancelledError:
        record.error = "cut off: the run ended"
        raise
    except TimeoutError:
        record.error = "timed out"
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {_short(str(error))}"
    finally:
        record.end = time.perf_counter() - started


async def _read(answer: aiohttp.ClientResponse, record: Record, started: float) -> None:
    pieces: list[str] = []
    ended = False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream ended with an error: {_short(json.dumps(event['error']))}")
        piece = _take(event, record)
        if piece:
            record.arrivals.append(time.perf_counter() - started)
            pieces.append(piece)
    record.text = "".join(pieces)
    if not ended:
        raise ValueError("the stream ended without [DONE]")


def _take(event: dict[str, Any], record: Record) -> str:
    """The text in an event; its usage and what else is of interest goes into the record."""
    usage, timings = event.get("usage"), event.get("timings")
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")
    if timings and timings.get("queue_ms") is not None:
        record.queued = timings["queue_ms"] / 1e3
    piece = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        piece += delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    return piece


def _what_is_wrong(record: Record, max_tokens: int, ignore_eos: bool) -> str | None:
    """Why an answer that ended in order is not what was asked for."""
    if record.finish_reason is None:
        return "incomplete: no finish_reason"
    if not record.output_tokens:
        return "incomplete: no usage"
    if not record.arrivals:
        return "incomplete: no text"
    if record.output_tokens > max_tokens or (ignore_eos and record.output_tokens < max_tokens):
        return (
            f"{record.output_tokens} tokens in place of {max_tokens} (finish_reason {record.finish_reason})"
        )
    return None


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
