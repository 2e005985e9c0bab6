"""Bodies of requests, by the name of their schema."""

from __future__ import annotations

from hetero.server import chat, embeddings, openai
from hetero.server.anthropic import messages as anthropic_messages
from hetero.server.anthropic import route as anthropic
from hetero.server.llamacpp import read as llamacpp
from hetero.server.ollama import read as ollama
from hetero.server.openapi.fields import (
    EFFORT,
    FUNCTION,
    MAX_CHOICES,
    MAX_TOKENS,
    MESSAGE,
    MODEL,
    OUTPUT,
    RESPONSE_FORMAT,
    SAMPLERS,
    SAMPLING,
    STOP_TEXT,
    STREAM,
    TEMPLATE,
    TOKEN_IDS,
    TOOL,
    TOOLS,
    TOP_LOGPROBS,
)
from hetero.server.openapi.shapes import (
    ANY,
    BOOLEAN,
    NAME,
    NULL,
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
    ref,
)
from hetero.server.responses import items
from hetero.server.responses import route as responses

_STREAMED = {"stream": STREAM, "stream_options": body({}, {"include_usage": BOOLEAN})}
PRIORITY = described(
    integer(-openai.MAX_PRIORITY, openai.MAX_PRIORITY),
    "Lower numbers come first. The server may refuse those below 0.",
)
_LAST: dict[str, Schema] = {
    "model": MODEL, **_STREAMED, **SAMPLING, **OUTPUT, "priority": PRIORITY,
}  # fmt: skip

CHAT = body(
    {"messages": array(ref("Message"), low=1)},
    {
        **_LAST, **TOOLS, **TEMPLATE, **neutral(chat.UNSUPPORTED),
        "max_completion_tokens": MAX_TOKENS, "max_tokens": MAX_TOKENS, "n": integer(1, MAX_CHOICES),
        "logprobs": BOOLEAN, "top_logprobs": TOP_LOGPROBS, "reasoning_effort": EFFORT,
        "modalities": array(enum("text")),
    },
)  # fmt: skip
COMPLETION = body(
    {
        "prompt": described(
            either(
                STRING,
                array(STRING, 1, MAX_CHOICES),
                {**TOKEN_IDS, "minItems": 1},
                array({**TOKEN_IDS, "minItems": 1}, 1, MAX_CHOICES),
            ),
            "Text or token ids, or an array of either.",
        )
    },
    {
        **_LAST, **neutral(openai.UNSUPPORTED), "max_tokens": MAX_TOKENS,
        "max_completion_tokens": MAX_TOKENS, "n": integer(1, MAX_CHOICES), "logprobs": TOP_LOGPROBS,
        "best_of": described(integer(), "Equal to n."), "top_logprobs": NULL, "echo": BOOLEAN,
        "suffix": described(STRING, "The text is completed up to this, by models that can."),
    },
)  # fmt: skip

_PARTS = either(
    STRING,
    array(
        either(
            body({"type": enum(*(t for t in items.TEXT_PARTS if t != "refusal")), "text": STRING}, {}),
            body({"type": enum("refusal"), "refusal": STRING}, {}),
        )
    ),
)
INPUT_ITEM = either(
    body({"role": enum(*items.ROLES), "content": _PARTS}, {"type": enum("message")}),
    body({"type": enum("reasoning")}, {"content": _PARTS, "summary": _PARTS}),
    body({"type": enum("function_call"), "name": STRING, "arguments": STRING, "call_id": STRING}, {}),
    body({"type": enum("function_call_output"), "call_id": STRING, "output": _PARTS}, {}),
)
_TEXT_FORMAT = either(
    body({"type": enum("text")}, {}),
    body({"type": enum("json_object")}, {}),
    body({"type": enum("json_schema"), "schema": OBJECT}, {"name": ANY, "strict": ANY}),
)
RESPONSES = body(
    {"input": either(STRING, array(ref("InputItem")))},
    {
        "model": MODEL, **SAMPLING, **TOOLS, **neutral({**openai.UNSUPPORTED, **responses.UNSUPPORTED}),
        "tools": described(array(OBJECT), "Functions; tools of another type are left out."),
        "instructions": STRING, "previous_response_id": STRING, "store": BOOLEAN, "stream": STREAM,
        "max_output_tokens": MAX_TOKENS, "reasoning": body({}, {"effort": EFFORT}),
        "text": body({}, {"format": _TEXT_FORMAT}),
        "include": array({"not": enum(*responses.UNSUPPORTED_INCLUDES)}), "priority": PRIORITY,
    },
)  # fmt: skip

_BLOCKS = described(
    either(STRING, array(body({"type": STRING}, {"text": STRING}))),
    "Text, or blocks: text, documents that are text, thinking, tool_use, tool_result.",
)
_TOOL = body(
    {"name": FUNCTION["properties"]["name"]},
    {"type": enum("custom"), "description": STRING, "input_schema": OBJECT, "strict": BOOLEAN},
)
_FORMAT = body({"type": enum("json_schema"), "schema": OBJECT}, {})
_ANTHROPIC: dict[str, Schema] = {
    "model": MODEL, "system": _BLOCKS, **{name: SAMPLERS[name] for name in ("temperature", "top_p", "top_k")},
    "stop_sequences": array(STOP_TEXT, high=openai.MAX_STOPS), "tools": array(_TOOL),
    "tool_choice": body(
        {}, {"type": enum("auto", "any", "none", "tool"), "name": ANY, "disable_parallel_tool_use": BOOLEAN}
    ),
    "thinking": body({"type": enum("enabled", "disabled", "adaptive")}, {"budget_tokens": integer(0)}),
    "output_config": body({}, {"format": _FORMAT, "effort": enum(*anthropic.EFFORTS)}),
    "output_format": described(OBJECT, "As output_config.format, which goes before it."),
    **neutral(anthropic.UNSUPPORTED), "priority": PRIORITY,
}  # fmt: skip
_ANTHROPIC_MESSAGES = array(body({"role": enum(*anthropic_messages.ROLES), "content": _BLOCKS}, {}), low=1)
MESSAGES = body({"messages": _ANTHROPIC_MESSAGES, "max_tokens": integer(1)}, {**_ANTHROPIC, "stream": STREAM})
COUNT = body({"messages": _ANTHROPIC_MESSAGES}, {**_ANTHROPIC, "max_tokens": integer(1)})

_OPTIONS = body(
    {},
    {
        **SAMPLING, **neutral(ollama.UNSUPPORTED_OPTIONS),
        "num_predict": described(integer(), "0 and less: no limit."),
    },
)  # fmt: skip
_OLLAMA: dict[str, Schema] = {
    "model": MODEL, "options": _OPTIONS,
    "format": described(either(OBJECT, STRING), '"json", a JSON schema, or its text.'),
    "think": enum(True, False, "low", "medium", "high"), "logprobs": BOOLEAN, "top_logprobs": TOP_LOGPROBS,
    "stream": described(BOOLEAN, "Lines of JSON, unless false."),
    "keep_alive": described(ANY, "Means nothing: the model stays."), "priority": PRIORITY,
}  # fmt: skip
_OLLAMA_CALL = body({"function": body({"name": STRING}, {"arguments": OBJECT})}, {})
OLLAMA_CHAT = body(
    {},
    {
        **_OLLAMA, "tools": array(ref("Tool")),
        "messages": described(
            array(
                body(
                    {"role": enum(*ollama.ROLES)},
                    {
                        "content": STRING, "thinking": STRING, "tool_name": STRING, "tool_call_id": STRING,
                        "tool_calls": array(_OLLAMA_CALL),
                        "images": array(ANY, high=0),
                    },
                )
            ),
            "None of them: the answer says that the model is loaded.",
        ),
    },
)  # fmt: skip
OLLAMA_GENERATE = body(
    {},
    {
        **_OLLAMA, "prompt": STRING, "suffix": STRING, "system": STRING, "raw": BOOLEAN,
        **neutral({"template": "", "context": [], "images": []}),
    },
)  # fmt: skip
SHOW = either(body({"model": NAME}, {}), body({"name": NAME}, {}))

_MIXED = array(either(STRING, integer(0)), low=1)
_PROMPT_OBJECT = body({"prompt_string": STRING}, {})
_PROMPT = either(STRING, _MIXED, _PROMPT_OBJECT)
_LLAMA: dict[str, Schema] = {
    **SAMPLING, **OUTPUT, **neutral(llamacpp.UNSUPPORTED), "temperature": number(high=100), "stream": STREAM,
    "n_predict": described(integer(-2), "0: the prompt is only computed, for the next request."),
    "max_tokens": integer(-2), "n_cmpl": integer(1, MAX_CHOICES), "n_probs": TOP_LOGPROBS,
    "logit_bias": either(array(array(either(BOOLEAN, STRING, number()), 2, 2)), OBJECT),
    "samplers": array(STRING), "repeat_last_n": described(integer(), "With a repeat_penalty: -1 or 64."),
    "return_tokens": BOOLEAN, "timings_per_token": BOOLEAN, "response_fields": array(STRING),
    "t_max_predict_ms": number(), "n_indent": integer(0), "cache_prompt": BOOLEAN, "id_slot": integer(),
    "n_keep": integer(), "n_cache_reuse": integer(), "priority": PRIORITY,
}  # fmt: skip
LLAMA_COMPLETION = body({"prompt": either(_PROMPT, array(_PROMPT, 1, MAX_CHOICES))}, _LLAMA)
_FILE = body({}, {"filename": STRING, "text": STRING})
INFILL: Schema = {
    **body(
        {},
        {
            **_LLAMA, "input_prefix": STRING, "input_suffix": STRING, "prompt": STRING,
            "input_extra": array(_FILE, high=llamacpp.MAX_FILES),
        },
    ),
    "anyOf": [
        {"required": [name], "properties": {name: STRING}} for name in ("input_prefix", "input_suffix")
    ],
}  # fmt: skip
TOKENIZE = body(
    {"content": STRING}, {"add_special": BOOLEAN, "parse_special": BOOLEAN, "with_pieces": BOOLEAN}
)
DETOKENIZE = body({"tokens": TOKEN_IDS}, {})
APPLY_TEMPLATE = body(
    {"messages": array(ref("Message"), low=1)}, {**TEMPLATE, "chat_template_kwargs": OBJECT}
)

_TEXTS = either(
    NAME,
    array(NAME, 1, embeddings.MAX_INPUTS),
    {**TOKEN_IDS, "minItems": 1},
    array({**TOKEN_IDS, "minItems": 1}, 1, embeddings.MAX_INPUTS),
)
_EMBED: dict[str, Schema] = {
    "model": MODEL, "dimensions": described(integer(1), "Only what the model has."), "priority": PRIORITY,
}  # fmt: skip
EMBEDDINGS = body({"input": _TEXTS}, {**_EMBED, "encoding_format": enum("float", "base64")})
OLLAMA_EMBED = body(
    {},
    {
        **_EMBED,
        "input": described(either(_TEXTS, enum("", [])), "None: the model is loaded."),
        "truncate": described(BOOLEAN, "Whether what is too long is cut; else it is refused."),
    },
)
OLLAMA_EMBEDDINGS = body({}, {**_EMBED, "prompt": STRING})
_NORM = {"embd_normalize": enum(embeddings.EUCLIDEAN)}
LLAMA_EMBEDDINGS = either(
    body({"content": _TEXTS}, {**_EMBED, **_NORM}),
    body({"input": _TEXTS}, {**_EMBED, **_NORM, "content": NULL}),
)

SCHEMAS: dict[str, Schema] = {
    "EmbeddingsRequest": EMBEDDINGS, "OllamaEmbedRequest": OLLAMA_EMBED,
    "OllamaEmbeddingsRequest": OLLAMA_EMBEDDINGS, "LlamaEmbeddingsRequest": LLAMA_EMBEDDINGS,
    "ChatRequest": CHAT, "CompletionRequest": COMPLETION, "ResponsesRequest": RESPONSES,
    "MessagesRequest": MESSAGES, "CountRequest": COUNT, "OllamaChatRequest": OLLAMA_CHAT,
    "OllamaGenerateRequest": OLLAMA_GENERATE, "ShowRequest": SHOW, "InfillRequest": INFILL,
    "LlamaCompletionRequest": LLAMA_COMPLETION, "TokenizeRequest": TOKENIZE,
    "DetokenizeRequest": DETOKENIZE, "ApplyTemplateRequest": APPLY_TEMPLATE,
    "Message": MESSAGE, "Tool": TOOL, "InputItem": INPUT_ITEM, "ResponseFormat": RESPONSE_FORMAT,
}  # fmt: skip
