"""The one form in which every chat-like dialect asks: OpenAI chat and responses, Anthropic, Ollama.

A dialect reads its own fields into a `Conversation`, whose messages and tools have the shape of OpenAI's chat
API; `start` makes a `Generation` of it, whose pieces a `Writer` of the dialect turns into its answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hetero.request import RequestError
from hetero.sampling.params import SamplingParams
from hetero.server.context import Context
from hetero.server.generate import Generation, Usage

if TYPE_CHECKING:
    from hetero.async_engine import RequestStream
    from hetero.text.service import ChatPrompt


@dataclass(slots=True)
class Conversation:
    """What is asked.

    messages            checked for their shape; content is a string or a list of text parts
    prefill             the last message is the assistant's, and the answer continues it
    tools               {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice         "auto", "none", "required", {"name": tool}, or {"names": [...], "mode": "auto"}
    output              what the answer must look like, as hetero.server.output reads it; None: any text
    thinking            None: as the template has it; whether to reason, or how much: "low", "medium", "high"
    template_kwargs     further variables of the chat template
    n                   answers
    priority            lower numbers come first
    names               what the dialect calls the fields that errors name, where it has another name
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    prefill: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | Mapping[str, Any] = "none"
    parallel_tool_calls: bool = True
    output: dict[str, Any] | None = None
    thinking: bool | str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    priority: int = 0
    names: Mapping[str, str] = field(default_factory=dict)


async def start(conversation: Conversation, context: Context, request_id: str) -> Generation:
    """Render, tokenize and submit. RequestError names the field, as the dialect has it."""
    try:
        prompt = await make_prompt(conversation, context)
        return submit(
            context,
            [prompt.token_ids],
            conversation.params,
            conversation.n,
            request_id=request_id,
            prompt_field="messages",
            chat=prompt,
            priority=conversation.priority,
        )
    except RequestError as error:
        raise _renamed(error, conversation.names) from error


async def make_prompt(conversation: Conversation, context: Context) -> ChatPrompt:
    """The conversation's prompt. Raises RequestError under OpenAI's names of the fields."""
    prompt = await context.engine.text.chat(
        conversation.messages,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        parallel_tool_calls=conversation.parallel_tool_calls,
        output=conversation.output,
        thinking=conversation.thinking,
        continue_final_message=conversation.prefill,
        template_kwargs=conversation.template_kwargs,
    )
    if not prompt.token_ids:
        raise RequestError("messages: the chat template makes no prompt of them", "messages")
    return prompt


async def count_tokens(conversation: Conversation, context: Context) -> int:
    """The length of the conversation's prompt. Raises as `start` does."""
    try:
        return len((await make_prompt(conversation, context)).token_ids)
    except RequestError as error:
        raise _renamed(error, conversation.names) from error


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the dialect's own name for the field, also where its message begins with it."""
    field = error.field
    if field is None or field not in names:
        return error
    message = error.message
    if message.startswith(f"{field}: "):
        message = names[field] + message.removeprefix(field)
    return RequestError(message, names[field], error.code)


def submit(
    context: Context,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    n: int,
    *,
    request_id: str,
    prompt_field: str,
    grammar: Any = None,
    chat: ChatPrompt | None = None,
    embeds: bool = False,
    priority: int = 0,
) -> Generation:
    """n requests to the engine per prompt, in order of the choices.

    Choice i of a prompt has seed + i, so that answer 0 is the same whatever n is. If one is refused, none
    runs; `prompt_field` is how the route calls its prompt. `chat` brings its own grammar. `embeds`: each
    gives an embedding, and no text.
    """
    shown: Mapping[int, bytes] = {}
    if chat is not None:
        grammar, shown = chat.grammar, chat.shown
    streams: list[RequestStream] = []
    try:
        for prompt in prompts:
            for i in range(n):
                own = params if params.seed is None else replace(params, seed=params.seed + i)
                name = f"{request_id}-{len(streams)}"
                fresh = None if grammar is None else grammar.fork()
                streams.append(
                    context.engine.submit(
                        prompt,
                        own,
                        request_id=name,
                        grammar=fresh,
                        shown=shown,
                        embeds=embeds,
                        priority=priority,
                    )
                )
    except BaseException as error:
        for stream in streams:
            stream.abort()
        if isinstance(error, RequestError) and error.field == "prompt":
            raise RequestError(str(error), prompt_field, error.code) from None
        raise
    usage = Usage(n, sum(map(len, prompts)))
    parsers = None if chat is None else [chat.new_parser() for _ in streams]
    ended = None if embeds else context.recorder.watch(prompts, n)
    return Generation(streams, context.active, usage, parsers, context.engine.note_sent, ended)


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
