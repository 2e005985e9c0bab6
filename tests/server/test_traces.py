"""Traces of a real server with two stages: the file for Perfetto, and what a collector is sent over HTTP."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .real import real_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TOKENS = 20


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of an OTLP collector, and the spans that it is sent."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in sent.resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()


def ask(base: str, prompt: str, **headers: str) -> str:
    """A streamed completion, read to its end; its id."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer if line.startswith(b"data: {")]
    return json.loads(lines[0][6:])["id"]


def test_what_happened_when_is_in_the_file_and_at_the_collector(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = ["--trace", str(path), "--device", "CPU:threads=1", "--device", "CPU:threads=1"]
    flags += ["--ctx", "1024", "--kv-tokens", "4096", "--max-num-batched-tokens", "64", "--spec", "off"]
    with collector() as (endpoint, spans):
        with real_server(tmp_path, smollm2_path, *flags, "--otlp", endpoint) as server:
            ask(server.base, "one two three " * 60, traceparent=f"00-{TRACE}-{PARENT}-01")
            ask(server.base, "four five six")
        check_spans(spans)
    check_file(json.loads(path.read_text()))


def check_spans(spans: list[Any]) -> None:
    requests = [span for span in spans if span.name == "request"]
    assert len(requests) == 3  # with the one that real_server asks
    (traced,) = (span for span in requests if span.trace_id.hex() == TRACE)
    assert traced.parent_span_id.hex() == PARENT and [e.name for e in traced.events] == ["first text sent"]
    told = {a.key: a.value for a in traced.attributes}
    came = [value.double_value for value in told["hetero.came_ms"].array_value.values]
    assert len(came) == told["gen_ai.usage.output_tokens"].int_value == TOKENS and came == sorted(came)
    inside = [span for span in spans if span.parent_span_id == traced.span_id]
    assert {s.name for s in inside} == {"queued", "prompt", "chunk", "answer", "sending"}
    assert sum(s.name == "chunk" for s in inside) >= 3, "the prompt has more than 128 tokens"
    for span in inside:
        assert traced.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= traced.end_time_unix_nano


def check_file(events: list[dict[str, Any]]) -> None:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["steps", "stages", "requests"]
    bars = [e for e in events if e["ph"] == "X"]
    steps = {e["args"]["step"]: e for e in bars if processes[e["pid"]] == "steps"}
    lines: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for bar in bars:
        if processes[bar["pid"]] == "stages":
            lines[bar["tid"]].append(bar)
            step = steps[int(bar["name"].removeprefix("step "))]
            assert step["ts"] <= bar["ts"] and end(bar) <= end(step), "a stage computes within its step"
            assert bar["dur"] > 0
    assert len(lines[0]) == len(lines[1]) == len(steps)
    for first, second in zip(lines[0], lines[1], strict=True):
        assert end(first) <= second["ts"] + 1, "the second stage has what the first hands on"
    for line in lines.values():
        assert all(end(a) <= b["ts"] + 1 for a, b in itertools.pairwise(line)), "one step at a time"
    asked = [e for e in events if e["ph"] == "b" and e["name"] == e["id"]]
    assert len(asked) == 3
    for event in asked:
        told = event["args"]
        assert len(told["came_ms"]) == len(told["steps"]) == told["output_tokens"]
        assert all(event["id"] in steps[number]["args"]["requests"] for number in told["steps"])
        assert told["came_ms"] == sorted(told["came_ms"]) and told["came_ms"][0] > 0
    streamed = {e["id"]: e["ts"] for e in events if e["name"] == "first text sent"}
    assert len(streamed) == 2, "the answer in one piece has none"
    for event in asked:
        if event["id"] in streamed:
            first = event["ts"] + 1e3 * event["args"]["came_ms"][0]
            assert first - 20 <= streamed[event["id"]]


def end(bar: dict[str, Any]) -> float:
    return bar["ts"] + bar["dur"]
