"""Traces as a file for chrome://tracing or ui.perfetto.dev.

Format: the JSON array form of the Trace Event Format, times in microseconds. A file that ends early, because
the process was killed, can still be opened: the closing bracket may be missing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

from hetero.trace.tracer import StepDone, Timeline

ENGINE, REQUESTS = 1, 2  # the "processes" of the picture
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
        for pid, name in ((ENGINE, "steps"), (REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

    def step(self, done: StepDone) -> None:
        step = done.step
        args: dict[str, Any] = {
            "tokens": step.num_tokens,
            "requests": {
                request.request_id: count
                for request, count in zip(step.requests, step.num_scheduled_tokens, strict=True)
            },
            "emitted": sum(done.emitted),
            "busy_ms": [round(1e3 * seconds, 3) for seconds in done.busy],
        }
        for name, moves in (("copies", step.copies), ("spills", step.spills), ("loads", step.loads)):
            if moves:
                args[name] = len(moves)
        drafted = sum(map(len, step.drafts))
        if drafted:
            args |= {"guessed": drafted, "guessed_right": sum(done.accepted)}
        if step.preempted_ids:
            args["preempted"] = step.preempted_ids
        self._write(
            {
                "ph": "X", "name": "step", "pid": ENGINE, "tid": step.step_id % self._lanes,
                "ts": _us(done.started), "dur": _us(done.ended - done.started), "args": args,
            }
        )  # fmt: skip

    def request(self, timeline: Timeline) -> None:
        end = max(t for t in (timeline.queued, timeline.finished, timeline.sent) if t is not None)
        args = {
            "prompt_tokens": timeline.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "output_tokens": timeline.output_tokens,
            "finish_reason": timeline.reason,
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
        for mark in timeline.marks:
            if mark.until is None:
                self._write(self._event("n", timeline, mark.name, mark.time, mark.details))
            else:
                self._span(timeline, mark.name, mark.time, mark.until, mark.details)

    def close(self) -> None:
        self._file.write('{"ph":"M","name":"process_sort_index","pid":1,"args":{"sort_index":0}}\n]\n')
        self._file.close()

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


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
