"""Traces as OpenTelemetry spans, sent over OTLP/HTTP.

A span for each request, with the spans queued, prompt, answer and sending inside, a span for each chunk of
the prompt, and events for the rest; `hetero.came_ms` has when tokens came, in milliseconds since the request
was queued. Names of attributes are OpenTelemetry's for generative AI where there
is one. A `traceparent` header of the request makes its span a child of the client's.
"""

from __future__ import annotations

import time
from typing import Any

from hetero.trace.tracer import StepDone, Timeline


class OtlpError(Exception):
    """Traces cannot be sent: one line."""


class OtlpExporter:
    """Sends spans in batches, from a thread of the OpenTelemetry SDK."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None):
        """`endpoint`: such as http://localhost:4318/v1/traces. `exporter`: another SpanExporter in place of
        that. Raises OtlpError where the SDK is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError:
            raise OtlpError('--otlp needs the OpenTelemetry SDK: pip install "hetero[otlp]"') from None
        self._trace, self._model = trace, model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "hetero"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hetero")
        self._offset = time.time() - time.monotonic()  # spans want the time of day

    def step(self, done: StepDone) -> None:
        """Steps are of many requests: their spans have what concerns each."""

    def request(self, timeline: Timeline) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = None
        if timeline.parent:
            parent = TraceContextTextMapPropagator().extract({"traceparent": timeline.parent})
        end = max(t for t in (timeline.queued, timeline.finished, timeline.sent) if t is not None)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "hetero",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": timeline.request_id,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            "gen_ai.response.finish_reasons": [timeline.reason],
            "hetero.cached_tokens": timeline.cached_tokens,
            **{f"hetero.cached_tokens.{tier}": count for tier, count in timeline.tier_tokens.items()},
            "hetero.came_ms": [round(1e3 * (at - timeline.queued), 2) for at in timeline.came],
        }
        span = self._tracer.start_span(
            "request", context=parent, start_time=self._ns(timeline.queued), attributes=attributes
        )
        inside = self._trace.set_span_in_context(span)
        for name, start, until in (
            ("queued", timeline.queued, timeline.first_step),
            ("prompt", timeline.first_step, timeline.first_token),
            ("answer", timeline.first_token, timeline.finished),
            ("sending", timeline.finished, timeline.sent),
        ):
            if start is not None and until is not None and until >= start:
                self._child(inside, name, start, until, {})
        if timeline.first_sent is not None:
            span.add_event("first text sent", {}, self._ns(timeline.first_sent))
        for mark in timeline.marks:
            if mark.until is None:
                span.add_event(mark.name, mark.details, self._ns(mark.time))
            else:
                self._child(inside, mark.name, mark.time, mark.until, mark.details)
        span.end(self._ns(end))

    def close(self) -> None:
        self._provider.shutdown()

    def _child(self, context: Any, name: str, start: float, end: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(
            name, context=context, start_time=self._ns(start), attributes=attributes
        )
        span.end(self._ns(end))

    def _ns(self, at: float) -> int:
        return round(1e9 * (at + self._offset))
