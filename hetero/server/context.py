"""What every route needs of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hetero.server.errors import ApiError
from hetero.server.generate import Active
from hetero.server.recording import Recorder
from hetero.server.respond import Answer
from hetero.server.settings import ServerSettings

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Context:
    engine: AsyncEngine
    settings: ServerSettings
    active: Active
    recorder: Recorder

    def check_alive(self) -> None:
        """ApiError 503 before any work while nothing could be generated."""
        if self.active.draining:
            raise ApiError(503, "the server is stopping", code="draining")
        ok, reason = self.engine.health()
        if not ok:
            lost = self.engine.device_lost is not None
            raise ApiError(503, reason, code="device_unavailable" if lost else "unavailable")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Both raise ApiError or RequestError. The first starts a generation, or knows the answer without one.
Prepare = Callable[[dict[str, Any], Context], Awaitable[Answer | web.Response | dict[str, Any]]]
Compute = Callable[[dict[str, Any], Context], Awaitable[dict[str, Any]]]
