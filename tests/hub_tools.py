"""A Hugging Face hub on this machine: lists repositories and sends their files, as badly as a test wants."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """`repos` maps owner/repo to its files by path. What was asked of the hub is in `requests`."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.cut_after: int | None = None  # bytes of a file after which the connection is closed
        self.damaged = False  # one byte of each file is another
        self.ranges = True  # a request for a part of a file gets it
        self.error: tuple[int, str] | None = None  # status and X-Error-Code of every answer
        self.url = ""

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = [
            {
                "rfilename": path,
                "size": len(data),
                "blobId": "0" * 40,
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130},
            }
            for path, data in self.repos[repo].items()
        ]
        return {"id": repo, "modelId": repo, "sha": "a" * 40, "private": False, "siblings": siblings}

    @property
    def downloads(self) -> list[tuple[str, str | None]]:
        """(file name, Range) of each request for a file."""
        return [(path.rpartition("/")[2], span) for path, span in self.requests if "/resolve/" in path]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((path, self.headers.get("Range")))
            if hub.error is not None:
                self.send_response(hub.error[0])
                self.send_header("X-Error-Code", hub.error[1])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if path.startswith("/api/models/"):
                self.send(json.dumps(hub.listing(path.removeprefix("/api/models/"))).encode())
                return
            repo, _, file = path.removeprefix("/").partition("/resolve/main/")
            self.send_file(hub.repos[repo][file])

        def send_file(self, data: bytes) -> None:
            if hub.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            span, start = self.headers.get("Range"), 0
            if span is not None and hub.ranges:
                start = int(span.removeprefix("bytes=").partition("-")[0])
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            self.wfile.write(data[start : None if hub.cut_after is None else start + hub.cut_after])

        def send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
