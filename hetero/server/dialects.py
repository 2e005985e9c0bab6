"""Errors in the dialect of the route that they belong to."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hetero.server.anthropic import writer as anthropic
from hetero.server.errors import ApiError
from hetero.server.ollama import writer as ollama


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    if path.startswith("/api/"):
        return ollama.error_body(error)
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic.error_body(error)
    return error.body


def error_response(error: ApiError, path: str) -> web.Response:
    return error.response(error_body(error, path))
