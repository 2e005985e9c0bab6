"""Traces as a file for chrome://tracing or ui.perfetto.dev.

    steps      a bar for each, until its tokens were handed out; several lines where several are in flight
    stages     a line for each stage: which step it computed when, and so when it had nothing to do
    requests   a bar for each, with its phases, the chunks of its prompt and what happened to it inside;
               in its arguments when its tokens came, and from which steps

Format: the JSON array form of the Trace Event Format, times in microseconds. A file that ends early, because
the process was killed, can still be opened: the closing bracket may be missing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

from hetero.trace.tracer import StepDone, Timeline

STEPS, STAGES, REQUESTS = 1, 2, 3  # the "processes" of the picture, from top to bottom
FLUSH_SECONDS = 1.0

_encode = json.JSONEncoder(separators=(",", ":")).encode


class ChromeFile:
    """Writes as it comes. Raises OSError when the file cannot be made."""

    def __init__(self, path: Path, lanes: int = 1):
        """`lanes`: steps that can be in flight, each drawn on a line of its own."""
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._lanes = lanes
        self._flushed = time.monotonic()
        self._file.write("[\n")
        for pid, name in ((STEPS, "steps"), (STAGES, "stages"), (REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})

    def step(self, done: StepDone) -> None:
        step = done.step
        args: dict[str, Any] = {
            "step": step.step_id,
            "tokens": step.num_tokens,
            "requests": {
                request.request_id: count
                for request, count in zip(step.requests, step.num_scheduled_tokens, strict=True)
            },
            "emitted": sum(done.emitted),
            "computed_ms": _ms(done.computed - done.started),
        }
        for name, moves in (("copies", step.copies), ("spills", step.spills), ("loads", step.loads)):
            if moves:
                args[name] = len(moves)
        drafted = sum(map(len, step.drafts))
        if drafted:
            args |= {"guessed": drafted, "guessed_right": sum(done.accepted)}
        if step.preempted_ids:
            args["preempted"] = step.preempted_ids
        name = f"step {step.step_id}"
        self._bar(name, STEPS, step.step_id % self._lanes, done.started, done.ended - done.started, args)
        for number, (started, seconds) in enumerate(done.stages):
            self._bar(name, STAGES, number, started, seconds, {"tokens": step.num_tokens})

    def request(self, timeline: Timeline) -> None:
        end = max(t for t in (timeline.queued, timeline.finished, timeline.sent) if t is not None)
        args = {
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "output_tokens": timeline.output_tokens,
            "finish_reason": timeline.reason,
            **{f"cached_tokens_{tier}": count for tier, count in timeline.tier_tokens.items()},
            "steps": timeline.steps,
            "came_ms": [_ms(at - timeline.queued) for at in timeline.came],
        }
        self._span(timeline, timeline.request_id, timeline.queued, end, args)
        phases = (
            ("queued", timeline.queued, timeline.first_step),
            ("prompt", timeline.first_step, timeline.first_token),
            ("answer", timeline.first_token, timeline.finished),
            ("sending", timeline.finished, timeline.sent),
        )
        for name, start, until in phases:
            if start is not None and until is not None and until >= start:
                self._span(timeline, name, start, until, {})
        if timeline.first_sent is not None:
            self._write(self._event("n", timeline, "first text sent", timeline.first_sent, {}))
        for mark in timeline.marks:
            if mark.until is None:
                self._write(self._event("n", timeline, mark.name, mark.time, mark.details))
            else:
                self._span(timeline, mark.name, mark.time, mark.until, mark.details)

    def close(self) -> None:
        self._file.write('{"ph":"M","name":"process_labels","pid":1,"args":{"labels":"hetero"}}\n]\n')
        self._file.close()

    def _bar(
        self, name: str, pid: int, line: int, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        self._write(
            {
                "ph": "X", "name": name, "pid": pid, "tid": line, "ts": _us(start), "dur": _us(seconds),
                "args": args,
            }
        )  # fmt: skip

    def _span(self, timeline: Timeline, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._write(self._event("b", timeline, name, start, args))
        self._write(self._event("e", timeline, name, end, {}))

    def _event(
        self, phase: str, timeline: Timeline, name: str, at: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": phase, "cat": "request", "id": timeline.request_id, "name": name, "pid": REQUESTS, "tid": 0,
            "ts": _us(at), "args": args,
        }  # fmt: skip

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(_encode(event) + ",\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
