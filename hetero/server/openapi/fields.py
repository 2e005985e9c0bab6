"""Fields that several dialects have: sampling, the form of the answer, tools, messages."""

from __future__ import annotations

from hetero.sampling.params import MAX_LOGPROBS
from hetero.server import chat, openai
from hetero.server.messages import ROLES
from hetero.server.openapi.shapes import (
    ANY,
    BOOLEAN,
    NAME,
    OBJECT,
    STRING,
    Schema,
    array,
    body,
    described,
    either,
    enum,
    integer,
    neutral,
    number,
    or_null,
    ref,
)
from hetero.server.tools import CHOICES as TOOL_CHOICES
from hetero.server.tools import MAX_NAME_CHARS

MAX_CHOICES = 128  # ServerSettings.max_choices, which no operator sets
TOP_LOGPROBS = integer(0, MAX_LOGPROBS)
TOKEN_IDS = array(integer(0))
# -1, which some clients send, means no limit.
MAX_TOKENS: Schema = {"type": "integer", "minimum": -1, "not": {"const": 0}}
MODEL = described(STRING, "Any name; the one model answers, under its own.")
STREAM = described(BOOLEAN, "The answer comes as server-sent events.")

PENALTIES: dict[str, Schema] = {
    "repetition_penalty": number(0.01, 100),
    "repeat_penalty": described(number(), "As repetition_penalty, which goes before it."),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
SAMPLERS: dict[str, Schema] = {
    "temperature": number(0, 100),
    "top_k": described(integer(-1), "0 and -1: all tokens."),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
}
STOP_TEXT: Schema = {**NAME, "maxLength": openai.MAX_STOP_CHARS}
STOP: dict[str, Schema] = {
    "stop": either(STOP_TEXT, array(STOP_TEXT, high=openai.MAX_STOPS)),
    "stop_token_ids": {**TOKEN_IDS, "maxItems": openai.MAX_STOP_IDS},
    "ignore_eos": BOOLEAN,
}
LOGIT_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,11}$"},
    "additionalProperties": number(-100, 100),
    "description": "Token ids and what is added to their logits.",
}
SAMPLING: dict[str, Schema] = {
    **SAMPLERS, **PENALTIES, **STOP, "logit_bias": LOGIT_BIAS, "seed": integer(),
}  # fmt: skip

CHOICES = array(STRING)
OUTPUT: dict[str, Schema] = {
    "response_format": ref("ResponseFormat"),
    "grammar": described(STRING, "GBNF or Lark."),
    "json_schema": OBJECT,
    "guided_json": described(either(OBJECT, STRING), 'A JSON schema, its text, or "json" for any object.'),
    "guided_regex": STRING,
    "guided_choice": CHOICES,
    "guided_grammar": STRING,
    "structured_outputs": body(
        {},
        {
            "json": either(OBJECT, STRING),
            "regex": STRING,
            "choice": CHOICES,
            "grammar": STRING,
            "json_object": BOOLEAN,
        },
    ),
}
RESPONSE_FORMAT = either(
    body({"type": enum("text")}, {}),
    body({"type": enum("json_object")}, {"schema": OBJECT}),
    body({"type": enum("json_schema"), "json_schema": body({"schema": OBJECT}, {})}, {}),
)

FUNCTION = body(
    {"name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}},
    {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN},
)
# Nested as the chat API has it, or flat as the responses API has it.
TOOL = either(
    {
        "type": "object",
        "required": ["function"],
        "properties": {"type": enum("function"), "function": FUNCTION},
    },
    {
        **FUNCTION,
        "properties": {**FUNCTION["properties"], "type": enum("function"), "function": False},
    },
)
TOOL_CHOICE = either(
    enum(*TOOL_CHOICES),
    described(OBJECT, 'A tool by name, or {"type": "allowed_tools"} with a mode and some of the tools.'),
)
TOOLS: dict[str, Schema] = {
    "tools": array(ref("Tool")),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
}

TEXT_PART = body({"type": enum("text"), "text": STRING}, {})
CONTENT = either(STRING, array(TEXT_PART))
TOOL_CALL = body({"function": body({"name": STRING}, {"arguments": ANY})}, {"id": ANY, "type": ANY})
_MESSAGE: dict[str, Schema] = {
    "name": STRING,
    "tool_call_id": STRING,
    "reasoning_content": STRING,
    "tool_calls": array(TOOL_CALL),
}
MESSAGE = either(
    body({"role": enum("assistant")}, {"content": CONTENT, **_MESSAGE}),
    body({"role": enum(*(r for r in ROLES if r != "assistant")), "content": CONTENT}, _MESSAGE),
)
TEMPLATE: dict[str, Schema] = {
    "continue_final_message": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "chat_template_kwargs": {
        "type": "object",
        "propertyNames": {"not": enum(*sorted(chat.RESERVED_KWARGS))},
    },
}
EFFORT = enum(*chat.EFFORTS)
UNSUPPORTED = {name: or_null(schema) for name, schema in neutral(openai.UNSUPPORTED).items()}
