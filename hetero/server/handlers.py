"""From a route's function to a handler of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from hetero.server.body import read_json
from hetero.server.context import Compute, Context, Handler, Prepare
from hetero.server.errors import json_response
from hetero.server.respond import Answer


def generating(prepare: Prepare, context: Context) -> Handler:
    """For a route that generates: 503 at once while nothing can be; a drain waits for it."""

    async def handler(request: web.Request) -> web.StreamResponse:
        context.check_alive()
        with context.active.request():
            answer = await prepare(await read_json(request, context.settings), context)
            if isinstance(answer, Answer):
                return await answer.respond(request, context.settings)
            return answer if isinstance(answer, web.Response) else json_response(answer)

    return handler


def computing(compute: Compute, context: Context) -> Handler:
    """For a route that makes an object of another."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return json_response(await compute(await read_json(request, context.settings), context))

    return handler


def telling(tell: Callable[[Context], dict[str, Any]], context: Context) -> Handler:
    """For a route that takes no body."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return json_response(tell(context))

    return handler
