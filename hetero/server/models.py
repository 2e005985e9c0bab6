"""/v1/models: the one model, as every dialect's clients look for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hetero.server.context import Context
from hetero.server.errors import ApiError, json_response
from hetero.server.ollama.models import details, timestamp


def model_list(context: Context) -> dict[str, Any]:
    """OpenAI's and Anthropic's list, and `models` as llama-server and Codex have it."""
    entry, info = model_entry(context), context.engine.info
    also = {
        "name": info.name,
        "model": info.name,
        "capabilities": list(context.engine.text.capabilities),
        "details": details(info),
    }
    ends = {"first_id": info.name, "last_id": info.name, "has_more": False}
    return {"object": "list", "data": [entry], **ends, "models": [also]}


def model_entry(context: Context) -> dict[str, Any]:
    info = context.engine.info
    meta = {
        "n_ctx": info.n_ctx, "n_vocab": info.n_vocab, "n_params": info.n_params, "size": info.size_bytes,
    }  # fmt: skip
    return {
        "id": info.name,
        "object": "model",
        "type": "model",
        "created": info.created,
        "created_at": timestamp(info.created),
        "display_name": info.name,
        "owned_by": "hetero",
        "max_input_tokens": info.n_ctx,
        "meta": meta,
    }


async def one_model(request: web.Request, context: Context) -> web.Response:
    """ApiError 404 for any but the one that is served."""
    if request.match_info["id"] != context.engine.info.name:
        raise ApiError(404, "no model of this name is served here", param="model", code="model_not_found")
    return json_response(model_entry(context))
