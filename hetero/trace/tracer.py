"""When what happened to each request: recorded by the engine, written down by a thread of its own.

    queued ─> first step ─> chunk ─> chunk ─> first token ─> its text sent ─> step ─> step ─> finished ─> sent
                                     preempted, blocks moved between tiers: in their steps

    of a step: started ─> computed on the devices, stage by stage ─> ended: sampled, detokenized, handed out

The engine hands on what it has anyway, so that a step costs it one entry in a queue. Times are of the
engine's clock, in seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetero.batch import Step
from hetero.request import FinishReason, Request

log = logging.getLogger(__name__)

MAX_WAITING = 100_000  # events; further steps are dropped, which is told: a trace never holds up the engine
LOOK_SECONDS = 0.05  # between looks for events: being woken by each costs as much again
KEEP_SECONDS = 30.0  # for which a finished request waits for its answer to be sent


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step and how it went. `emitted[i]` tokens came for request i, `accepted[i]` of them guessed.

    The devices were done at `computed`; their texts had been handed out at `ended`. `stages` has for each
    stage when it began, and how many seconds it was busy.
    """

    step: Step
    started: float
    computed: float
    ended: float
    emitted: Sequence[int]
    accepted: Sequence[int]
    stages: Sequence[tuple[float, float]]


@dataclass(slots=True)
class Mark:
    """Something that happened at `time`, or from `time` to `until`."""

    name: str
    time: float
    until: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Timeline:
    """All that is known of a request. `parent`: the W3C traceparent that its client sent, or "".

    `steps` are the numbers of the steps that gave it tokens, and `came` the times when they were detokenized.
    `tier_tokens` of the cached ones came from "host" memory or the "disk".
    """

    request_id: str
    queued: float
    prompt_tokens: int
    parent: str = ""
    first_step: float | None = None
    first_token: float | None = None
    first_sent: float | None = None
    finished: float | None = None
    sent: float | None = None
    reason: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class Sink(Protocol):
    """Where traces go. Called from the tracer's thread alone."""

    def step(self, done: StepDone) -> None: ...

    def request(self, timeline: Timeline) -> None:
        """It has ended and was sent, or nobody waits for it any more."""

    def close(self) -> None: ...


class Tracer:
    """Takes events from any thread. `close` writes what is left."""

    def __init__(self, sinks: Sequence[Sink], clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.num_dropped = 0
        self._sinks = list(sinks)
        self._events: deque[tuple[Any, ...]] = deque()
        self._closing = threading.Event()
        self._timelines: dict[str, Timeline] = {}
        self._unsent: dict[str, float] = {}  # finished, and when
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    # -- for the engine and the server -----------------------------------------------------------------

    def queued(self, request: Request) -> None:
        self._put(("queued", request, request.arrival_time))

    def step(self, done: StepDone) -> None:
        """Dropped where too much waits; of a request nothing is, since what began has to end."""
        if len(self._events) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._put(("step", done))

    def finished(self, request: Request) -> None:
        self._put(("finished", request, self.clock()))

    def sent(self, request_id: str, whole: bool = True) -> None:
        """The first of an answer's text was written to its client; or all of it, or the client was gone."""
        self._put(("sent" if whole else "first sent", request_id, self.clock()))

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._closing.set()
        self._thread.join()

    def _put(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)

    # -- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            self._take_all()
        self._take_all()
        for timeline in list(self._timelines.values()):
            self._tell_request(timeline)
        if self.num_dropped:
            log.warning("%d steps of the trace were dropped: the disk could not keep up", self.num_dropped)
        self._tell(lambda sink: sink.close())

    def _take_all(self) -> None:
        while self._events:
            try:
                self._take(self._events.popleft())
            except Exception:
                log.exception("an event of the trace was lost")

    def _tell_request(self, timeline: Timeline) -> None:
        self._tell(lambda sink: sink.request(timeline))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                log.error("tracing stops: %s", error)
                self._sinks.remove(sink)

    def _take(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == "step":
            self._take_step(event[1])
        elif kind == "queued":
            _, request, now = event
            self._timelines[request.request_id] = Timeline(
                request.request_id, now, len(request.prompt_token_ids), request.trace_parent
            )
        elif kind == "finished":
            self._take_finished(*event[1:])
        elif (timeline := self._timelines.get(event[1])) is not None:
            if kind == "first sent":
                timeline.first_sent = event[2]
                return
            timeline.sent = event[2]
            if timeline.finished is not None:
                self._end(timeline.request_id)

    def _take_step(self, done: StepDone) -> None:
        self._tell(lambda sink: sink.step(done))
        step = done.step
        for request_id in step.preempted_ids:
            if (timeline := self._timelines.get(request_id)) is not None:
                timeline.marks.append(Mark("preempted", done.started))
        for i, request in enumerate(step.requests):
            timeline = self._timelines.get(request.request_id)
            if timeline is None:
                continue
            if timeline.first_step is None:
                timeline.first_step = done.started
            start, count = step.starts[i], step.num_scheduled_tokens[i]
            if start < timeline.prompt_tokens:
                timeline.marks.append(
                    Mark("chunk", done.started, done.ended, {"from": start, "tokens": count})
                )
            if done.emitted[i]:
                if timeline.first_token is None:
                    timeline.first_token = done.ended
                timeline.steps.append(step.step_id)
                timeline.came.append(done.ended)

    def _take_finished(self, request: Request, now: float) -> None:
        timeline = self._timelines.get(request.request_id)
        if timeline is None:
            return
        timeline.finished = now
        reason = request.finish_reason
        timeline.reason = reason.value if isinstance(reason, FinishReason) else ""
        timeline.output_tokens = len(request.output_token_ids)
        timeline.cached_tokens = request.num_cached_tokens
        timeline.tier_tokens = dict(request.tier_tokens)
        if timeline.sent is not None:
            self._end(request.request_id)
        else:
            self._unsent[request.request_id] = now
        while self._unsent:
            request_id, since = next(iter(self._unsent.items()))
            if now - since < KEEP_SECONDS:
                break
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._unsent.pop(request_id, None)
        timeline = self._timelines.pop(request_id)
        self._tell_request(timeline)
