"""Reported cases of malformed HTTP and of names that try to become paths, against a real server."""

from __future__ import annotations

import asyncio
import getpass
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from .client import Reply
from .real import ROOT, RealClient, refusal_of

CHAT = "/v1/chat/completions"
GOOD = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
BODY_LIMIT = 32 << 20  # the default of --max-body


def with_content(content: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + content + b'"}], "max_tokens": 1}'


BAD_BODIES: dict[str, bytes] = {
    "cut": b"{:",
    "empty": b"",
    "null": b"null",
    "array": b"[]",
    "number": b"3",
    "nan": b"NaN",
    "nan inside": GOOD[:-1] + b', "temperature": NaN}',
    "gbk": with_content("你好".encode("gbk")),
    "lone surrogate": with_content(rb"\ud800"),
    "brackets": b"[" * 100_000,
    "long number": GOOD[:-1] + b', "seed": ' + b"1" * (10 << 20) + b"}",
    "deep objects": GOOD[:-1] + b', "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
}


def assert_error(reply: Reply, status: int) -> None:
    assert reply.status == status, reply.text[:500]
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.error["type"] and len(reply.text.encode()) < 2000


async def test_w01_bad_bodies(smollm2: RealClient) -> None:
    before = smollm2.server.memory
    for name, body in BAD_BODIES.items():
        for path in (CHAT, "/v1/completions"):
            assert_error(await smollm2.post(path, body), 400)
        assert smollm2.server.memory - before < BODY_LIMIT + (50 << 20), name
        await smollm2.check_alive()


async def test_w01_unusual_but_good(smollm2: RealClient) -> None:
    for body in (b"\xef\xbb\xbf" + GOOD, GOOD[:-1] + b', "max_tokens": 1}'):  # a BOM; a duplicate key
        assert (await smollm2.post(CHAT, body)).status == 200
    for headers, body in (
        ({"Content-Type": "text/plain"}, GOOD),
        ({"Content-Type": ""}, GOOD),
        ({"Content-Encoding": "gzip"}, gzip.compress(GOOD)),
        ({"Expect": "100-continue"}, GOOD),
    ):
        assert (await smollm2.post(CHAT, body, headers=headers)).status == 200, headers
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    no_type = await smollm2.raw(head + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
    assert no_type.startswith(b"HTTP/1.1 200")
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    assert (await smollm2.raw(head + chunked)).startswith(b"HTTP/1.1 200")


async def test_w01_lengths_that_lie(smollm2: RealClient) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    too_small = await smollm2.raw(head + b"Content-Length: 10\r\n\r\n" + GOOD)
    assert too_small.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert json.loads(too_small.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
    _, writer = await asyncio.open_connection(smollm2.host, smollm2.port)
    writer.write(head + b"Content-Length: 900\r\n\r\n" + GOOD)  # too large: it waits for the rest
    await writer.drain()
    await smollm2.check_alive()  # which holds up nobody
    writer.close()
    both = head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    lengths = [head + b"Content-Length: " + length + b"\r\n\r\n" for length in (b"-1", b"x", b"5, 6")]
    for bad in (both, *lengths, b"\0\1\r\n\r\n"):
        assert (await smollm2.raw(bad)).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400")), bad
    await smollm2.check_alive()


async def test_w01_sizes(smollm2: RealClient) -> None:
    before, most = smollm2.server.memory, 0
    request = asyncio.create_task(smollm2.post(CHAT, with_content(b"x" * (200 << 20))))
    while not request.done():
        most = max(most, smollm2.server.memory)
        await asyncio.sleep(0.005)
    assert_error(await request, 413)
    assert_error(
        await smollm2.post(CHAT, gzip.compress(b" " * (200 << 20), 9), headers={"Content-Encoding": "gzip"}),
        413,
    )
    assert max(most, smollm2.server.memory) - before < BODY_LIMIT + (50 << 20)
    assert_error(await smollm2.get("/health", headers={"X-Long": "x" * 65_536}), 431)
    many = "".join(f"X-{i}: 1\r\n" for i in range(10_000))
    answer = await smollm2.raw(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n".encode())
    assert answer.startswith((b"HTTP/1.0 431", b"HTTP/1.1 431"))
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "headers_too_large"
    await smollm2.check_alive()


async def test_w01_routes(smollm2: RealClient) -> None:
    for path in (CHAT, "/v1/completions"):
        assert_error(await smollm2.get(path), 405)
    assert_error(await smollm2.post("/health", b"{}"), 405)
    assert_error(await smollm2.get("/v1/nothing"), 404)
    head = await smollm2.request("HEAD", "/health")
    assert (head.status, head.text) == (200, "")
    metrics = await smollm2.metrics()
    assert not [k for k in metrics if k.startswith("hetero_http_answers") and 'status="5' in k]
    assert "Traceback" not in smollm2.server.log


NAMES = [
    "../x", "..\\x", "/etc/passwd", "a/../../x", "%2e%2e/x", "x\0.bin", "", ".", "CON", "n" * 300, "ok.bin",
    "../../etc/passwd", "..", "~", "file:///etc/passwd",
]  # fmt: skip


def assert_no_secrets(reply: Reply, *paths: Path) -> None:
    bad = [str(Path.cwd()), str(Path.home()) + "/", "site-packages", "root:x:", *map(str, paths)]
    if getpass.getuser() != "root":
        bad.append(getpass.getuser())
    assert [b for b in bad if b in reply.text] == []


async def test_z03_names_in_requests_are_no_paths(smollm2: RealClient, smollm2_path: Path) -> None:
    """The server keeps no files for requests: whatever a name says, nothing is opened, read or made."""
    process_files = Path(f"/proc/{smollm2.server.process.pid}/fd")
    before = {*ROOT.iterdir(), *ROOT.parent.iterdir()}
    for name in NAMES:
        fields: list[dict[str, Any]] = [
            {"model": name},
            {"chat_template": name},
            {"lora": [name]},
            {"adapter": name, "slot": name, "filename": name, "cache_path": name},
            {"chat_template_kwargs": {"template": name}},
            {"response_format": {"type": name}},
        ]
        for more in fields:
            reply = await smollm2.chat(max_tokens=1, **more)
            assert reply.status in (200, 400), (more, reply.text)
            assert_no_secrets(reply, smollm2_path, smollm2_path.parent)
        quoted = name.replace("%", "%25").replace("\0", "%00").replace("\\", "%5C")
        for path in (f"/v1/models/{quoted}", f"/v1/models/{quoted.replace('/', '%2F')}"):
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            raw = await smollm2.raw(head.encode())
            assert raw.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), raw[:200]
            assert b"root:" not in raw and str(smollm2_path.parent).encode() not in raw
    if process_files.exists():
        opened = {str(f.readlink()) for f in process_files.iterdir() if f.is_symlink()}
        assert not any("passwd" in f or f.endswith(("/x", "ok.bin")) for f in opened)
    made = {*ROOT.iterdir(), *ROOT.parent.iterdir()} - before
    assert not {p.name for p in made} & {Path(name).name for name in NAMES}
    await smollm2.check_alive()


@pytest.mark.skipif(os.name != "posix", reason="symlinks need a privilege elsewhere")
def test_z03_a_name_on_the_command_line_never_leaves_the_model_folder(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    (folder / "a").mkdir(parents=True)
    (folder / "ok.bin").symlink_to(smollm2_path)
    (folder / "ok.gguf").symlink_to(smollm2_path)
    (folder / "linked").symlink_to(smollm2_path.parent)
    monkeypatch.setenv("HETERO_MODELS", str(folder))
    before = sorted(tmp_path.rglob("*"))
    for name in (*(n for n in NAMES if n and "\0" not in n), "ok", "ok.gguf", "linked", "a/../ok.gguf"):
        line, _ = refusal_of("serve", name)
        assert "root:x:" not in line, name
    assert sorted(tmp_path.rglob("*")) == before
