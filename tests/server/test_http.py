"""Bodies, headers and paths of every kind (cases w01 and z03), and the plain routes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import zlib
from typing import Any

import psutil
import pytest

from hetero.server import protocol

from .client import Client, parse_events, running
from .fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"messages": [{"role": "user", "content": "hé"}]}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{:", "line 1"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"null", "object"),
        (b"[]", "object"),
        (b"3", "object"),
        (b"NaN", "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"messages": [{"role": "user", "content": "\xc4\xe3\xba\xc3"}]}', "UTF-8"),
        ('{"a": "é"}'.encode("utf-16"), "UTF-8"),
        (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "surrogate"),
        (rb'{"\udc00": 1}', "surrogate"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested"),
        (b'{"n": ' + b"9" * 10_000_000 + b"}", "digits"),
        (b'{"n": 1} x', "Extra data"),
    ],
)
async def test_bad_json(client: Client, body: bytes, words: str) -> None:
    reply = await client.post(CHAT, body)
    assert reply.status == 400 and words in reply.error["message"], reply.text[:300]
    assert reply.error["code"] == "invalid_json" and reply.error["type"] == "invalid_request_error"
    assert (await client.get("/health")).status == 200


async def test_accepted_bodies(client: Client, engine: FakeEngine) -> None:
    wanted = None
    pair = rb'{"messages": [{"role": "user", "content": "\ud83d\ude38"}]}'
    assert (await client.post(CHAT, pair)).status == 200
    variants: list[tuple[bytes, dict[str, str]]] = [
        (GOOD, {}),
        (GOOD, {"Content-Type": "text/plain"}),
        (GOOD, {"Content-Type": "application/json; charset=latin-1"}),
        (b"\xef\xbb\xbf" + GOOD, {}),
        (gzip.compress(GOOD), {"Content-Encoding": "gzip"}),
        (zlib.compress(GOOD), {"Content-Encoding": "deflate"}),
        (GOOD, {"Expect": "100-continue"}),
        (b'{"messages": 3, ' + GOOD[1:], {}),  # of duplicate keys the last one counts
    ]
    for body, headers in variants:
        reply = await client.post(CHAT, body, headers=headers)
        assert reply.status == 200, (body, headers, reply.text)
        wanted = wanted or engine.submitted[-1][0]
        assert engine.submitted[-1][0] == wanted

    async def pieces() -> Any:
        for byte in GOOD:
            yield bytes([byte])

    async with client.session.post(
        client.base + CHAT, data=pieces()
    ) as response:  # chunked, no Content-Length
        assert response.status == 200


async def test_bodies_that_are_not_what_they_say(client: Client) -> None:
    assert (await client.post(CHAT, GOOD, headers={"Content-Encoding": "gzip"})).status == 400
    assert (
        await client.post(CHAT, gzip.compress(GOOD)[:30], headers={"Content-Encoding": "gzip"})
    ).status == 400
    reply = await client.post(CHAT, GOOD, headers={"Content-Encoding": "zstd, br"})
    assert reply.status == 415 and reply.error
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
    assert b" 400 " in (await client.raw(head + b"Content-Length: 5\r\n\r\n" + GOOD)).partition(b"\r\n")[0]
    for bad in (b"Content-Length: abc\r\n", b"Content-Length: -5\r\n", b"Transfer-Encoding: chunked\r\n"):
        answer = await client.raw(head + bad + b"\r\nzz\r\n\r\n")
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (await client.get("/health")).status == 200


async def test_a_body_that_never_arrives() -> None:
    async with running(FakeEngine(), body_timeout=0.1) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(head.encode() + b"{")
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"request_timeout")
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()


BODIES = {  # of routes in every dialect, and where their error's words are
    CHAT: ("error", "message"),
    "/v1/responses": ("error", "message"),
    "/v1/messages": ("error", "message"),
    "/v1/messages/count_tokens": ("error", "message"),
    "/api/chat": ("error",),
    "/completion": ("error", "message"),
    "/tokenize": ("error", "message"),
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_drips_gets_a_408_and_gives_its_place_back(path: str) -> None:
    async with running(
        FakeEngine(), body_timeout=0.3, body_rate=1000, api_keys=("key",), key_requests=1
    ) as client:
        headers = "Host: localhost\r\nx-api-key: key\r\nContent-Length: 5000\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(f"POST {path} HTTP/1.1\r\n{headers}{{".encode())
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        async with asyncio.timeout(10):
            while not answer.done():  # each pause is far shorter than the timeout
                writer.write(b" ")
                await asyncio.sleep(0.02)
        head = (await answer).decode()
        assert head.startswith("HTTP/1.1 408 "), head
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        words: Any = json.loads(await reader.readexactly(length))
        writer.close()
        for name in BODIES[path]:
            words = words[name]
        assert "1000 bytes a second" in words
        free = await client.post(CHAT, GOOD, headers={"x-api-key": "key"})
        assert free.status == 200, free.text


async def test_a_large_body_may_take_long() -> None:
    """Far longer than the timeout, at twice the least rate."""
    async with running(FakeEngine(), body_timeout=0.3, body_rate=20_000) as client:
        began = asyncio.get_running_loop().time()

        async def slowly() -> Any:
            sent = 0
            while sent < 40_000:
                await asyncio.sleep(0.01)
                due = min(40_000, int(40_000 * (asyncio.get_running_loop().time() - began)))
                yield b" " * (due - sent)
                sent = due
            yield GOOD

        async with client.session.post(client.base + CHAT, data=slowly()) as response:
            assert response.status == 200, await response.text()
        assert asyncio.get_running_loop().time() - began > 0.9


async def big_answer(client: Client, window: int) -> socket.socket:
    """A connection that has asked for 6 MB of token ids, and reads nothing by itself."""
    sock, loop = socket.socket(), asyncio.get_running_loop()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.setblocking(False)
    await loop.sock_connect(sock, (client.host, client.port))
    body = json.dumps({"content": "x" * 1_500_000}).encode()
    head = f"Host: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    await loop.sock_sendall(sock, f"POST /tokenize HTTP/1.1\r\n{head}".encode() + body)
    return sock


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_does_not_read_its_answer_is_hung_up_on(reads: bool) -> None:
    async with running(FakeEngine(), write_timeout=0.6) as client:
        sock = await big_answer(client, 1 << 18 if reads else 4096)
        loop, size = asyncio.get_running_loop(), 0
        await asyncio.sleep(0 if reads else 2.0)
        began = loop.time()
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(sock, 1 << 16 if reads else 1 << 20):
                size += len(piece)
                await asyncio.sleep(0.016 if reads else 0)
        sock.close()
        if reads:  # slowly, but all the time
            assert size > 6_000_000 and loop.time() - began > 1.3
        else:
            assert size < 5_500_000, "the rest should not have been sent"


async def test_headers_that_never_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT", 0.1)
    async with running(FakeEngine()) as client:
        assert await client.raw(b"GET /health HTTP/1.1\r\nHost: local", timeout=3) == b""


async def test_large_bodies_cost_no_memory() -> None:
    async with running(FakeEngine(), max_body_bytes=1 << 20) as client:
        before = psutil.Process().memory_info().rss
        reply = await client.post(CHAT, b" " * (1 << 20) + GOOD)
        assert reply.status == 413 and reply.error["code"] == "request_too_large"
        bomb = gzip.compress(b" " * (200 << 20), 9)
        reply = await client.post(CHAT, bomb, headers={"Content-Encoding": "gzip"})
        assert reply.status == 413 and reply.error
        grown = psutil.Process().memory_info().rss - before
        assert grown < (50 << 20) + (200 << 20) // 4  # the bomb itself is made in this process

        sent = 0

        async def endless() -> Any:
            nonlocal sent
            while sent < 200:
                sent += 1
                yield b" " * (1 << 20)

        try:
            async with client.session.post(client.base + CHAT, data=endless()) as response:
                assert response.status == 413
        except OSError:
            pass  # the server may hang up while the client still sends
        assert 1 < sent < 100, "it was read to its end"
        assert (await client.get("/health")).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 65536 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        + b"".join(b"A%d: x\r\n" % i for i in range(10_000))
        + b"\r\n",
    ],
)
async def test_header_limits(client: Client, head: bytes) -> None:
    answer = await client.raw(head)
    status, _, body = answer.partition(b"\r\n\r\n")
    assert (
        b" 431 " in status.partition(b"\r\n")[0] and json.loads(body)["error"]["code"] == "headers_too_large"
    )
    assert (await client.get("/health")).status == 200


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"NOT HTTP\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"]
)
async def test_noise(client: Client, noise: bytes) -> None:
    answer = await client.raw(noise, timeout=2)
    assert b" 400 " in answer.partition(b"\r\n")[0]
    json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("OPTIONS", CHAT, 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/../x", 404),
        ("GET", "/v1/models/..%5Cx", 404),
        ("GET", "/v1/models//etc/passwd", 404),
        ("GET", "/v1/models/%2e%2e/x", 404),
        ("GET", "/v1/models/x%00.bin", 404),
        ("GET", "/v1/models/%ff", 404),
        ("GET", "/v1/models/" + "x" * 300, 404),
    ],
)
async def test_paths_and_methods(client: Client, method: str, path: str, status: int) -> None:
    """Case z03: no name in a path becomes a file, no answer carries one."""
    answer = await client.raw(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
    assert json.loads(body)["error"]["message"] and b"/root" not in body and b"passwd" not in body
    if status == 405:
        assert b"\r\nAllow: " in head


async def test_models(client: Client) -> None:
    body = (await client.get("/v1/models")).json
    (entry,) = body["data"]
    assert body["object"] == "list" and entry["id"] == "fake-model" and entry["meta"]["n_ctx"] == 512
    assert body["models"][0]["name"] == "fake-model"
    assert (await client.get("/v1/models/fake-model")).json == entry
    assert (await client.get("/v1/models/other")).error["code"] == "model_not_found"


async def test_health(client: Client, engine: FakeEngine) -> None:
    assert (await client.get("/health")).json == {"status": "ok"}
    assert (await client.request("HEAD", "/health")).status == 200
    engine.healthy = (False, "the engine's thread died")
    reply = await client.get("/health")
    assert reply.status == 503 and reply.json["reason"] == "the engine's thread died"
    assert (await client.request("HEAD", "/health")).status == 503
    reply = await client.chat()
    assert reply.status == 503 and reply.error["type"] == "server_error"


async def test_a_lost_device(client: Client, engine: FakeEngine) -> None:
    engine.device_lost = "device CUDA0 was lost: its process ended"
    engine.healthy = (False, engine.device_lost)
    reply = await client.get("/health")
    assert reply.status == 503 and reply.json["reason"] == engine.device_lost
    reply = await client.chat()
    assert reply.status == 503 and reply.headers["Retry-After"] == "5"
    assert reply.error["code"] == "device_unavailable" and reply.error["message"] == engine.device_lost
    engine.device_lost, engine.healthy = None, (True, "")
    assert (await client.chat()).status == 200


async def test_metrics(client: Client, engine: FakeEngine) -> None:
    await client.chat()
    await client.get("/nope")
    reply = await client.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    lines = reply.text.splitlines()
    for line in (
        "hetero_requests_running 0.0",
        'hetero_kv_blocks{group="0"} 32.0',
        'hetero_kv_blocks_free{group="0"} 30.0',
        "hetero_cached_tokens_total 3.0",
        'hetero_kv_prompt_tokens_total{source="host"} 1.0',
        'hetero_kv_moved_bytes_total{to="device"} 100.0',
        'hetero_kv_evictions_total{tier="device"} 4.0',
        'hetero_kv_host_slots_free{group="1"} 0.0',
        'hetero_requests_finished_total{reason="stop"} 2.0',
        "hetero_host_fraction 0.25",
        'hetero_stage_busy_seconds_total{stage="0"} 2.0',
        'hetero_stage_restarts_total{stage="0"} 3.0',
        'hetero_stage_busy_fraction{stage="0"} 1.0',
        'hetero_stage_attended_total{stage="0",way="in place"} 6.0',
        'hetero_stage_recomputed_tokens_total{stage="0"} 3.0',
        'hetero_time_to_first_token_seconds_bucket{le="1.0"} 3.0',
        "hetero_disk_cache_entries 4.0",
        "hetero_disk_cache_damaged_total 2.0",
        "hetero_time_to_first_token_seconds_count 6.0",
        "hetero_time_to_first_token_seconds_sum 7.5",
        'hetero_http_answers_total{route="/v1/chat/completions",status="200"} 1.0',
        'hetero_http_answers_total{route="other",status="404"} 1.0',
    ):
        assert line in lines, line
    assert (await client.get("/metrics")).status == 200, "a second scrape"


async def test_an_unexpected_error_is_a_500_without_details(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("/home/somebody/secret")

    monkeypatch.setattr(engine, "chat", broken)
    reply = await client.chat()
    assert reply.status == 500 and "secret" not in reply.text and reply.error["type"] == "server_error"


async def test_two_requests_on_one_connection(client: Client) -> None:
    one = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD
    answer = await client.raw(one + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_many_at_once(client: Client, engine: FakeEngine) -> None:
    engine.token_seconds = 0.001
    replies = await asyncio.gather(*(client.chat(stream=i % 2 == 0, max_tokens=9 + i) for i in range(20)))
    for i, reply in enumerate(replies):
        assert reply.status == 200
        if i % 2 == 0:
            chunks = parse_events(reply.text)[:-1]
            assert len({c["id"] for c in chunks}) == 1
    assert len({r.json["id"] for r in replies[1::2]}) == 10
