"""The page at /: what runs where, what goes on, and a box to try the model. One file."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from aiohttp import web

from hetero.server.context import Context

BLOCK_TOKENS = 16


def _hashes(page: str, name: str) -> str:
    """What a Content-Security-Policy calls the page's own elements of a kind."""
    texts = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class Page:
    """The page, read once, with headers that let nothing but its own script run."""

    def __init__(self) -> None:
        self._text = files("hetero.server.page").joinpath("index.html").read_text(encoding="utf-8")
        policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; "
            f"script-src {_hashes(self._text, 'script')}; style-src {_hashes(self._text, 'style')}; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(text=self._text, content_type="text/html", charset="utf-8", headers=self._headers)


def status(context: Context) -> dict[str, Any]:
    """What the page shows, and what a benchmark's record has of us.

    Totals are since the start, `clock` is in seconds; the page takes differences.
    """
    engine = context.engine
    info, stats = engine.info, engine.stats()
    ok, reason = (False, "the server is stopping") if context.active.draining else engine.health()
    guesses = stats.speculation
    return {
        "ok": ok,
        "reason": reason,
        "model": {
            "name": info.name,
            "architecture": info.architecture,
            "quantization": info.quantization,
            "size_bytes": info.size_bytes,
            "n_ctx": info.n_ctx,
        },
        "about": None if info.about is None else asdict(info.about),
        "placements": [asdict(placement) for placement in info.placements],
        "notes": list(info.notes),
        "now": {
            "clock": time.monotonic(),
            "running": stats.running,
            "waiting": stats.waiting,
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated_tokens,
            "busy_seconds": [stage.busy_seconds for stage in stats.stages],
            "tokens_from": stats.tokens_from,
            "drafted": 0 if guesses is None else sum(guesses.drafted.values()),
            "accepted": 0 if guesses is None else sum(map(sum, guesses.accepted.values())),
        },
        "tiers": _tiers(stats),
    }


def _tiers(stats: Any) -> list[dict[str, Any]]:
    """Where contexts are: blocks in use or kept, of all there are. Of several KV groups the fullest one."""
    tiers = []
    for name, pools in (("on the devices", stats.kv_blocks), ("in host memory", stats.host_slots)):
        used = [(total - free, total) for total, free in pools if total]
        if used:
            taken, total = max(used, key=lambda pool: pool[0] / pool[1])
            text = f"{taken * BLOCK_TOKENS:,} of {total * BLOCK_TOKENS:,} tokens in use"
            tiers.append({"name": name, "used": taken, "total": total, "text": text})
    if stats.disk is not None:
        text = f"{stats.disk.entries * BLOCK_TOKENS:,} tokens, {stats.disk.bytes / 2**20:,.0f} MiB"
        tiers.append({"name": "on the disk", "used": 0, "total": 0, "text": text})
    return tiers
