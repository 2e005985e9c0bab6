"""Answers in one piece, by the name of their schema, and errors."""

from __future__ import annotations

from hetero.server.openapi.shapes import (
    ANY,
    BOOLEAN,
    NULL,
    OBJECT,
    STRING,
    Schema,
    answer,
    array,
    either,
    enum,
    integer,
    number,
    or_null,
    ref,
)

_COUNT = integer(0)
_SECONDS = number(0)
_MAYBE_STRING = or_null(STRING)
_IDS = array(_COUNT)

TIMINGS = answer(
    {
        "queue_ms": _SECONDS, "cache_n": _COUNT, "prompt_n": _COUNT, "prompt_ms": _SECONDS,
        "prompt_per_token_ms": _SECONDS, "prompt_per_second": _SECONDS, "predicted_n": _COUNT,
        "predicted_ms": _SECONDS, "predicted_per_token_ms": _SECONDS, "predicted_per_second": _SECONDS,
    },
    {"draft_n": _COUNT, "draft_n_accepted": _COUNT},
)  # fmt: skip
USAGE = answer(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": answer({"cached_tokens": _COUNT}),
    },
    {"completion_tokens_details": answer({"reasoning_tokens": _COUNT})},
)
_TOKEN = {"token": STRING, "logprob": number(-9999, 0), "bytes": _IDS}
TOKEN_LOGPROB = answer({**_TOKEN, "top_logprobs": array(answer(_TOKEN))})
_CALL = answer(
    {"id": STRING, "type": enum("function"), "function": answer({"name": STRING, "arguments": STRING})}
)
_FINISH = enum("stop", "length", "tool_calls")
_CHAT_CHOICE = answer(
    {
        "index": _COUNT,
        "message": answer(
            {"role": enum("assistant"), "content": _MAYBE_STRING, "refusal": NULL},
            {"reasoning_content": STRING, "tool_calls": array(_CALL, low=1)},
        ),
        "logprobs": either(answer({"content": array(ref("TokenLogprob")), "refusal": NULL}), NULL),
        "finish_reason": _FINISH,
    }
)
_ENVELOPE = {"id": STRING, "created": _COUNT, "model": STRING, "usage": ref("Usage")}
_TIMED = {"timings": ref("Timings")}
CHAT = answer({**_ENVELOPE, "object": enum("chat.completion"), "choices": array(_CHAT_CHOICE, low=1)}, _TIMED)
_COMPLETION_CHOICE = answer(
    {
        "index": _COUNT,
        "text": STRING,
        "finish_reason": enum("stop", "length"),
        "logprobs": either(
            answer(
                {
                    "tokens": array(STRING),
                    "token_logprobs": array(number(-9999, 0)),
                    "top_logprobs": array({"type": "object", "additionalProperties": number(-9999, 0)}),
                    "text_offset": _IDS,
                }
            ),
            NULL,
        ),
    }
)
COMPLETION = answer(
    {**_ENVELOPE, "object": enum("text_completion"), "choices": array(_COMPLETION_CHOICE, low=1)}, _TIMED
)

_STATUS = enum("in_progress", "completed", "incomplete")
_CONTENT = either(
    answer({"type": enum("output_text"), "text": STRING, "annotations": array(ANY), "logprobs": array(ANY)}),
    answer({"type": enum("reasoning_text"), "text": STRING}),
)
_ITEM = {"id": STRING, "status": _STATUS}
_OUTPUT = either(
    answer({**_ITEM, "type": enum("message"), "role": enum("assistant"), "content": array(_CONTENT)}),
    answer({**_ITEM, "type": enum("reasoning"), "summary": array(ANY), "content": array(_CONTENT)}),
    answer({**_ITEM, "type": enum("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING}),
)
_RESPONSES_USAGE = answer(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": answer({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": answer({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)
RESPONSE: Schema = answer(
    {
        "id": STRING, "object": enum("response"), "created_at": _COUNT, "model": STRING, "store": BOOLEAN,
        "status": enum("in_progress", "completed", "incomplete", "failed"), "output": array(_OUTPUT),
        "error": or_null(answer({"code": STRING, "message": STRING})),
        "incomplete_details": or_null(answer({"reason": enum("max_output_tokens")})),
        "usage": or_null(_RESPONSES_USAGE), "truncation": enum("disabled"), "background": enum(False),
        "instructions": _MAYBE_STRING, "max_output_tokens": or_null(integer()), "metadata": ANY,
        "parallel_tool_calls": BOOLEAN, "previous_response_id": _MAYBE_STRING, "reasoning": OBJECT,
        "temperature": number(), "text": OBJECT, "tool_choice": either(STRING, OBJECT),
        "tools": array(OBJECT), "top_p": number(), "user": ANY,
    },
    _TIMED,
)  # fmt: skip
DELETED = answer({"id": STRING, "object": enum("response.deleted"), "deleted": enum(True)})
INPUT_ITEMS = answer(
    {"object": enum("list"), "data": array(OBJECT), "has_more": enum(False)},
    {"first_id": STRING, "last_id": STRING},
)

_BLOCK = either(
    answer({"type": enum("text"), "text": STRING}),
    answer({"type": enum("thinking"), "thinking": STRING, "signature": STRING}),
    answer({"type": enum("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
)
_ANTHROPIC_COUNTS = (
    "input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens",
)  # fmt: skip
MESSAGE = answer(
    {
        "id": STRING, "type": enum("message"), "role": enum("assistant"), "model": STRING,
        "content": array(_BLOCK), "stop_sequence": _MAYBE_STRING,
        "stop_reason": enum("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "usage": answer(dict.fromkeys(_ANTHROPIC_COUNTS, _COUNT)),
    }
)  # fmt: skip

_HEAD = {"model": STRING, "created_at": STRING, "done": enum(True)}
_COSTS = {
    "done_reason": enum("stop", "length", "load"), "total_duration": _COUNT, "load_duration": _COUNT,
    "prompt_eval_count": _COUNT, "prompt_eval_duration": _COUNT, "eval_count": _COUNT,
    "eval_duration": _COUNT, "logprobs": array(ref("TokenLogprob")),
}  # fmt: skip
_OLLAMA_CALL = answer(
    {"id": STRING, "function": answer({"index": _COUNT, "name": STRING, "arguments": OBJECT})}
)
_SAID: dict[str, Schema] = {"thinking": STRING, "tool_calls": array(_OLLAMA_CALL)}
OLLAMA_CHAT = answer(
    {**_HEAD, "message": answer({"role": enum("assistant"), "content": STRING}, _SAID)}, _COSTS
)
OLLAMA_GENERATE = answer({**_HEAD, "response": STRING}, {**_COSTS, **_SAID})
DETAILS = answer(
    {
        "parent_model": STRING, "format": enum("gguf"), "family": STRING, "families": array(STRING),
        "parameter_size": STRING, "quantization_level": STRING,
    }
)  # fmt: skip
_MODEL = {
    "name": STRING, "model": STRING, "modified_at": STRING, "size": _COUNT, "digest": STRING,
    "details": ref("ModelDetails"),
}  # fmt: skip
TAGS = answer({"models": array(answer(_MODEL))})
PS = answer({"models": array(answer({**_MODEL, "expires_at": STRING, "context_length": _COUNT}))})
SHOW = answer(
    {
        **dict.fromkeys(("license", "modelfile", "parameters", "template", "modified_at"), STRING),
        "details": ref("ModelDetails"), "model_info": OBJECT, "capabilities": array(STRING),
    }
)  # fmt: skip

MODEL = answer(
    {
        "id": STRING, "object": enum("model"), "type": enum("model"), "created": _COUNT,
        "created_at": STRING, "display_name": STRING, "owned_by": STRING, "max_input_tokens": _COUNT,
        "meta": answer(dict.fromkeys(("n_ctx", "n_vocab", "n_params", "size"), _COUNT)),
    }
)  # fmt: skip
_ALSO = answer(
    {"name": STRING, "model": STRING, "capabilities": array(STRING), "details": ref("ModelDetails")}
)
MODELS = answer(
    {
        "object": enum("list"), "data": array(ref("Model")), "models": array(_ALSO), "first_id": STRING,
        "last_id": STRING, "has_more": enum(False),
    }
)  # fmt: skip

_LLAMA = {
    "index": _COUNT, "content": STRING, "tokens": _IDS, "id_slot": integer(), "stop": BOOLEAN,
    "model": STRING, "tokens_predicted": _COUNT, "tokens_evaluated": _COUNT, "generation_settings": OBJECT,
    "prompt": STRING, "has_new_line": BOOLEAN, "truncated": BOOLEAN, "tokens_cached": _COUNT,
    "stop_type": enum("limit", "eos", "word"), "stopping_word": STRING,
}  # fmt: skip
_PROBABILITY = {"id": _COUNT, **_TOKEN}
_PROBABILITIES = array(answer({**_PROBABILITY, "top_logprobs": array(answer(_PROBABILITY))}))
_WHOLE = answer(_LLAMA, {"timings": ref("Timings"), "completion_probabilities": _PROBABILITIES})
# With `response_fields` any part of it; of several answers a list.
LLAMA_COMPLETION = either(_WHOLE, OBJECT, array(either(_WHOLE, OBJECT)))
TOKENS = answer(
    {"tokens": either(_IDS, array(answer({"id": _COUNT, "piece": either(STRING, array(integer(0, 255)))})))}
)
PROPS = answer(
    {
        "default_generation_settings": OBJECT, "total_slots": _COUNT, "model_alias": STRING,
        "model_path": STRING, "chat_template": STRING, "bos_token": STRING, "eos_token": STRING,
        "modalities": OBJECT, "build_info": STRING, "is_sleeping": BOOLEAN,
    }
)  # fmt: skip
SLOTS = array(answer({"id": _COUNT, "n_ctx": _COUNT, "is_processing": BOOLEAN}))

_TIER = answer({"name": STRING, "used": _COUNT, "total": _COUNT, "text": STRING})
STATUS = answer(
    {
        "ok": BOOLEAN, "reason": STRING, "model": OBJECT, "about": or_null(OBJECT),
        "placements": array(OBJECT), "notes": array(STRING), "now": OBJECT, "tiers": array(_TIER),
    }
)  # fmt: skip
HEALTH = answer({"status": enum("ok")})
ILL = answer({"status": enum("unavailable"), "reason": STRING})

ERROR = answer(
    {"error": answer({"message": STRING, "type": STRING, "param": _MAYBE_STRING, "code": _MAYBE_STRING})}
)
ANTHROPIC_ERROR = answer(
    {
        "type": enum("error"),
        "error": answer({"type": STRING, "message": STRING}),
        "request_id": _MAYBE_STRING,
    }
)
OLLAMA_ERROR = answer({"error": STRING})

COUNTED = answer({"input_tokens": _COUNT})
VERSION = answer({"version": STRING})
TEXT = answer({"content": STRING})
PROMPT = answer({"prompt": STRING})

_VECTOR = array(number())
_PROMPT_USAGE = answer({"prompt_tokens": _COUNT, "total_tokens": _COUNT})
_EMBEDDING = answer(
    {"object": enum("embedding"), "index": _COUNT, "embedding": either(_VECTOR, STRING)}
)  # as text: base64 of float32
EMBEDDINGS = answer(
    {"object": enum("list"), "data": array(_EMBEDDING), "model": STRING, "usage": _PROMPT_USAGE}
)
OLLAMA_EMBED = answer(
    {
        "model": STRING, "embeddings": array(_VECTOR), "total_duration": _COUNT, "load_duration": _COUNT,
        "prompt_eval_count": _COUNT,
    }
)  # fmt: skip
OLLAMA_EMBEDDINGS = answer({"embedding": _VECTOR})
LLAMA_EMBEDDINGS = array(answer({"index": _COUNT, "embedding": array(_VECTOR)}))

SCHEMAS: dict[str, Schema] = {
    "Embeddings": EMBEDDINGS, "OllamaEmbed": OLLAMA_EMBED, "OllamaEmbeddings": OLLAMA_EMBEDDINGS,
    "LlamaEmbeddings": LLAMA_EMBEDDINGS,
    "Chat": CHAT, "Completion": COMPLETION, "Response": RESPONSE, "DeletedResponse": DELETED,
    "InputItems": INPUT_ITEMS, "AnthropicMessage": MESSAGE, "Count": COUNTED, "OllamaChat": OLLAMA_CHAT,
    "OllamaGenerate": OLLAMA_GENERATE, "Show": SHOW, "Version": VERSION, "Tags": TAGS, "Ps": PS,
    "Models": MODELS, "Model": MODEL, "LlamaCompletion": LLAMA_COMPLETION, "Tokens": TOKENS, "Text": TEXT,
    "Prompt": PROMPT, "Props": PROPS, "Slots": SLOTS, "Status": STATUS, "Health": HEALTH, "Ill": ILL,
    "Timings": TIMINGS, "Usage": USAGE, "TokenLogprob": TOKEN_LOGPROB, "ModelDetails": DETAILS,
    "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR,
}  # fmt: skip
