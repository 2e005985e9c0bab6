"""What Ollama's clients ask about models: version, tags, show, ps."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hetero.server.context import Context
from hetero.server.errors import ApiError, bad_field
from hetero.server.validate import Fields

if TYPE_CHECKING:
    from hetero.async_engine import ModelInfo

# The version of Ollama whose API this is, the first with /v1/messages. VS Code wants 0.6.4, Codex 0.13.4.
VERSION = "0.14.0"
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded


def version(context: Context) -> dict[str, Any]:
    return {"version": VERSION}


def tags(context: Context) -> dict[str, Any]:
    return {"models": [_entry(context.engine.info)]}


def ps(context: Context) -> dict[str, Any]:
    info = context.engine.info
    return {"models": [{**_entry(info), "expires_at": NEVER, "context_length": info.n_ctx}]}


async def show(body: dict[str, Any], context: Context) -> dict[str, Any]:
    """What is known of a model; ApiError 404 for any but the one that is served."""
    fields, info = Fields(body), context.engine.info
    name = fields.string("model") or fields.string("name")
    if not name:
        raise bad_field("model", "is missing")
    if name not in (info.name, f"{info.name}:latest"):
        raise ApiError(404, f"model '{name[:100]}' not found", param="model", code="model_not_found")
    arch, able = info.architecture, context.engine.text.capabilities
    template = context.engine.text.template_source
    if "insert" in able:  # Continue looks into the template for whether `suffix` may be sent
        template += "{# .Suffix #}"
    return {
        "license": "",
        "modelfile": f"FROM {info.name}",
        "parameters": "",
        "template": template,
        "details": details(info),
        "model_info": {
            "general.architecture": arch,
            "general.basename": info.name,
            "general.parameter_count": info.n_params,
            f"{arch}.context_length": info.n_ctx,
            f"{arch}.vocab_size": info.n_vocab,
        },
        "capabilities": list(able),
        "modified_at": timestamp(info.created),
    }


def details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _count(info.n_params),
        "quantization_level": info.quantization,
    }


def timestamp(seconds: float) -> str:
    """Unix seconds in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _entry(info: ModelInfo) -> dict[str, Any]:
    # Clients want a digest to tell versions apart; that of the file would cost reading all of it.
    digest = hashlib.sha256(repr((info.name, info.size_bytes, info.created)).encode()).hexdigest()
    return {
        "name": info.name,
        "model": info.name,
        "modified_at": timestamp(info.created),
        "size": info.size_bytes,
        "digest": digest,
        "details": details(info),
    }


def _count(number: int) -> str:
    """134515008 as "134.5M", as Ollama shows numbers of parameters."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)
