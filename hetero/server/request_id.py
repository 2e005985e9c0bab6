"""Every request has an id: its client's `x-request-id`, or one of ours. Answers carry it, and log lines.

A W3C `traceparent` header is kept for traces (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import logging
import re
import secrets
from contextvars import ContextVar

from aiohttp import web

from hetero.request import TRACE_PARENT

HEADER = "x-request-id"
CURRENT: ContextVar[str] = ContextVar("request_id", default="")
_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # nothing that could end a header or a line of the log


def begin(request: web.BaseRequest) -> None:
    """Give the request that this task handles its id."""
    given = request.headers.get(HEADER, "")
    parent = request.headers.get("traceparent", "")
    TRACE_PARENT.set(parent if _PARENT.fullmatch(parent) else "")
    CURRENT.set(given if _SAFE.fullmatch(given) else f"req-{secrets.token_hex(8)}")


class OneLine(logging.Formatter):
    """Whatever clients have brought into a message, it stays one line, and moves no terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().formatMessage(record))


class AddRequestId(logging.Filter):
    """Puts the id of the request that a line is about before its text."""

    def filter(self, record: logging.LogRecord) -> bool:
        if current := CURRENT.get():
            record.msg = f"[{current}] {record.msg}"
        return True
