"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from hetero.sampling.params import SamplingParams
from hetero.server import openai
from hetero.server.anthropic.messages import read_messages
from hetero.server.anthropic.writer import MessageWriter
from hetero.server.context import Context
from hetero.server.conversation import Conversation, count_tokens, new_id, start
from hetero.server.errors import bad_field
from hetero.server.messages import is_prefill
from hetero.server.output import Output, json_output
from hetero.server.respond import Answer
from hetero.server.tools import Tool, ToolChoice, as_tool, known_tool
from hetero.server.validate import Fields, type_name, wrong_type

# With the value that asks for nothing; see openai.UNSUPPORTED.
UNSUPPORTED: dict[str, Any] = {"container": None, "mcp_servers": []}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


async def prepare(body: dict[str, Any], context: Context) -> Answer:
    """Validate and start. Raises ApiError or RequestError."""
    fields = Fields(body)
    fields.string("model")  # any name is served by the one model, under its own name
    if not fields.has("max_tokens"):
        raise bad_field("max_tokens", "is missing")
    conversation = read(fields, context)
    stream = fields.boolean("stream")
    message_id = new_id("msg_")
    generation = await start(conversation, context, message_id)
    writer = MessageWriter(message_id, context.engine.info.name, generation.usage.prompt_tokens)
    return Answer(generation, writer, stream)


async def count(body: dict[str, Any], context: Context) -> dict[str, Any]:
    """The length of the prompt that the same body would make. Raises ApiError or RequestError."""
    return {"input_tokens": await count_tokens(read(Fields(body), context), context)}


def read(fields: Fields, context: Context) -> Conversation:
    """The conversation that a body asks for. Raises ApiError naming the field."""
    openai.refuse_unsupported(fields, UNSUPPORTED)
    messages = read_messages(fields)
    tools = _tools(fields)
    choice, parallel = _tool_choice(fields, tools)
    return Conversation(
        messages,
        _params(fields, context.engine.info.n_vocab),
        prefill=is_prefill(messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        output=_output(fields),
        thinking=_thinking(fields),
        priority=openai.priority(fields, context),
    )


def _params(fields: Fields, n_vocab: int) -> SamplingParams:
    names = ("temperature", "top_p", "top_k")
    body = {name: fields.body.get(name) for name in names}
    stops = fields.array("stop_sequences") or []
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise wrong_type(f"stop_sequences[{i}]", "a string that is not empty", stop)
    openai.check_stops("stop_sequences", stops)
    limit = fields.integer("max_tokens", low=1)
    return openai.sampling_params(Fields({**body, "stop": stops}), n_vocab, max_tokens=limit, logprobs=None)


def _tools(fields: Fields) -> list[Tool]:
    tools = []
    for i, tool in enumerate(fields.array("tools") or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object", tool)
        kind = "custom" if tool.get("type") is None else tool["type"]
        if kind != "custom":
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
            raise bad_field(f"{where}.type", f"{shown} tools are not supported, only 'custom'")
        tools.append(as_tool(tool, "input_schema", where))
    return tools


def _tool_choice(fields: Fields, tools: list[Tool]) -> tuple[ToolChoice, bool]:
    """(the choice, whether several tools may be called at once)."""
    given = Fields(fields.object("tool_choice") or {"type": "auto"}, "tool_choice.")
    parallel = not given.boolean("disable_parallel_tool_use")
    kind = given.body.get("type")
    if not tools:
        return "none", parallel
    if kind == "tool":
        known = {tool["function"]["name"] for tool in tools}
        return {"name": known_tool(given.body.get("name"), known, "tool_choice.name")}, parallel
    if kind not in ("auto", "any", "none"):
        raise bad_field("tool_choice.type", "must be auto, any, tool or none")
    return "required" if kind == "any" else kind, parallel


def _output(fields: Fields) -> Output | None:
    """`output_config.format`, or `output_format` as it was called in beta."""
    config = Fields(fields.object("output_config") or {}, "output_config.")
    now, before = config.object("format"), fields.object("output_format")
    given = before if now is None else now
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise bad_field("output_config.format.type", "must be json_schema")
    schema = Fields(given, "output_config.format.").object("schema")
    if schema is None:
        raise bad_field("output_config.format.schema", "is missing")
    return json_output(schema, "output_config.format")


def _thinking(fields: Fields) -> bool | str:
    """Whether to reason, or how much. Not unless it is asked for."""
    thinking = Fields(fields.object("thinking") or {"type": "disabled"}, "thinking.")
    kind = thinking.body.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_field("thinking.type", "must be enabled, disabled or adaptive")
    thinking.integer("budget_tokens", low=0)
    config = Fields(fields.object("output_config") or {}, "output_config.")
    effort = config.string("effort")
    if effort is not None and effort not in EFFORTS:
        raise bad_field("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
    if kind == "disabled":
        return False
    return True if effort is None else EFFORTS[effort]
