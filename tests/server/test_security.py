"""Host, Origin, API keys and what they may; ids of requests; TLS."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from hetero.commands.serve import base_url, tls_context
from hetero.config import SettingError, load
from hetero.prepare import LaunchError
from hetero.request import CLIENT
from hetero.server.request_id import AddRequestId, OneLine
from hetero.server.security import host_name
from hetero.settings import Settings

from .client import Reply, running
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
        methods = reply.headers["Access-Control-Allow-Methods"].split(", ")
        assert {"GET", "POST", "DELETE"} <= set(methods)  # DELETE forgets a response
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


async def test_a_key_may_have_so_many_requests_at_a_time() -> None:
    engine = FakeEngine()
    engine.token_seconds = 0.02
    async with running(engine, api_keys=("one", "two"), key_requests=2) as client:

        async def ask(key: str, stream: bool = False) -> Reply:
            body = {"prompt": "x", "max_tokens": 20, "stream": stream}
            return await client.request("POST", "/v1/completions", json=body, headers={"x-api-key": key})

        running_now = [asyncio.create_task(ask("one", stream)) for stream in (False, True)]
        while len(engine.running) < 2:
            await asyncio.sleep(0.01)
        refused = await ask("one")
        assert refused.status == 429 and refused.headers["Retry-After"] == "1"
        assert refused.error["type"] == "rate_limit_error" and refused.error["code"] == "rate_limit_exceeded"
        assert (await ask("two")).status == 200
        assert [reply.status for reply in await asyncio.gather(*running_now)] == [200, 200]
        assert (await ask("one")).status == 200


def test_a_line_of_the_log_stays_one_line() -> None:
    formatter = OneLine("%(levelname)s %(name)s: %(message)s")
    record = logging.LogRecord(
        "n", logging.INFO, "", 0, "asked %s", ("a\nERROR n: b\x1b[31m\x9bé\u2028",), None
    )
    assert formatter.format(record) == r"INFO n: asked a\x0aERROR n: b\x1b[31m\x9bé\x2028"
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert formatter.format(record).count("\n") > 2, "a traceback keeps its lines"


async def test_request_ids() -> None:
    async with running(FakeEngine()) as client:
        given = await client.get("/health", headers={"x-request-id": "abc-1.2"})
        assert given.headers["x-request-id"] == "abc-1.2"
        ids = {(await client.get("/v1/models")).headers["x-request-id"] for _ in range(3)}
        ids.add((await client.get("/nothing/here")).headers["x-request-id"])
        ids.add((await client.complete(stream=True)).headers["x-request-id"])
        assert len(ids) == 5 and all(re.fullmatch(r"req-[0-9a-f]{16}", each) for each in ids)
        for unsafe in ("a b", "x" * 200, "é", ""):
            answer = await client.get("/health", headers={"x-request-id": unsafe})
            assert answer.headers["x-request-id"].startswith("req-")


async def test_log_lines_say_which_request_they_are_about(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        def submit(self, *args: Any, **kwargs: Any) -> FakeStream:
            raise KeyError("inside")

    caplog.handler.addFilter(AddRequestId())
    async with running(Broken()) as client:
        body = {"prompt": "a secret"}
        reply = await client.request("POST", "/v1/completions", json=body, headers={"x-request-id": "r-7"})
        assert reply.status == 500 and "inside" not in reply.text
    assert "[r-7] a request failed" in caplog.text and "a secret" not in caplog.text


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    files = {"tls_cert": str(tmp_path / "both.pem"), "tls_key": str(tmp_path / "both.pem")}
    context = tls_context(Settings(**files))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with running(FakeEngine(), tls=context) as client:
        url = f"https://{client.host}:{client.port}/v1/completions"
        body = {"prompt": "x", "stream": True}
        async with client.session.post(url, json=body, ssl=trusting) as answer:
            assert answer.status == 200 and b"[DONE]" in await answer.read()
        assert b"HTTP/1.1 200" not in await client.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert base_url("0.0.0.0", 8443, tls=True) == "https://127.0.0.1:8443"


def test_certificates_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    other, encrypted = tmp_path / "other.pem", tmp_path / "encrypted.pem"
    other.write_text("no certificate")
    encrypted.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIBvTBXBgkqhkiG9w0BBQ0wSjApBgkqhkiG9w0BBQwwHAQI\n"
        "-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for cert, key, said in (
        (tmp_path / "absent.pem", other, "--tls-cert"),
        (other, tmp_path / "absent.pem", "--tls-key"),
        (other, other, "no certificate and key"),
        (other, encrypted, "no certificate and key"),
    ):
        with pytest.raises(LaunchError, match=said):
            tls_context(Settings(tls_cert=str(cert), tls_key=str(key)))
    with pytest.raises(SettingError, match="--tls-cert needs --tls-key"):
        load({"tls_cert": "x"}, {})
    with pytest.raises(SettingError, match="--key-requests: there are no API keys"):
        load({"key_requests": "2"}, {})
