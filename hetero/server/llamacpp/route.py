"""/completion, /infill, /tokenize, /detokenize, /apply-template, /props, /slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero import __version__
from hetero.server.context import Context
from hetero.server.conversation import new_id, submit
from hetero.server.errors import bad_field
from hetero.server.llamacpp import read
from hetero.server.llamacpp.ending import EndingGeneration
from hetero.server.llamacpp.writer import LlamaWriter, settings_dict
from hetero.server.messages import read_messages
from hetero.server.respond import Answer
from hetero.server.validate import Fields, as_integer


async def completion(body: dict[str, Any], context: Context) -> Answer:
    """Validate and start. Raises ApiError or RequestError."""
    fields = Fields(body)
    prompts, as_list = read.read_prompts(fields, context)
    asked = read.read(fields, context)
    return await _start(fields, asked, [await read.encode(p, context) for p in prompts], as_list, context)


async def infill(body: dict[str, Any], context: Context) -> Answer:
    """The same for what stands between `input_prefix` and `input_suffix`; `prompt` is how it begins."""
    fields = Fields(body)
    before, after = fields.string("input_prefix"), fields.string("input_suffix")
    if before is None and after is None:
        raise bad_field("input_prefix", "is missing, and input_suffix too")
    asked, files = read.read(fields, context), read.read_files(fields)
    prompt = await context.engine.text.fill_in(
        before or "", after or "", files, fields.string("prompt") or ""
    )
    return await _start(fields, asked, [prompt], False, context)


async def _start(
    fields: Fields, asked: read.Asked, prompts: list[list[int]], as_list: bool, context: Context
) -> Answer:
    if not all(prompts):
        raise bad_field("prompt", "is empty: no tokens to start from")
    bias = await read.read_bias(fields, context)
    params = replace(asked.params, logit_bias=bias)
    if asked.evaluate_only:
        params = replace(params, max_tokens=1, logprobs=None)
    grammar = await context.engine.text.compile_grammar(asked.output)
    generation = submit(
        context,
        prompts,
        params,
        asked.n,
        request_id=new_id("cmpl-"),
        prompt_field="prompt",
        grammar=grammar,
        priority=asked.priority,
    )
    if asked.ending.seconds or asked.ending.indent:
        generation = EndingGeneration(generation, asked.ending)
    writer = LlamaWriter(context.engine, asked, prompts, as_list or asked.n > 1)
    return Answer(generation, writer, asked.stream)


async def tokenize(body: dict[str, Any], context: Context) -> dict[str, Any]:
    fields, text = Fields(body), context.engine.text
    content = fields.string("content")
    if content is None:
        raise bad_field("content", "is missing")
    ids = await text.tokenize(
        content,
        parse_special=fields.boolean("parse_special", True),
        add_special=fields.boolean("add_special"),
    )
    if not fields.boolean("with_pieces"):
        return {"tokens": ids}
    return {
        "tokens": [
            {"id": i, "piece": _piece(text.token_bytes(i) or text.token_text(i).encode())} for i in ids
        ]
    }


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(body: dict[str, Any], context: Context) -> dict[str, Any]:
    fields = Fields(body)
    tokens = fields.array("tokens")
    if tokens is None:
        raise bad_field("tokens", "is missing")
    ids = [as_integer("tokens", token) for token in tokens]
    for token_id in ids:
        if not 0 <= token_id < context.engine.info.n_vocab:
            raise bad_field("tokens", f"token id {token_id} is outside the vocabulary")
    return {"content": context.engine.text.decode(ids)}


async def apply_template(body: dict[str, Any], context: Context) -> dict[str, Any]:
    fields = Fields(body)
    messages, prefill = read_messages(fields)
    kwargs = fields.object("chat_template_kwargs") or {}
    return {"prompt": await context.engine.text.render(messages, prefill, kwargs)}


def props(context: Context) -> dict[str, Any]:
    """What clients look up before they ask: the context, the template. Paths are nobody's business."""
    info, text = context.engine.info, context.engine.text
    asked = read.read(Fields({}), context)
    bos, eos = text.special_texts
    return {
        "default_generation_settings": {
            "n_ctx": info.n_ctx,
            "is_processing": False,
            "params": settings_dict(asked, info.n_ctx),
        },
        "total_slots": info.max_num_seqs,
        "model_alias": info.name,
        "model_path": info.name,
        "chat_template": text.template_source,
        "bos_token": bos,
        "eos_token": eos,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"hetero {__version__}",
        "is_sleeping": False,
    }


def slots(context: Context) -> Any:
    """As many as requests are computed at a time, the first ones busy: requests own no slots."""
    info, running = context.engine.info, context.engine.stats().running
    return [{"id": i, "n_ctx": info.n_ctx, "is_processing": i < running} for i in range(info.max_num_seqs)]
