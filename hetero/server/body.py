"""Request bodies: bounded in size and time, and JSON without surprises.

A body has `body_timeout` seconds, and one more for each `body_rate` bytes that have come: a byte now and then
keeps no connection, while a slow uplink may take hours. (Apache's mod_reqtimeout has such a MinRate.)

Accepted: a byte order mark, any Content-Type or none, gzip and deflate. Of duplicate keys the last one
counts, as in Python and JavaScript. Refused with 400: text that is not UTF-8, NaN and Infinity, half of a
surrogate pair, nesting beyond MAX_DEPTH, anything but an object.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from aiohttp import hdrs, web

from hetero.server.errors import ApiError
from hetero.server.settings import ServerSettings

MAX_DEPTH = 200
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: web.Request, settings: ServerSettings) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError 400, 408, 413 or 415."""
    return parse_json(await read_body(request, settings))


async def read_body(request: web.Request, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate", ""):
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported; use gzip or none")
    pieces: list[bytes] = []
    size, clock = 0, _Clock(settings)
    while True:
        try:
            async with asyncio.timeout(clock.patience(size)):
                piece = await request.content.readany()
        except TimeoutError:
            raise clock.late(size) from None
        except web.RequestPayloadError as error:
            request.content.feed_eof()  # else aiohttp reads on, and stumbles over the same error
            raise ApiError(
                400, "the request body is cut off or not encoded as its headers say", close=True
            ) from error
        if not piece:
            return b"".join(pieces)
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)


class _Clock:
    """When a body is late. Starts when its request's headers have come."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._began = asyncio.get_running_loop().time()

    def patience(self, size: int) -> float:
        """Seconds until the next piece is late, when `size` bytes have come. What waits already is read."""
        return min(self._settings.body_timeout, self._left(size))

    def late(self, size: int) -> ApiError:
        """408 that says which bound it was."""
        pause, rate = self._settings.body_timeout, self._settings.body_rate
        why = f"stopped arriving for {pause:g} seconds"
        if self._left(size) <= 0:
            why = f"arrives too slowly: fewer than {rate} bytes a second, beyond its first {pause:g} seconds"
        return ApiError(408, f"the request body {why}", close=True)

    def _left(self, size: int) -> float:
        allowed = self._settings.body_timeout + size / self._settings.body_rate
        return self._began + allowed - asyncio.get_running_loop().time()


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the request body is larger than {limit} bytes, the limit of this server", close=True
    )


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400 that says what is wrong."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad_json(f"not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise _bad_json("the body is empty")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _bad_json(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise _bad_json("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _bad_json("the body must be an object")
    may_be_deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH
    if may_be_deep or _SURROGATE.search(body):
        _check_tree(value)
    return value


def _check_tree(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += item.keys()
                children += item.values()
            elif isinstance(item, list):
                children += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise _bad_json("a string holds half of a surrogate pair") from None
        level = children
        if not level:
            return
    raise _bad_json(f"nested deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise _bad_json(f"{name} is not a JSON number")


def _bad_json(why: str) -> ApiError:
    return ApiError(400, f"the request body is not valid JSON: {why}", code="invalid_json")
