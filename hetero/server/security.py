"""Who may talk to the server: Host header, Origin header, API key.

A page on the web can make its visitor's browser send requests to this machine. Two doors are shut:

- DNS rebinding (the page's own domain name suddenly points at 127.0.0.1): the Host header then carries that
  name. Accepted are loopback names, IP addresses (a rebound page always has a name), the bound host, this
  machine's own name when it listens beyond loopback, and `allowed_hosts`.
- Requests across origins: an Origin header must be of this machine, of a desktop application, the very host
  that was asked, or in `allowed_origins`. Those get CORS headers; any other is refused before it costs work.

Clients that are not browsers send no Origin, and pass.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from hetero.request import CLIENT
from hetero.server.errors import ApiError
from hetero.server.settings import ServerSettings

APP_SCHEMES = frozenset({"app", "tauri", "vscode-webview", "vscode-file"})
# For load balancers, which have no key; and the page, which asks for one.
PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/"})
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?")


def host_name(netloc: str) -> str | None:
    """Name or address in a Host header, lower case, without port and brackets; None if malformed."""
    match = _HOST.fullmatch(netloc.strip())
    return match[1].strip("[]").rstrip(".").lower() if match else None


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Gate:
    """The three checks, with the settings worked out once."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [_digest(key) for key in settings.api_keys]
        self._hosts = {h.rstrip(".").lower() for h in (*settings.allowed_hosts, settings.host)}
        self._any_host = "*" in settings.allowed_hosts
        if not is_loopback(settings.host):
            own = socket.gethostname().lower()
            self._hosts |= {own, f"{own.split('.')[0]}.local"}
        self._origins = {o.rstrip("/").lower() for o in settings.allowed_origins}

    def check_host(self, request: web.BaseRequest) -> None:
        """Raise ApiError 403 on a Host header that a rebound page could send. HTTP/1.0 may have none."""
        for value in request.headers.getall(hdrs.HOST, []):
            name = host_name(value)
            known = name and (is_loopback(name) or _address(name) or name in self._hosts)
            if not (known or self._any_host):
                raise ApiError(
                    403,
                    f"the Host {value[:100]!r} is not allowed here; the setting allowed_host can add it",
                    code="host_not_allowed",
                )

    def allows_origin(self, request: web.BaseRequest) -> bool:
        origin = request.headers.get(hdrs.ORIGIN, "").lower()
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname
        except ValueError:
            return False
        if parts.scheme in APP_SCHEMES:
            return True
        if parts.scheme not in ("http", "https") or not name:
            return False
        return is_loopback(name) or parts.netloc == request.headers.get(hdrs.HOST, "").lower()

    def check_origin(self, request: web.BaseRequest) -> None:
        if hdrs.ORIGIN in request.headers and not self.allows_origin(request):
            raise ApiError(
                403,
                f"the Origin {request.headers[hdrs.ORIGIN][:100]!r} is not allowed here; the setting "
                "allowed_origin can add it",
                code="origin_not_allowed",
            )

    def check_key(self, request: web.BaseRequest) -> None:
        """Raise ApiError 401 unless a configured key came as `Authorization: Bearer` or `x-api-key`.

        Whose key it is, what the task submits is marked with.
        """
        if not self._keys or request.path in PUBLIC_PATHS:
            return
        scheme, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        offered = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            offered.append(bearer.strip())
        matches, client = 0, ""
        for key in offered:  # no early exit: the time says nothing about the keys
            digest = _digest(key)
            for known in self._keys:
                match = hmac.compare_digest(digest, known)
                matches += match
                client = known.hex() if match else client
        if not matches:
            raise ApiError(
                401,
                "a valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        CLIENT.set(client)

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Headers of every answer to an allowed origin."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self.allows_origin(request):
            return {}
        return {
            hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
            hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "x-request-id, Retry-After",
            hdrs.VARY: hdrs.ORIGIN,
        }

    def preflight(self, request: web.BaseRequest) -> web.Response:
        """The answer to a CORS preflight of an allowed origin: it may send whatever headers it asks for."""
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST, DELETE, OPTIONS",
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        }
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        if asked:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)


def is_preflight(request: web.BaseRequest) -> bool:
    return request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
