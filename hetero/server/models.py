"""/v1/models: the one model, as every dialect's clients look for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hetero.server.context import Context
from hetero.server.errors import ApiError, json_response
from hetero.server.ollama.models import details, timestamp


def model_list(context: Context, for_codex: bool = False) -> dict[str, Any]:
    """OpenAI's and Anthropic's list, and `models` as llama-server has it.

    Codex reads entries of another form from `models`, each with a prompt for its agent. There is none to give
    it: an empty list leaves it the one that it has for models it does not know.
    """
    entry, info = model_entry(context), context.engine.info
    also = {
        "name": info.name,
        "model": info.name,
        "capabilities": list(context.engine.text.capabilities),
        "details": details(info),
    }
    ends = {"first_id": info.name, "last_id": info.name, "has_more": False}
    return {"object": "list", "data": [entry], **ends, "models": [] if for_codex else [also]}


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


async def all_models(request: web.Request, context: Context) -> web.Response:
    return json_response(model_list(context, for_codex="client_version" in request.query))


async def one_model(request: web.Request, context: Context) -> web.Response:
    """ApiError 404 for any but the one that is served."""
    if request.match_info["id"] != context.engine.info.name:
        raise ApiError(404, "no model of this name is served here", param="model", code="model_not_found")
    return json_response(model_entry(context))
