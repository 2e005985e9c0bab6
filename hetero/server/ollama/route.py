"""/api/chat and /api/generate."""

from __future__ import annotations

from typing import Any

from hetero.server.context import Context
from hetero.server.conversation import new_id, start, submit
from hetero.server.ollama.read import read_chat, read_generate, refuse_generate
from hetero.server.ollama.writer import OllamaWriter, loaded
from hetero.server.respond import Answer
from hetero.server.validate import Fields


async def chat(body: dict[str, Any], context: Context) -> Answer | dict[str, Any]:
    """Validate and start, or say that the model is loaded. Raises ApiError or RequestError."""
    fields = _begin(body)
    stream = fields.boolean("stream", True)
    conversation = read_chat(fields, context)
    if not conversation.messages:
        return loaded(context.engine.info.name, chat=True)
    generation = await start(conversation, context, new_id("ollama-"))
    writer = OllamaWriter(context.engine, True, conversation.params.logprobs is not None)
    return Answer(generation, writer, stream)


async def generate(body: dict[str, Any], context: Context) -> Answer | dict[str, Any]:
    """Validate and start, or say that the model is loaded. Raises ApiError or RequestError."""
    fields, text = _begin(body), context.engine.text
    refuse_generate(fields)
    prompt, suffix = fields.string("prompt") or "", fields.string("suffix")
    stream, raw = fields.boolean("stream", True), fields.boolean("raw")
    conversation = read_generate(fields, context)
    params = conversation.params
    if not prompt and not suffix:
        return loaded(context.engine.info.name, chat=False)
    request_id = new_id("ollama-")
    if raw or suffix:
        grammar = await text.compile_grammar(conversation.output)
        ids = await (text.fill_in(prompt, suffix) if suffix else text.tokenize(prompt))
        generation = submit(
            context,
            [ids],
            params,
            1,
            request_id=request_id,
            prompt_field="prompt",
            grammar=grammar,
            priority=conversation.priority,
        )
    else:
        generation = await start(conversation, context, request_id)
    return Answer(generation, OllamaWriter(context.engine, False, params.logprobs is not None), stream)


def _begin(body: dict[str, Any]) -> Fields:
    """`keep_alive` is accepted and means nothing: the model stays."""
    fields = Fields(body)
    fields.string("model")  # any name is served by the one model, under its own name
    return fields
