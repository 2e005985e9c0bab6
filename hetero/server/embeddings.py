"""Embeddings of texts in three dialects: OpenAI's, Ollama's and llama-server's.

All come normalised to length 1, from all of each input: what does not fit is a 400. No vector is shortened,
since the model was not made for it: `dimensions` may only be what the model has.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from hetero.sampling.params import SamplingParams
from hetero.server.context import Context
from hetero.server.conversation import new_id, submit
from hetero.server.errors import ApiError, bad_field, encode
from hetero.server.openai import priority
from hetero.server.validate import Fields, as_integer, wrong_type

MAX_INPUTS = 2048  # as OpenAI has it
WANTED = "a string, an array of strings, token ids, or arrays of token ids"
EUCLIDEAN = 2  # llama-server's `embd_normalize`


@dataclass(slots=True)
class Embedded:
    """A vector for each input, and the tokens of all."""

    vectors: list[list[float]]
    tokens: int


async def openai(body: dict[str, Any], context: Context) -> web.Response:
    """/v1/embeddings. Raises ApiError or RequestError."""
    fields = _begin(body, context)
    form = fields.string("encoding_format")
    if form not in (None, "float", "base64"):
        raise bad_field("encoding_format", 'must be "float" or "base64"')
    found = await _embed(await _inputs(body.get("input"), "input", context), "input", fields, context)
    write = (lambda vector: encode(_base64(vector))) if form == "base64" else encode
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    end = f'],"model":{encode(context.engine.info.name)},"usage":{encode(usage)}}}'
    return await _response(
        '{"object":"list","data":[',
        found,
        lambda i, vector: f'{{"object":"embedding","index":{i},"embedding":{write(vector)}}}',
        end,
    )


async def ollama(body: dict[str, Any], context: Context) -> web.Response:
    """/api/embed. Without an input: none, the model is loaded. Inputs that are too long are cut only where
    `truncate` asks for that. Raises ApiError or RequestError."""
    fields, start = _begin(body, context), time.perf_counter_ns()
    given, found = body.get("input"), Embedded([], 0)
    truncate = fields.boolean("truncate")
    if given not in (None, [], ""):
        prompts = await _inputs(given, "input", context)
        if truncate:
            prompts = [prompt[: context.engine.info.n_ctx - 1] for prompt in prompts]
        found = await _embed(prompts, "input", fields, context)
    rest = {
        "total_duration": time.perf_counter_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }
    begin = f'{{"model":{encode(context.engine.info.name)},"embeddings":['
    return await _response(begin, found, lambda i, vector: encode(vector), f"],{encode(rest)[1:]}")


async def ollama_one(body: dict[str, Any], context: Context) -> dict[str, Any]:
    """/api/embeddings: Ollama's older form, of one text. Raises ApiError or RequestError."""
    fields = _begin(body, context)
    prompt = fields.string("prompt")
    if not prompt:
        return {"embedding": []}
    found = await _embed(await _inputs(prompt, "prompt", context), "prompt", fields, context)
    return {"embedding": found.vectors[0]}


async def llamacpp(body: dict[str, Any], context: Context) -> web.Response:
    """/embedding and /embeddings: `content` or `input`. Raises ApiError or RequestError."""
    fields = _begin(body, context)
    if fields.integer("embd_normalize") not in (None, EUCLIDEAN):
        raise bad_field("embd_normalize", f"only {EUCLIDEAN}, the Euclidean norm, is supported")
    name = "content" if fields.has("content") else "input"
    found = await _embed(await _inputs(body.get(name), name, context), name, fields, context)
    return await _response(
        "[", found, lambda i, vector: f'{{"index":{i},"embedding":[{encode(vector)}]}}', "]"
    )


def _begin(body: dict[str, Any], context: Context) -> Fields:
    """Whatever the dialect, 400 before any work where it cannot be done."""
    fields, info = Fields(body), context.engine.info
    fields.string("model")  # any name is served by the one model
    priority(fields, context)  # wrong ones are refused even where there is nothing to compute
    if info.pooling is None:
        raise ApiError(
            400,
            f"the model {info.name} gives no embeddings: it runs through libllama here, or ranks texts",
            param="model",
            code="unsupported_model",
        )
    dimensions = fields.integer("dimensions", low=1)
    if dimensions not in (None, info.n_embd):
        raise bad_field(
            "dimensions", f"this model's embeddings have {info.n_embd} and are not shortened", "unsupported"
        )
    return fields


async def _inputs(given: Any, name: str, context: Context) -> list[list[int]]:
    """Token ids of each input."""
    if given is None:
        raise bad_field(name, "is missing")
    if isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], str | list)):
        given = [given]
    if not isinstance(given, list):
        raise wrong_type(name, WANTED, given)
    if not 1 <= len(given) <= MAX_INPUTS:
        raise bad_field(name, f"must have 1 to {MAX_INPUTS} inputs, not {len(given)}")
    prompts: list[list[int]] = []
    for i, item in enumerate(given):
        if isinstance(item, str):
            ids = await context.engine.text.tokenize(item, parse_special=False)
        elif isinstance(item, list):
            ids = [as_integer(name, token) for token in item]
            if wrong := [i for i in ids if not 0 <= i < context.engine.info.n_vocab]:
                raise bad_field(name, f"token id {wrong[0]} is outside the vocabulary")
        else:
            raise wrong_type(name, WANTED, item)
        if not ids:
            raise bad_field(name, f"input {i} is empty")
        prompts.append(ids)
    return prompts


async def _embed(prompts: list[list[int]], name: str, fields: Fields, context: Context) -> Embedded:
    generation = submit(
        context,
        prompts,
        SamplingParams(max_tokens=1),
        1,
        request_id=new_id("embd-"),
        prompt_field=name,
        embeds=True,
        priority=priority(fields, context),
    )
    found = Embedded([[] for _ in prompts], sum(map(len, prompts)))
    async with generation:
        async for piece in generation.pieces():
            if piece is not None and piece.delta.embedding is not None:
                found.vectors[piece.index] = piece.delta.embedding
    return found


async def _response(
    begin: str, found: Embedded, write: Callable[[int, list[float]], str], end: str
) -> web.Response:
    """Written vector by vector, with others' turns in between: thousands of them take a second."""
    pieces = [piece async for piece in _pieces(found, write)]
    return web.Response(text=f"{begin}{','.join(pieces)}{end}", content_type="application/json")


async def _pieces(found: Embedded, write: Callable[[int, list[float]], str]) -> AsyncIterator[str]:
    for i, vector in enumerate(found.vectors):
        yield write(i, vector)
        await asyncio.sleep(0)


def _base64(vector: list[float]) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
