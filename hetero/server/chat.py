"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hetero.request import OutputDelta, TokenLogprob
from hetero.server import openai
from hetero.server.errors import bad_field
from hetero.server.generate import Active, Answer, Collected, Generation, Usage
from hetero.server.settings import ServerSettings
from hetero.server.validate import Fields, type_name, wrong_type

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
UNSUPPORTED = {**openai.UNSUPPORTED, "functions": [], "audio": {}, "web_search_options": {}}
# What the template's own variables are called; chat_template_kwargs must not replace them.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)


async def prepare(
    body: dict[str, Any], engine: AsyncEngine, settings: ServerSettings, active: Active
) -> tuple[Answer, Generation]:
    """Validate, tokenize and submit a chat request. Raises ApiError, ParamError or RequestError."""
    fields = Fields(body)
    fields.string("model")  # any name is served by the one model, under its own name
    messages, prefill = read_messages(fields)
    _refuse(fields)
    n = openai.num_choices(fields, settings.max_choices)
    stream, include_usage = openai.stream_options(fields)
    params = openai.sampling_params(
        fields,
        engine.info.n_vocab,
        max_tokens=openai.max_tokens(fields, "max_completion_tokens", "max_tokens"),
        logprobs=_logprobs(fields),
    )
    kwargs = fields.object("chat_template_kwargs") or {}
    if taken := RESERVED_KWARGS & kwargs.keys():
        raise bad_field("chat_template_kwargs", f"{min(taken)} cannot be set here")
    grammar = await openai.compile_grammar(engine, fields)
    chat = await engine.text.chat(messages, continue_final_message=prefill, template_kwargs=kwargs)
    prompt = chat.token_ids
    if not prompt:
        raise bad_field("messages", "the chat template makes no prompt of them")
    answer = Answer(
        id=openai.new_id("chatcmpl"),
        model=engine.info.name,
        shape=ChatShape(engine, params.logprobs is not None),
        usage=Usage(n, len(prompt)),
        num_choices=n,
        stream=stream,
        include_usage=include_usage,
    )
    streams = openai.submit_all(
        engine, [prompt], params, n, request_id=answer.id, grammar=grammar, prompt_field="messages"
    )
    return answer, Generation(streams, active)


def _refuse(fields: Fields) -> None:
    tools = fields.array("tools")
    if tools and fields.body.get("tool_choice") != "none":
        raise bad_field("tools", "tool calls are not supported by this server", code="unsupported_parameter")
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


def read_messages(fields: Fields) -> tuple[list[dict[str, Any]], bool]:
    """(messages for the template, whether the last one is an assistant's to be continued).

    A developer message is a system message: it joins the one at the front, or becomes it. A missing or null
    content of an assistant is the empty string. Raises ApiError naming the message's field.
    """
    given = fields.array("messages")
    if not given:
        raise bad_field("messages", "must be an array with at least one message")
    messages = [_message(value, f"messages[{i}]") for i, value in enumerate(given)]
    developer = [m for m in messages if m["role"] == "developer"]
    if developer:
        messages = _merge_system(messages)
    last = messages[-1]
    prefill = last["role"] == "assistant" and not last.get("tool_calls")
    if fields.has("continue_final_message"):
        wanted = fields.boolean("continue_final_message")
        if wanted and not prefill:
            raise bad_field("continue_final_message", "needs an assistant message at the end")
        prefill = wanted
    if not fields.boolean("add_generation_prompt", True) and not prefill:
        raise bad_field("add_generation_prompt", "false is not supported by this server")
    return messages, prefill


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the front: a leading system message, then every developer's, by blank lines."""
    front: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        is_front = message["role"] == "developer" or (i == 0 and message["role"] == "system")
        (front if is_front else rest).append(message)
    text = "\n\n".join(filter(None, (_text(m["content"]) for m in front)))
    return [{"role": "system", "content": text}, *rest]


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    fields = Fields(value, f"{where}.")
    role = value.get("role")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    message = {k: v for k, v in value.items() if v is not None}  # a null is as good as absent
    for name in ("name", "tool_call_id"):
        fields.string(name)
    calls = fields.array("tool_calls") or []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"{where}.tool_calls[{i}]", "must have a function with a name")
    message["content"] = _content(value, role, where)
    return message


def _content(message: dict[str, Any], role: str, where: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise bad_field(f"{where}.content", "is missing")
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or an array of parts", content)
    for i, part in enumerate(content):
        at = f"{where}.content[{i}]"
        if not isinstance(part, dict):
            raise wrong_type(at, "an object", part)
        kind = part.get("type")
        if kind != "text":
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else type_name(kind)
            raise bad_field(f"{at}.type", f"{shown} parts are not supported by this model, only 'text'")
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{at}.text", "a string", part.get("text"))
    return content


class ChatShape:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, engine: AsyncEngine, with_logprobs: bool) -> None:
        self._engine = engine
        self._with_logprobs = with_logprobs

    def chunks(self, index: int, delta: OutputDelta, first: bool) -> Iterable[dict[str, Any]]:
        if first:
            yield self._chunk(index, {"role": "assistant", "content": ""})
        if delta.text or (self._with_logprobs and delta.logprobs):
            yield self._chunk(index, {"content": delta.text}, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield self._chunk(index, {}, finish_reason=delta.finish_reason.value)

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None},
            "logprobs": self._logprobs(collected.logprobs),
            "finish_reason": collected.finish_reason,
        }

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return openai.chat_logprobs(self._engine, logprobs) if self._with_logprobs else None

    @staticmethod
    def _chunk(
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
