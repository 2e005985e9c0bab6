"""/v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.request import TokenLogprob
from hetero.server import openai
from hetero.server.choices import ChoicesWriter
from hetero.server.collect import Call, Collected, Piece
from hetero.server.context import Context
from hetero.server.conversation import Conversation, new_id, start
from hetero.server.errors import bad_field
from hetero.server.messages import read_messages
from hetero.server.output import read_output
from hetero.server.respond import Answer
from hetero.server.tools import read_tool_choice, read_tools
from hetero.server.validate import Fields
from hetero.text.parts import Part, ReasoningPart, TextPart, ToolCallStart

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

UNSUPPORTED = {**openai.UNSUPPORTED, "functions": [], "audio": {}, "web_search_options": {}}
# What the template's own variables are called; chat_template_kwargs must not replace them.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


async def prepare(body: dict[str, Any], context: Context) -> Answer:
    """Validate and start a chat request. Raises ApiError or RequestError."""
    fields = Fields(body)
    fields.string("model")  # any name is served by the one model, under its own name
    conversation = read(fields, context)
    stream, include_usage = openai.stream_options(fields)
    answer_id = new_id("chatcmpl-")
    generation = await start(conversation, context, answer_id)
    with_logprobs = conversation.params.logprobs is not None
    return Answer(generation, ChatWriter(answer_id, context.engine, with_logprobs, include_usage), stream)


def read(fields: Fields, context: Context) -> Conversation:
    """The conversation that a body asks for. Raises ApiError naming the field."""
    messages, prefill = read_messages(fields)
    _refuse(fields)
    n = openai.num_choices(fields, context.settings.max_choices)
    params = openai.sampling_params(
        fields,
        context.engine.info.n_vocab,
        max_tokens=openai.max_tokens(fields, "max_completion_tokens", "max_tokens"),
        logprobs=_logprobs(fields),
    )
    kwargs = fields.object("chat_template_kwargs") or {}
    if taken := RESERVED_KWARGS & kwargs.keys():
        raise bad_field("chat_template_kwargs", f"{min(taken)} cannot be set here")
    tools = read_tools(fields)
    return Conversation(
        messages,
        params,
        prefill=prefill,
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=fields.boolean("parallel_tool_calls", True),
        output=read_output(fields),
        thinking=read_effort(fields, "reasoning_effort"),
        template_kwargs=kwargs,
        n=n,
        priority=openai.priority(fields, context),
    )


def read_effort(fields: Fields, name: str) -> bool | str | None:
    """How much to reason: None as the template has it, False, "low", "medium" or "high"."""
    effort = fields.string(name)
    if effort is None:
        return None
    if effort not in EFFORTS:
        raise bad_field(fields.name(name), f"must be one of {', '.join(EFFORTS)}")
    return False if effort == "none" else {"minimal": "low", "xhigh": "high"}.get(effort, effort)


def _refuse(fields: Fields) -> None:
    for modality in fields.array("modalities") or ():
        if modality != "text":
            raise bad_field("modalities", "only text is supported", code="unsupported_parameter")
    openai.refuse_unsupported(fields, UNSUPPORTED)


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = openai.check_top_logprobs("top_logprobs", fields.integer("top_logprobs"))
    if top is not None and not wanted:
        raise bad_field("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None


class ChatWriter(ChoicesWriter):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, answer_id: str, engine: AsyncEngine, with_logprobs: bool, include_usage: bool) -> None:
        super().__init__(answer_id, engine.info.name, include_usage)
        self._engine = engine
        self._with_logprobs = with_logprobs
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        deltas = [_delta(part) for part in piece.parts]
        logprobs = self._logprobs(piece.delta.logprobs) if piece.delta.logprobs else None
        if logprobs is not None and not deltas:
            deltas.append({"content": ""})
        first = {} if piece.index in self._begun else {"role": "assistant", "content": ""}
        self._begun.add(piece.index)
        chunks = [_chunk(piece.index, first)] if first else []
        for delta in deltas:
            chunks.append(_chunk(piece.index, delta, logprobs))
            logprobs = None  # once for all tokens behind the piece
        if piece.finish is not None:
            chunks.append(_chunk(piece.index, {}, finish_reason=piece.finish))
        return chunks

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": collected.text, "refusal": None}
        if reasoning := collected.reasoning:
            message["reasoning_content"] = reasoning
        if calls := collected.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(collected.logprobs),
            "finish_reason": collected.finish,
        }

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return openai.chat_logprobs(self._engine, logprobs) if self._with_logprobs else None


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"content": part.text}
    if isinstance(part, ReasoningPart):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolCallStart):  # the name comes first and is whole; later deltas have none
        return {"tool_calls": [{"index": part.index, **_call(Call(part.index, part.id, part.name))}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
