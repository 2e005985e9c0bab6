"""The HTTP application: routes, what wraps them, and how it is run and stopped.

GET, HEAD  /                         a page that shows what /status has, and a box to try the model
           /health, /v1/health       200 while generation can progress, else 503 with the reason
           /metrics                  Prometheus
           /recording                traffic as it comes, without text
           /openapi.json             this list, with what goes in and comes out
           /v1/models, /v1/models/{id}
POST       /v1/chat/completions, /v1/completions
           /v1/responses             and GET, DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items
           /v1/messages, /v1/messages/count_tokens
           /v1/embeddings, /api/embed, /api/embeddings, /embedding, /embeddings
           /api/chat, /api/generate, /api/show; GET /api/version, /api/tags, /api/ps
           /completion, /infill, /tokenize, /detokenize, /apply-template; GET /props, /slots

Any model name is accepted where something is generated, and answered by the one model.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hetero.server import chat, completions, embeddings, models, request_id
from hetero.server.anthropic import route as anthropic
from hetero.server.context import Compute, Context, Handler, Prepare
from hetero.server.dialects import error_response
from hetero.server.errors import as_api_error, json_response
from hetero.server.generate import Active
from hetero.server.handlers import computing, generating, telling
from hetero.server.llamacpp import route as llamacpp
from hetero.server.metrics import Metrics
from hetero.server.ollama import models as ollama_models
from hetero.server.ollama import route as ollama
from hetero.server.openapi.document import document
from hetero.server.page import route as page
from hetero.server.protocol import Runner
from hetero.server.recording import Recorder
from hetero.server.responses.route import Responses
from hetero.server.security import Gate, is_preflight
from hetero.server.settings import ServerSettings

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

__all__ = ["ServerSettings", "create_app", "serve"]

log = logging.getLogger(__name__)
ABORT_SECONDS = 5.0  # for the error events, once a drain has run out of time
WARM_UP_AFTER = 1.0  # seconds from the start

GENERATING: dict[str, Prepare] = {
    "/v1/chat/completions": chat.prepare,
    "/v1/completions": completions.prepare,
    "/v1/messages": anthropic.prepare,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/completion": llamacpp.completion,
    "/completions": llamacpp.completion,
    "/infill": llamacpp.infill,
    "/v1/embeddings": embeddings.openai,
    "/api/embed": embeddings.ollama,
    "/api/embeddings": embeddings.ollama_one,
    "/embedding": embeddings.llamacpp,
    "/embeddings": embeddings.llamacpp,
}
COMPUTING: dict[str, Compute] = {
    "/v1/messages/count_tokens": anthropic.count,
    "/api/show": ollama_models.show,
    "/tokenize": llamacpp.tokenize,
    "/detokenize": llamacpp.detokenize,
    "/apply-template": llamacpp.apply_template,
}
TELLING: dict[str, Callable[[Context], dict[str, Any]]] = {
    "/api/version": ollama_models.version,
    "/api/tags": ollama_models.tags,
    "/api/ps": ollama_models.ps,
    "/props": llamacpp.props,
    "/slots": llamacpp.slots,
    "/status": page.status,
    "/openapi.json": lambda context: document(),
}
ACTIVE = web.AppKey("active", Active)
RECORDER = web.AppKey("recorder", Recorder)


def create_app(engine: AsyncEngine, settings: ServerSettings) -> web.Application:
    """The application over a started engine. `serve` runs it."""
    gate, metrics, active = Gate(settings), Metrics(engine), Active(settings.key_requests)
    recorder = Recorder(settings)
    context = Context(engine, settings, active, recorder)
    app = web.Application(middlewares=[_wrapper(gate, metrics)], client_max_size=settings.max_body_bytes)
    app[ACTIVE], app[RECORDER] = active, recorder

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(gate.cors_headers(request))
        response.headers[request_id.HEADER] = request_id.CURRENT.get()

    async def health(request: web.Request) -> web.Response:
        ok, reason = (False, "the server is stopping") if active.draining else engine.health()
        if ok:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": reason}, status=503)

    async def all_models(request: web.Request) -> web.StreamResponse:
        return await models.all_models(request, context)

    async def one_model(request: web.Request) -> web.StreamResponse:
        return await models.one_model(request, context)

    async def warm_up(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_warm_up(engine))
        yield
        task.cancel()

    app.cleanup_ctx.append(warm_up)
    app.on_response_prepare.append(add_headers)
    app.router.add_get("/", page.Page().handle)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/health", health)
    app.router.add_get("/metrics", metrics.handle)
    app.router.add_get("/recording", recorder.handle)
    app.router.add_get("/v1/models", all_models)
    app.router.add_get("/v1/models/{id:.+}", one_model)
    responses = Responses(context)
    for path, prepare in {**GENERATING, "/v1/responses": responses.prepare}.items():
        app.router.add_post(path, generating(prepare, context))
    for path, compute in COMPUTING.items():
        app.router.add_post(path, computing(compute, context))
    for path, tell in TELLING.items():
        app.router.add_get(path, telling(tell, context))
    for method, path, handler in responses.routes():
        app.router.add_route(method, path, handler)
    return app


async def _warm_up(engine: AsyncEngine) -> None:
    """Once /health has answered, and before clients have come, do what would keep them waiting later."""
    await asyncio.sleep(WARM_UP_AFTER)
    await engine.text.warm_up()


def _wrapper(gate: Gate, metrics: Metrics) -> Any:
    @web.middleware
    async def wrap(request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        request_id.begin(request)
        try:
            gate.check_host(request)
            gate.check_origin(request)
            if is_preflight(request):
                return gate.preflight(request)
            gate.check_key(request)
            response = await handler(request)
        except Exception as error:
            response = error_response(as_api_error(error), request.path)
        resource = request.match_info.route.resource
        metrics.count(resource.canonical if resource else "other", response.status)
        return response

    return wrap


async def serve(
    app: web.Application,
    settings: ServerSettings,
    *,
    on_ready: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Listen until `stop` is set, or SIGINT or SIGTERM comes when there is no `stop`; then drain and return.

    `on_ready` gets the address and the real port. While draining, new requests get a 503; running ones may
    finish within `settings.drain` seconds, or until a second signal, and then end with an error. Raises
    OSError when the address cannot be bound.
    """
    runner = Runner(app, settings.write_timeout)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, ssl_context=settings.tls).start()
        hurry = asyncio.Event()
        if stop is None:
            stop = asyncio.Event()
            _on_signals(stop, hurry)
        if on_ready is not None:
            on_ready(*runner.addresses[0][:2])
        await stop.wait()
        await _drain(app[ACTIVE], settings.drain, hurry)
    finally:
        await runner.cleanup()


async def _drain(active: Active, seconds: float, hurry: asyncio.Event) -> None:
    active.draining = True
    idle = asyncio.create_task(active.wait_idle())
    second_signal = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({idle, second_signal}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.warning("ending the requests that still run")
            active.abort_all()
            await asyncio.wait({idle}, timeout=ABORT_SECONDS)
    finally:
        idle.cancel()
        second_signal.cancel()


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM sets `stop`, the next one `hurry`."""
    loop = asyncio.get_running_loop()

    def arrived() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, arrived)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(arrived))
