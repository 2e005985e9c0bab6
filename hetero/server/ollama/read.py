"""Ollama's chat and generate requests, in the form that Conversation wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.sampling.params import SamplingParams
from hetero.server import openai
from hetero.server.context import Context
from hetero.server.conversation import Conversation
from hetero.server.errors import bad_field, encode
from hetero.server.messages import is_prefill
from hetero.server.output import json_output
from hetero.server.tools import read_tools
from hetero.server.validate import Fields, wrong_type

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
# Ollama samples so where its models say nothing else; its clients count on it.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# Options that would change the answer and are not supported, with the value that asks for nothing.
UNSUPPORTED_OPTIONS = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}


def read_chat(fields: Fields, context: Context) -> Conversation:
    """The conversation of /api/chat. Raises ApiError naming the field."""
    messages = read_messages(fields)
    tools = read_tools(fields)
    return Conversation(
        messages,
        read_params(fields, context),
        prefill=is_prefill(messages),
        tools=tools,
        tool_choice="auto" if tools else "none",
        output=json_output(fields.body.get("format"), "format"),
        thinking=_think(fields, context),
        priority=openai.priority(fields, context),
    )


def read_generate(fields: Fields, context: Context) -> Conversation:
    """/api/generate as a conversation of one turn. Raises ApiError naming the field."""
    messages: list[Message] = []
    if system := fields.string("system"):
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": fields.string("prompt") or ""})
    return Conversation(
        messages,
        read_params(fields, context),
        output=json_output(fields.body.get("format"), "format"),
        thinking=_think(fields, context),
        priority=openai.priority(fields, context),
        names={"messages": "prompt"},
    )


def refuse_generate(fields: Fields) -> None:
    """400 for what /api/generate does not support here."""
    openai.refuse_unsupported(fields, {"template": "", "context": [], "images": []})


def read_params(fields: Fields, context: Context) -> SamplingParams:
    """`options`, with Ollama's defaults. Options of loading a model mean nothing here: it is loaded."""
    given = Fields(fields.object("options") or {}, "options.")
    openai.refuse_unsupported(given, UNSUPPORTED_OPTIONS)
    openai.refuse_last_n(given)
    limit = given.integer("num_predict")
    options: Mapping[str, Any] = {**DEFAULTS, **{k: v for k, v in given.body.items() if v is not None}}
    return openai.sampling_params(
        Fields(options, "options."),
        context.engine.info.n_vocab,
        max_tokens=limit if limit is not None and limit > 0 else None,
        logprobs=_logprobs(fields),
    )


def read_messages(fields: Fields) -> list[Message]:
    """The messages, with results of tools matched to calls by name and order where they have no ids."""
    messages: list[Message] = []
    open_calls = _OpenCalls([])
    for i, value in enumerate(fields.array("messages") or ()):
        where = f"messages[{i}]"
        if not isinstance(value, dict):
            raise wrong_type(where, "an object", value)
        given = Fields(value, f"{where}.")
        role = given.string("role")
        if role not in ROLES:
            raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if given.array("images"):
            raise bad_field(f"{where}.images", "this model reads no images")
        message: Message = {"role": role, "content": given.string("content") or ""}
        if thinking := given.string("thinking"):
            message["reasoning_content"] = thinking
        calls = [
            _call(call, f"{where}.tool_calls[{k}]", f"call_{i}_{k}")
            for k, call in enumerate(given.array("tool_calls") or ())
        ]
        if calls:
            message["tool_calls"] = calls
            open_calls = _OpenCalls(calls)
        if role == "tool":
            message |= open_calls.answered(given.string("tool_name"), given.string("tool_call_id"))
        messages.append(message)
    return messages


def _call(call: Any, where: str, call_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(where, "must have a function with a name")
    arguments = Fields(function, f"{where}.function.").object("arguments") or {}
    own_id = call.get("id")
    return {
        "id": own_id if isinstance(own_id, str) else call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": encode(arguments)},
    }


class _OpenCalls:
    """The calls of a message that wait for an answer, found without a look at all of them."""

    def __init__(self, calls: Sequence[dict[str, Any]]):
        self._all = deque(calls)
        self._by_id: dict[str, deque[dict[str, Any]]] = {}
        self._by_name: dict[str, deque[dict[str, Any]]] = {}
        for call in calls:
            self._by_id.setdefault(call["id"], deque()).append(call)
            self._by_name.setdefault(call["function"]["name"], deque()).append(call)
        self._closed: set[int] = set()  # by identity: ids are the client's

    def answered(self, name: str | None, call_id: str | None) -> dict[str, Any]:
        """Which of the calls a tool's message answers: the one it names, else the next."""
        calls = self._all
        if call_id is not None:
            calls = self._by_id.get(call_id, deque())
        elif name is not None:
            calls = self._by_name.get(name, deque())
        while calls and id(calls[0]) in self._closed:
            calls.popleft()
        if not calls or name not in (None, calls[0]["function"]["name"]):
            return {} if name is None else {"name": name}
        call = calls.popleft()
        self._closed.add(id(call))
        return {"tool_call_id": call["id"], "name": call["function"]["name"]}


def _think(fields: Fields, context: Context) -> bool | str | None:
    think = fields.body.get("think")
    if not (think is None or isinstance(think, bool) or think in ("low", "medium", "high")):
        raise bad_field("think", "must be true, false, low, medium or high")
    if think and "thinking" not in context.engine.text.capabilities:
        raise bad_field("think", "this model does not support thinking")
    return think


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = openai.check_top_logprobs("top_logprobs", fields.integer("top_logprobs"))
    return (top or 0) if wanted else None
