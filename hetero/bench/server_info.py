"""What a server says about itself, for the record: what answered, with which model and settings."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from hetero import __version__
from hetero.bench.client import CHAT, COMPLETIONS, Target
from hetero.files import file_name

ASK_SECONDS = 15.0


class ServerError(Exception):
    """A server that cannot be measured: one line."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`about` is JSON for the record: "model" as /v1/models has it; "props", of servers like llama-server;
    "version", of those like vLLM; "status" of ours: the model's digest, the devices, what is on them, the
    settings. `n_ctx` is None where it is not told."""

    target: Target
    n_ctx: int | None
    about: dict[str, Any]


async def find_out(
    url: str,
    name: str,
    model: str | None,
    api_key: str | None,
    endpoint: str | None,
    ignore_eos: bool,
    temperature: float,
) -> ServerInfo:
    """Ask a server what it serves, and whether it chats. Raises ServerError.

    `endpoint`: chat or completions; None: chat where the model has a chat template, as far as is told.
    """
    base = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ServerError(f"{url} is not a URL such as http://127.0.0.1:8080")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        models = await _get(session, f"{base}/v1/models")
        if models is None:
            raise ServerError(f"{base}/v1/models: no answer; is the server running?")
        props = await _get(session, f"{base}/props") or {}
        status = await _get(session, f"{base}/status") or {}
        version = await _get(session, f"{base}/version") or {}
    entries = [m for m in models.get("data") or () if isinstance(m, dict) and isinstance(m.get("id"), str)]
    names = [entry["id"] for entry in entries]
    if model is None:
        if not names:
            raise ServerError(f"{base}/v1/models names no model; --model says which one to ask for")
        model = names[0]
    entry = next((e for e in entries if e["id"] == model), {})
    n_ctx = (entry.get("meta") or {}).get("n_ctx") or entry.get("max_model_len")
    if endpoint is None:
        endpoint = "completions" if _cannot_chat(models, props) else "chat"
    path = CHAT if endpoint == "chat" else COMPLETIONS
    target = Target(name, base, model, path, api_key, ignore_eos, temperature)
    about = {"model": entry, "props": _few(props), "status": _lasting(status), "version": _few(version)}
    return ServerInfo(
        target, n_ctx if isinstance(n_ctx, int) else None, {k: v for k, v in about.items() if v}
    )


def _cannot_chat(models: dict[str, Any], props: dict[str, Any]) -> bool:
    return "chat_template" in props and not props["chat_template"]


def _lasting(status: dict[str, Any]) -> dict[str, Any]:
    """Of a status what does not change from one moment to the next."""
    return {name: status[name] for name in ("model", "about", "placements", "notes") if name in status}


def describe(info: ServerInfo) -> str | None:
    """One line for people on what was measured; None where the server does not tell."""
    status = info.about.get("status", {})
    model, about = status.get("model"), status.get("about")
    if not model or not about:
        return None
    placed = "; ".join(f"{p['what']} on {p['device']}" for p in status.get("placements", ()))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{info.target.name}: {model['name']} ({model['architecture']}, {model['quantization']}, digest "
        f"{about['model_digest']}); {placed}; {versions}"
    )


def _few(props: dict[str, Any]) -> dict[str, Any]:
    """Without what is long and says nothing about speed, and without the folder that the model is in."""
    few = {k: v for k, v in props.items() if not isinstance(v, str) or len(v) < 300}
    if isinstance(path := few.get("model_path"), str):
        few["model_path"] = file_name(path)
    return few


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object at `url`, None when there is none. Raises ServerError where a key is wanted."""
    try:
        async with session.get(url) as answer:
            if answer.status in (401, 403):
                raise ServerError(f"{url}: HTTP {answer.status}; --api-key sets the key to send")
            if answer.status != 200:
                return None
            found = await answer.json(content_type=None)
            return found if isinstance(found, dict) else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def this_machine() -> dict[str, Any]:
    """What the benchmark ran on: no names of users or machines."""
    return {
        "hetero": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
