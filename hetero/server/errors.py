"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from hetero.request import RequestError
from hetero.sampling.params import ParamError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {
    403: "forbidden", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout",
    413: "request_too_large", 415: "unsupported_media_type", 431: "headers_too_large",
}  # fmt: skip
_UNAVAILABLE = {
    "engine_stopped",
    "overloaded",
    "draining",
    "unavailable",
    "device_unavailable",
}  # codes of RequestError that are a 503
RETRY_SECONDS = {"draining": "5", "device_unavailable": "5"}  # after which the same request may succeed


class ApiError(Exception):
    """An answer other than 200. `param` is the client's name of the field at fault, if one is. `close` ends
    the connection after it, where the rest of the request cannot be told from a next one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode("utf-8", "replace").decode()
        self.param = param if param is None else param.encode("utf-8", "replace").decode()
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})
        if self.code in RETRY_SECONDS:
            self.headers.setdefault("Retry-After", RETRY_SECONDS[self.code])
        self.close = close

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def response(self, body: dict[str, Any] | None = None) -> web.Response:
        """`body` in place of OpenAI's, for another dialect."""
        response = json_response(body or self.body, status=self.status, headers=self.headers)
        if self.close:
            response.force_close()
        return response


encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=encode(body).encode("utf-8", "replace"),  # paths of files may hold what no text can
        status=status,
        headers=headers,
        content_type="application/json",
    )


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`. An unexpected one is logged and told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = 503 if error.code in _UNAVAILABLE else 400
        return ApiError(status, str(error), param=error.field, code=error.code)
    if isinstance(error, ParamError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{error.method} is not allowed here, use {allowed}", headers={"Allow": allowed})
    if isinstance(error, web.HTTPException):
        message = "there is nothing at this path" if error.status == 404 else error.reason
        return ApiError(error.status, message)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")
