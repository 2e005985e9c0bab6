"""Traces: what the engine tells, the file for Perfetto, the spans for OpenTelemetry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner, make_engine
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hetero.engine import Engine
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.trace.chrome import ChromeFile
from hetero.trace.otlp import OtlpExporter
from hetero.trace.tracer import StepDone, Timeline, Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Notes:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.timelines: dict[str, Timeline] = {}
        self.closed = 0

    def step(self, done: StepDone) -> None:
        self.steps.append(done)

    def request(self, timeline: Timeline) -> None:
        assert timeline.request_id not in self.timelines, "told twice"
        self.timelines[timeline.request_id] = timeline

    def close(self) -> None:
        self.closed += 1


def run(tracer_of: Any, num_blocks: int = 60, max_tokens: int = 20) -> Engine:
    """Six requests through a fake device; all but the last are sent."""
    engine = make_engine(FakeRunner(2), num_blocks=num_blocks)
    engine.tracer = tracer = tracer_of(engine)
    for i, length in enumerate((3, 40, 100, 17, 5, 60)):
        request = Request(
            f"r{i}", [97] * length + [48 + i], SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            engine.clock(),
            trace_parent=PARENT if i == 1 else "",
        )  # fmt: skip
        engine.add(request, lambda delta: None)
    for number in range(2000):
        if number == 4:
            engine.abort("r4")
        if not engine.step():
            break
    for i in range(5):
        tracer.sent(f"r{i}")
    engine.close()
    return engine


@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(60, 20), (20, 150)])
def test_every_request_and_every_step_is_told(num_blocks: int, max_tokens: int) -> None:
    notes = Notes()
    engine = run(lambda engine: Tracer([notes], engine.clock), num_blocks, max_tokens)
    stats = engine.stats()
    assert notes.closed == 1 and len(notes.steps) == stats.steps
    assert sum(sum(done.emitted) for done in notes.steps) == stats.generated_tokens
    assert set(notes.timelines) == {f"r{i}" for i in range(6)}
    preempted = 0
    for i, t in sorted(notes.timelines.items()):
        assert t.finished is not None and (t.sent is None) == (i == "r5")
        if i == "r4":
            assert t.reason == "abort"
            continue
        assert t.first_step is not None and t.first_token is not None and t.reason == "length"
        assert t.queued <= t.first_step <= t.first_token <= t.finished and t.output_tokens == max_tokens
        chunks = [mark for mark in t.marks if mark.name == "chunk"]
        preempted += sum(mark.name == "preempted" for mark in t.marks)
        covered = t.cached_tokens
        for mark in chunks:  # each goes on where the one before has ended, or begins again
            assert mark.details["from"] <= covered
            covered = mark.details["from"] + mark.details["tokens"]
            assert mark.until is not None and mark.time <= mark.until
        assert covered >= t.prompt_tokens
    assert preempted == stats.preemptions and (preempted > 0) == (num_blocks == 20)


def test_a_request_that_nobody_takes_is_told_after_a_while() -> None:
    notes, now = Notes(), [0.0]
    tracer = Tracer([notes], lambda: now[0])
    for i in range(3):
        request = Request(f"r{i}", [1, 2], SamplingParams(), 0.0)
        tracer.queued(request)
        now[0] = 20.0 * i
        tracer.finished(request)
    tracer.close()
    assert list(notes.timelines) == ["r0", "r1", "r2"]
    assert notes.timelines["r0"].finished == 0.0


def test_sent_may_come_before_the_end_is_known() -> None:
    """The client is gone: its request ends a little later."""
    notes = Notes()
    tracer, request = Tracer([notes]), Request("r", [1], SamplingParams())
    tracer.queued(request)
    tracer.sent("r")
    tracer.finished(request)
    tracer.sent("unknown")
    tracer.close()
    assert notes.timelines["r"].sent is not None


def test_where_too_much_waits_steps_are_dropped_and_requests_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero.trace.tracer.MAX_WAITING", 0)
    notes = Notes()
    engine = run(lambda engine: Tracer([notes], engine.clock))
    assert notes.steps == [] and set(notes.timelines) == {f"r{i}" for i in range(6)}
    assert notes.timelines["r0"].finished is not None and notes.timelines["r0"].first_step is None
    assert f"{engine.stats().steps} steps of the trace were dropped" in caplog.text


def test_a_sink_that_fails_is_dropped_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Notes):
        def step(self, done: StepDone) -> None:
            raise OSError("no space left on device")

    full, notes = Full(), Notes()
    engine = run(lambda engine: Tracer([full, notes], engine.clock))
    assert len(notes.steps) == engine.stats().steps and full.closed == 0
    assert caplog.text.count("tracing stops: no space left on device") == 1


def test_the_file_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = run(lambda engine: Tracer([ChromeFile(path, 2)], engine.clock))
    events = json.loads(path.read_text())
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(steps) == engine.stats().steps and {e["tid"] for e in steps} <= {0, 1}
    assert sum(e["args"]["emitted"] for e in steps) == engine.stats().generated_tokens
    for lane in (0, 1):  # what is on a line does not overlap
        ends = 0.0
        for e in sorted((e for e in steps if e["tid"] == lane), key=lambda e: e["ts"]):
            assert e["ts"] >= ends - 1
            ends = e["ts"] + e["dur"]
    open_spans: dict[tuple[str, str], int] = {}
    for e in events:
        if e["ph"] in "be":
            key = e["id"], e["name"]
            open_spans[key] = open_spans.get(key, 0) + (1 if e["ph"] == "b" else -1)
            assert open_spans[key] >= 0
    assert not any(open_spans.values())
    assert {name for request, name in open_spans if request == "r2"} == {
        "r2", "queued", "prompt", "answer", "sending", "chunk"
    }  # fmt: skip
    (told,) = (e["args"] for e in events if e["ph"] == "b" and e["name"] == "r2")
    given = {e["args"]["step"] for e in steps if "r2" in e["args"]["requests"]}
    assert len(told["steps"]) == len(told["came_ms"]) == 20 and set(told["steps"]) <= given


def test_spans_for_opentelemetry() -> None:
    exporter = InMemorySpanExporter()
    run(lambda engine: Tracer([OtlpExporter("", "model", exporter)], engine.clock))
    spans = exporter.get_finished_spans()
    requests = {s.attributes["gen_ai.response.id"]: s for s in spans if s.name == "request" and s.attributes}
    assert set(requests) == {f"r{i}" for i in range(6)}
    one = requests["r1"]
    assert one.attributes is not None and one.attributes["gen_ai.usage.input_tokens"] == 41
    assert one.attributes["gen_ai.usage.output_tokens"] == 20
    assert one.parent is not None and f"{one.parent.span_id:016x}" == PARENT.split("-")[2]
    assert f"{one.context.trace_id:032x}" == PARENT.split("-")[1] and requests["r2"].parent is None
    inside = [s for s in spans if s.parent is not None and s.parent.span_id == one.context.span_id]
    assert {s.name for s in inside} == {"queued", "prompt", "answer", "sending", "chunk"}
    for s in inside:
        assert one.start_time <= s.start_time <= s.end_time <= one.end_time
