"""Good bodies of all routes that take one, and what becomes of them when they are damaged."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
TURNS = [
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "Sun"},
    {"role": "assistant", "content": "Sun in Rome", "reasoning_content": "I was told"},
    USER,
]
SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "stop": ["\n\n", "END"],
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": -3},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sun"}]},
]
CLAUDE = {
    "max_tokens": 3, "system": [{"type": "text", "text": "Be brief."}], "messages": BLOCKS,
    "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
    "stop_sequences": ["END"], "thinking": {"type": "enabled", "budget_tokens": 9},
}  # fmt: skip
OPTIONS = {"num_predict": 3, "temperature": 0.1, "stop": ["x"], "seed": 1, "num_ctx": 4096}

GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": TURNS, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_completion_tokens": 3},
        {"messages": [SYSTEM, USER], "max_tokens": 3, "response_format": FORMAT, **SAMPLING},
        {"messages": [USER], "n": 2, "max_tokens": 2, "logprobs": True, "top_logprobs": 3},
    ],
    "/v1/completions": [
        {"prompt": "Once", "max_tokens": 3, "echo": True, **SAMPLING},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 2, "stream": True},
        {"prompt": [1, 2, 3], "max_tokens": 2, "guided_regex": "[a-c]{2}"},
        {"prompt": "x", "max_tokens": 2, "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "x", "max_tokens": 2, "grammar": 'root ::= "a" | "b"+'},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3, "instructions": "Be brief.", "stream": True},
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 3, "tool_choice": "auto",
            "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "store": False,
        },
    ],
    "/v1/messages": [{**CLAUDE, "stream": True}, {"messages": [USER], "max_tokens": 3, "temperature": 0.3}],
    "/v1/messages/count_tokens": [CLAUDE],
    "/api/chat": [
        {"messages": [SYSTEM, USER], "options": OPTIONS, "stream": True, "format": SCHEMA},
        {"messages": [USER], "tools": [TOOL], "options": OPTIONS, "stream": False, "think": False},
    ],
    "/api/generate": [
        {"prompt": "hi", "system": "Be brief.", "options": OPTIONS, "stream": False, "format": "json"},
        {"prompt": "hi", "raw": True, "options": OPTIONS, "keep_alive": "5m"},
    ],
    "/api/show": [{"model": "m", "verbose": True}],
    "/completion": [
        {"prompt": ["a", [1, "b", 2]], "n_predict": 3, "n_probs": 2, "return_tokens": True, **SAMPLING},
        {"prompt": "x", "n_predict": 2, "stream": True, "json_schema": SCHEMA, "samplers": ["top_k"]},
        {"prompt": "x", "n_predict": 0, "response_fields": ["content", "generation_settings/n_predict"]},
    ],
    "/completions": [
        {"prompt": {"prompt_string": "x"}, "n_predict": 2, "logit_bias": [["a", -2], [5, False]]}
    ],
    "/infill": [
        {
            "input_prefix": "def f(", "input_suffix": "return x", "prompt": "x", "n_predict": 2,
            "input_extra": [{"filename": "a.py", "text": "import os"}], "t_max_predict_ms": 50, "n_indent": 1,
        }
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}, {"input": [1, 2, 3]}],
    "/api/embed": [{"input": ["a", "b"], "truncate": True}],
    "/api/embeddings": [{"prompt": "a"}],
    "/embedding": [{"content": "a"}],
    "/embeddings": [{"input": [[1, 2], [3]], "embd_normalize": 2}],
    "/tokenize": [{"content": "<s>hé", "add_special": True, "parse_special": False, "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/apply-template": [{"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}}],
}  # fmt: skip
# What bounds the length of an answer: without it the damage would mostly be long answers.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, 1e308, -1e308, 2**31, 2**63, -(2**64), 10**40, "", " ", "x", "\0",
    "é😸", "{{ 7 * 7 }}", "<|im_end|>", "a" * 5000, "../../etc/passwd", "[" * 300, "(a|b)*" * 50, "{", [],
    {}, [[]], [None], {"": None}, {"type": "object"}, {"$ref": "#"}, {"type": "text"}, {"type": "function"},
    ["a", 1, None], [0, 10**9], {"role": "user"}, {"role": "assistant", "content": None}, "json", "auto",
]  # fmt: skip


def damaged(rng: random.Random, path: str) -> bytes:
    """A body for `path` with one to four things wrong, in its tree or in its bytes."""
    body = copy.deepcopy(rng.choice(GOOD[path]))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _damage_tree(rng, body)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _damage_bytes(rng, data) if rng.random() < 0.15 else data


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything inside, but for what bounds the answer."""
    keys = value.keys() - set(LIMITS) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in sorted(keys)]
    for _, key in list(found):
        if isinstance(value[key], (dict, list)):
            found += _places(value[key])
    return found


def _damage_tree(rng: random.Random, body: dict[str, Any]) -> None:
    places = _places(body)
    if not places:
        return
    container, key = rng.choice(places)
    kind = rng.randrange(7)
    if kind <= 2:
        container[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == 3:
        del container[key]
    elif kind == 4:
        other, name = rng.choice(places)
        container[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
    elif kind == 5:
        container[key] = [container[key]] * rng.choice((1, 2, 40))
    else:
        container[key] = _twisted(rng, container[key])


def _twisted(rng: random.Random, value: Any) -> Any:
    """Something like `value`."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float)):
        return rng.choice((-value, value * 10**6, float(value) + 0.5, str(value)))
    if isinstance(value, str):
        at = rng.randint(0, len(value))
        return value[:at] + rng.choice(("\ud800", "\0", "�", "{%", "<tool_call>", " ")) + value[at:]
    if isinstance(value, dict):
        return {f"{key}_": inner for key, inner in value.items()}
    return {str(i): inner for i, inner in enumerate(value)}


def _damage_bytes(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.randint(0, len(data)) for _ in range(2))
    noise = rng.randbytes(rng.randint(1, 8))
    return rng.choice((data[:a], data[:a] + data[b:], data[:b] + data[a:], data[:a] + noise + data[a:]))
