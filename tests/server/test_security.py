"""Host, Origin and API key."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.request import CLIENT
from hetero.server.security import host_name

from .client import running
from .fake_engine import FakeEngine, FakeStream


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8080", "localhost"),
        ("LOCALHOST.", "localhost"),
        ("[::1]:80", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("a.example:99999", "a.example"),
        ("", None),
        ("a b", None),
        ("a:b", None),
        ("evil.example/@localhost", None),
        ("user@localhost", None),
        ("localhost:80:80", None),
    ],
)
def test_host_name(header: str, name: str | None) -> None:
    assert host_name(header) == name


async def test_host_header() -> None:
    async with running(FakeEngine(), allowed_hosts=("Box.Example",)) as client:
        for host in (
            "localhost",
            "localhost:1",
            "127.0.0.1",
            "[::1]:8",
            "192.168.1.9",
            "box.example:80",
            "a.localhost",
        ):
            assert (await client.get("/health", headers={"Host": host})).status == 200, host
        for host in (
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "a@b",
            "",
        ):
            reply = await client.get("/v1/models", headers={"Host": host})
            assert (reply.status, reply.error["code"]) == (403, "host_not_allowed"), host
        assert b" 200 " in await client.raw(b"GET /health HTTP/1.0\r\n\r\n")
    async with running(FakeEngine(), allowed_hosts=("*",)) as client:
        assert (await client.get("/health", headers={"Host": "anything.example"})).status == 200


async def test_origins() -> None:
    async with running(FakeEngine(), allowed_origins=("https://chat.example/",)) as client:
        good = (
            "http://localhost:3000", "https://127.0.0.1", "https://chat.example", "vscode-webview://abc",
            "tauri://localhost", client.base,
        )  # fmt: skip
        for origin in good:
            reply = await client.get("/v1/models", headers={"Origin": origin})
            assert reply.status == 200, origin
            assert (
                reply.headers["Access-Control-Allow-Origin"] == origin and reply.headers["Vary"] == "Origin"
            )
        for origin in (
            "https://evil.example",
            "null",
            "http://localhost.evil.example",
            "https://chat.example:444",
            "//",
        ):
            reply = await client.post("/v1/completions", {"prompt": "x"}, headers={"Origin": origin})
            assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed"), origin
            assert "Access-Control-Allow-Origin" not in reply.headers
        assert "Access-Control-Allow-Origin" not in (await client.get("/v1/models")).headers


async def test_cors_covers_errors_and_streams() -> None:
    async with running(FakeEngine(), allowed_origins=("*",), api_keys=("k",)) as client:
        origin = {"Origin": "https://any.example"}
        reply = await client.get("/v1/models", headers=origin)
        assert reply.status == 401 and reply.headers["Access-Control-Allow-Origin"] == "https://any.example"
        reply = await client.post(
            "/v1/completions", {"prompt": "x", "stream": True}, headers={**origin, "x-api-key": "k"}
        )
        assert reply.status == 200 and reply.headers["Access-Control-Allow-Origin"] == "https://any.example"


async def test_preflight() -> None:
    """ollama#4388: whatever headers a client library asks for, an allowed origin may send."""
    asked = "authorization,x-stainless-os,content-type"
    headers = {
        "Origin": "http://localhost:5173",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
        "Access-Control-Request-Private-Network": "true",
    }
    async with running(FakeEngine(), api_keys=("k",)) as client:
        reply = await client.request("OPTIONS", "/v1/chat/completions", headers=headers)
        assert reply.status == 204 and reply.text == ""
        assert reply.headers["Access-Control-Allow-Headers"] == asked
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
        assert reply.headers["Access-Control-Allow-Origin"] == "http://localhost:5173"
        assert reply.headers["Access-Control-Allow-Private-Network"] == "true"
        evil = {**headers, "Origin": "https://evil.example"}
        reply = await client.request("OPTIONS", "/v1/chat/completions", headers=evil)
        assert reply.status == 403 and "Access-Control-Allow-Headers" not in reply.headers


async def test_api_keys() -> None:
    async with running(FakeEngine(), api_keys=("first", "zweiter-ß")) as client:

        async def status(headers: Any, path: str = "/v1/models") -> int:
            return (await client.get(path, headers=headers)).status

        for good in (
            {"Authorization": "Bearer first"},
            {"Authorization": "bearer  first"},
            {"x-api-key": "zweiter-ß"},
        ):
            assert await status(good) == 200, good
        both = {"Authorization": "Bearer wrong", "x-api-key": "first"}
        assert await status(both) == 200
        raw = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: \xff\r\nConnection: close\r\n\r\n"
        assert b" 401 " in await client.raw(raw)
        bearers = ("Bearer ", "Bearer firs", "Basic first", "first")
        bad_headers = [
            {},
            {"x-api-key": ""},
            {"x-api-key": "FIRST"},
            *({"Authorization": b} for b in bearers),
        ]
        for bad in bad_headers:
            reply = await client.get("/v1/models", headers=bad)
            assert reply.status == 401 and reply.headers["WWW-Authenticate"] == "Bearer"
            assert reply.error["code"] == "invalid_api_key" and reply.error["type"] == "authentication_error"
            assert "first" not in reply.text
        assert await status({}, "/metrics") == 401 and await status({}, "/nope") == 401
        assert await status({}, "/health") == 200


class NotesClients(FakeEngine):
    def submit(self, *args: Any, **kwargs: Any) -> FakeStream:
        self.clients = [*getattr(self, "clients", []), CLIENT.get()]
        return super().submit(*args, **kwargs)


async def test_each_request_is_marked_with_its_own_key() -> None:
    """Caches are kept apart by that. The requests share connections."""
    engine, keys = NotesClients(), ("first", "second")
    async with running(engine, api_keys=keys) as client:
        for i, key in enumerate([*keys, *keys]):
            body = {"prompt": "x", "n": 2, "max_tokens": 1, "temperature": 1, "stream": i > 1}
            reply = await client.request("POST", "/v1/completions", json=body, headers={"x-api-key": key})
            assert reply.status == 200
    first, second = dict.fromkeys(engine.clients)
    assert engine.clients == [first, first, second, second] * 2
    assert not {first, second} & {"", *keys}, "nobody's, or a key that could be read somewhere"
    engine = NotesClients()
    async with running(engine) as client:
        body = {"prompt": "x", "max_tokens": 1}
        await client.request("POST", "/v1/completions", json=body, headers={"x-api-key": "any"})
    assert engine.clients == [""]


async def test_without_keys_any_is_accepted() -> None:
    async with running(FakeEngine()) as client:
        for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer x"}, {"x-api-key": ""}):
            assert (await client.get("/v1/models", headers=headers)).status == 200
