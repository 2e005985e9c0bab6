"""/v1/responses and what is stored of it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hetero.request import CLIENT
from hetero.server import openai
from hetero.server.chat import read_effort
from hetero.server.context import Context, Handler
from hetero.server.conversation import Conversation, new_id, start
from hetero.server.errors import ApiError, bad_field, json_response
from hetero.server.messages import is_prefill
from hetero.server.output import Output
from hetero.server.respond import Answer
from hetero.server.responses.items import Item, read_items, to_messages
from hetero.server.responses.store import ResponseStore
from hetero.server.responses.writer import ResponsesWriter
from hetero.server.tools import read_tool_choice, read_tools
from hetero.server.validate import Fields, type_name

# With the value that asks for nothing; see openai.UNSUPPORTED.
UNSUPPORTED: dict[str, Any] = {
    "background": False, "conversation": None, "prompt": None, "top_logprobs": 0, "moderation": None,
}  # fmt: skip
# What errors of the common path call the fields that have other names here.
NAMES = {"messages": "input"}
UNSUPPORTED_INCLUDES = ("message.output_text.logprobs",)


class Responses:
    """The routes, over one store."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = ResponseStore()

    def routes(self) -> list[tuple[str, str, Handler]]:
        one = "/v1/responses/{id}"
        return [
            ("GET", one, self._get),
            ("DELETE", one, self._delete),
            ("GET", one + "/input_items", self._input_items),
        ]

    async def prepare(self, body: dict[str, Any], context: Context) -> Answer:
        """Validate and start. Raises ApiError or RequestError."""
        fields, client = Fields(body), CLIENT.get()
        fields.string("model")
        if not fields.has("input"):
            raise bad_field("input", "is missing")
        items = read_items(body["input"])
        previous = fields.string("previous_response_id")
        conversation = self._read(fields, self._history(client, previous), items)
        response_id = new_id("resp_")
        store = fields.boolean("store", True)
        stream = fields.boolean("stream")
        echo = {"id": response_id, "model": context.engine.info.name, **_echo(fields), "store": store}

        def keep(response: dict[str, Any]) -> None:
            if store:
                self._store.add(client, response, items, previous)

        generation = await start(conversation, context, response_id)
        return Answer(generation, ResponsesWriter(echo, keep), stream)

    def _read(self, fields: Fields, history: list[Item], items: list[Item]) -> Conversation:
        _refuse(fields)
        messages = to_messages([*history, *items], fields.string("instructions"), len(history))
        if not messages:
            raise bad_field("input", "must have at least one item")
        tools = read_tools(fields, skip_others=True)
        reasoning = Fields(fields.object("reasoning") or {}, "reasoning.")
        params = openai.sampling_params(
            fields,
            self._context.engine.info.n_vocab,
            max_tokens=openai.max_tokens(fields, "max_output_tokens"),
            logprobs=None,
        )
        return Conversation(
            messages,
            params,
            prefill=is_prefill(messages),
            tools=tools,
            tool_choice=read_tool_choice(fields, tools),
            parallel_tool_calls=fields.boolean("parallel_tool_calls", True),
            output=_output(fields),
            thinking=read_effort(reasoning, "effort"),
            names=NAMES,
            priority=openai.priority(fields, self._context),
        )

    def _history(self, client: str, previous: str | None) -> list[Item]:
        if previous is None:
            return []
        history = self._store.history(client, previous)
        if history is None:
            raise ApiError(
                400,
                f"previous_response_id: {previous[:100]!r} is not stored here (any more); send its items in "
                "input instead",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return history

    async def _get(self, request: web.Request) -> web.Response:
        if request.query.get("stream") == "true":
            raise bad_field("stream", "a stored response is only given in one piece")
        response, _ = self._stored(request)
        return json_response(response)

    async def _delete(self, request: web.Request) -> web.Response:
        response_id = self._stored(request)[0]["id"]
        self._store.remove(CLIENT.get(), response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.Response:
        response, items = self._stored(request)
        prefix = response["id"].replace("resp_", "item_")
        data = [{"type": "message", "id": f"{prefix}_{i}", **item} for i, item in enumerate(items)]
        data.reverse()  # the API's default order: the newest first
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return json_response({"object": "list", "data": data, **ends, "has_more": False})

    def _stored(self, request: web.Request) -> tuple[dict[str, Any], list[Item]]:
        stored = self._store.get(CLIENT.get(), request.match_info["id"])
        if stored is None:
            raise ApiError(404, "no response of this id is stored here", param="id", code="not_found")
        return stored.read()


def _refuse(fields: Fields) -> None:
    openai.refuse_unsupported(fields, {**openai.UNSUPPORTED, **UNSUPPORTED})
    for name in fields.array("include") or ():
        if name in UNSUPPORTED_INCLUDES:
            raise bad_field("include", f"{name} is not supported", code="unsupported_parameter")


def _output(fields: Fields) -> Output | None:
    """`text.format`, which is flatter than a `response_format`."""
    text = Fields(fields.object("text") or {}, "text.")
    given = text.object("format")
    if given is None or given.get("type") == "text":
        return None
    kind = given.get("type")
    if kind == "json_object":
        return {"type": kind, "field": "text.format"}
    if kind != "json_schema":
        shown = kind[:40] if isinstance(kind, str) else type_name(kind)
        raise bad_field("text.format.type", f"must be text, json_object or json_schema, not {shown}")
    if Fields(given, "text.format.").object("schema") is None:
        raise bad_field("text.format.schema", "is missing")
    schema = {k: v for k, v in given.items() if k != "type"}
    return {"type": kind, "json_schema": schema, "field": "text.format"}


def _echo(fields: Fields) -> dict[str, Any]:
    """What the response repeats of the request."""
    defaults: dict[str, Any] = {
        "background": False, "instructions": None, "max_output_tokens": None, "metadata": {},
        "parallel_tool_calls": True, "previous_response_id": None, "reasoning": {"effort": None},
        "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_p": 1.0, "user": None,
    }  # fmt: skip
    echo = {name: fields.body[name] if fields.has(name) else value for name, value in defaults.items()}
    return {**echo, "truncation": "disabled"}  # whatever is asked: nothing is cut off in silence
