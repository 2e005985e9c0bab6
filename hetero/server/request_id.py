"""Every request has an id: its client's `x-request-id`, or one of ours. Answers carry it, and log lines."""

from __future__ import annotations

import logging
import re
import secrets
from contextvars import ContextVar

from aiohttp import web

HEADER = "x-request-id"
CURRENT: ContextVar[str] = ContextVar("request_id", default="")
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # nothing that could end a header or a line of the log


def begin(request: web.BaseRequest) -> None:
    """Give the request that this task handles its id."""
    given = request.headers.get(HEADER, "")
    CURRENT.set(given if _SAFE.fullmatch(given) else f"req-{secrets.token_hex(8)}")


class AddRequestId(logging.Filter):
    """Puts the id of the request that a line is about before its text."""

    def filter(self, record: logging.LogRecord) -> bool:
        if current := CURRENT.get():
            record.msg = f"[{current}] {record.msg}"
        return True
