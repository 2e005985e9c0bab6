"""llama-server's fields of /completion and /infill.

Format: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. `id_slot`, `n_keep` and
`cache_prompt` mean nothing here: there are no slots to choose, no context is shifted, and what is cached
changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero.sampling.params import SamplingParams
from hetero.server import openai
from hetero.server.context import Context
from hetero.server.errors import bad_field
from hetero.server.output import Output, read_output
from hetero.server.validate import Fields, as_integer, as_number, wrong_type
from hetero.text.service import OtherFile

# llama-server samples so where a request says nothing; its clients count on it.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # what leaves a sampler out
UNSUPPORTED = {
    **openai.UNSUPPORTED, "post_sampling_probs": False, "return_progress": False, "min_keep": 0,
}  # fmt: skip
MAX_FILES = 1024
NEVER = -100.0  # the bias of a token that must not come

Prompt = str | list[int | str]


@dataclass(frozen=True, slots=True)
class Ending:
    """When an answer ends early: after `seconds` of generation once it has a line break, 0: never; before
    the first later line with an indent below `indent` columns."""

    seconds: float
    indent: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for besides its prompt. `evaluate_only`: n_predict 0, which warms the cache."""

    params: SamplingParams
    n: int
    output: Output | None
    stream: bool
    evaluate_only: bool
    ending: Ending
    return_tokens: bool
    timings_per_token: bool
    response_fields: tuple[str, ...] | None
    priority: int


def read(fields: Fields, context: Context) -> Asked:
    """Raises ApiError naming the field."""
    openai.refuse_unsupported(fields, UNSUPPORTED)
    for name in ("id_slot", "n_keep", "n_cache_reuse"):
        fields.integer(name)
    fields.boolean("cache_prompt", True)
    limit = fields.integer("n_predict", low=-2)  # -2: until the context is full
    if limit is None:
        limit = fields.integer("max_tokens", low=-2)
    names = fields.array("response_fields")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise wrong_type("response_fields", "an array of strings", names)
    return Asked(
        params=_params(fields, context, None if limit is None or limit < 0 else max(1, limit)),
        n=fields.integer("n_cmpl", low=1, high=context.settings.max_choices) or 1,
        output=read_output(fields),
        stream=fields.boolean("stream"),
        evaluate_only=limit == 0,
        ending=Ending(
            max(0.0, fields.number("t_max_predict_ms", 0.0)) / 1e3, fields.integer("n_indent", low=0) or 0
        ),
        return_tokens=fields.boolean("return_tokens"),
        timings_per_token=fields.boolean("timings_per_token"),
        response_fields=None if not names else tuple(names),
        priority=openai.priority(fields, context),
    )


def _params(fields: Fields, context: Context, max_tokens: int | None) -> SamplingParams:
    body = {**DEFAULTS, **{k: v for k, v in fields.body.items() if v is not None}}
    body["temperature"] = max(0.0, as_number("temperature", body["temperature"]))
    body["logit_bias"] = {}
    if body.get("seed") == -1:
        del body["seed"]
    samplers = fields.array("samplers")
    left_out: dict[str, Any] = (
        {} if samplers is None else {k: v for k, v in NEUTRAL.items() if k not in samplers}
    )
    openai.refuse_last_n(fields)
    logprobs = openai.check_top_logprobs("n_probs", fields.integer("n_probs", low=0))
    params = openai.sampling_params(
        Fields(body), context.engine.info.n_vocab, max_tokens=max_tokens, logprobs=logprobs or None
    )
    return replace(params, **left_out)


async def read_bias(fields: Fields, context: Context) -> dict[int, float]:
    """`logit_bias`: [[token id or text, bias or false], ...], or an object with them as keys."""
    given = fields.body.get("logit_bias")
    if given is None:
        return {}
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list):
        raise wrong_type("logit_bias", "an array of pairs or an object", given)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise bad_field("logit_bias", "must have pairs of a token and a number")
        token, bias = pair
        value = NEVER if bias is False else as_number("logit_bias", bias)
        for token_id in await _tokens(token, isinstance(given, dict), context):
            if not 0 <= token_id < context.engine.info.n_vocab:
                raise bad_field("logit_bias", f"token id {token_id} is outside the vocabulary")
            found[token_id] = min(max(value, -100.0), 100.0)
    return found


async def _tokens(token: Any, is_key: bool, context: Context) -> Sequence[int]:
    if isinstance(token, str):
        if is_key and token.isascii() and token.isdigit() and len(token) < 12:
            return [int(token)]
        return await context.engine.text.tokenize(token, add_special=False)
    return [as_integer("logit_bias", token)]


def read_prompts(fields: Fields, context: Context) -> tuple[list[Prompt], bool]:
    """(the prompts, whether they came as a list of prompts, which is answered by a list)."""
    prompt = fields.body.get("prompt")
    if prompt is None:
        raise bad_field("prompt", "is missing")
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, dict):
        return [_of_object(prompt)], False
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be text, token ids, or an array of prompts, and not empty")
    numbers = any(isinstance(part, int) and not isinstance(part, bool) for part in prompt)
    if numbers:
        return [_mixed(prompt, context)], False
    if len(prompt) > context.settings.max_choices:
        raise bad_field("prompt", f"at most {context.settings.max_choices} prompts, not {len(prompt)}")
    return [_one(part, context) for part in prompt], True


def _one(part: Any, context: Context) -> Prompt:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        return _of_object(part)
    if isinstance(part, list) and part:
        return _mixed(part, context)
    raise bad_field("prompt", "each prompt must be text, token ids or an object with prompt_string")


def _of_object(part: dict[str, Any]) -> str:
    if part.get("multimodal_data"):
        raise bad_field("prompt", "multimodal_data is not supported by this model")
    text = part.get("prompt_string")
    if not isinstance(text, str):
        raise bad_field("prompt", "an object must have prompt_string")
    return text


def _mixed(parts: list[Any], context: Context) -> list[int | str]:
    found: list[int | str] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
            continue
        token_id = as_integer("prompt", part)
        if not 0 <= token_id < context.engine.info.n_vocab:
            raise bad_field("prompt", f"token id {token_id} is outside the vocabulary")
        found.append(token_id)
    return found


async def encode(prompt: Prompt, context: Context) -> list[int]:
    """Token ids; BOS only before text at the start."""
    text = context.engine.text
    if isinstance(prompt, str):
        return await text.tokenize(prompt)
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids += await text.tokenize(part, add_special=i == 0)
        else:
            ids.append(part)
    return ids


def read_files(fields: Fields) -> list[OtherFile]:
    """`input_extra`: [{"filename": ..., "text": ...}, ...]."""
    found = []
    given = fields.array("input_extra") or []
    if len(given) > MAX_FILES:
        raise bad_field("input_extra", f"at most {MAX_FILES} files, not {len(given)}")
    for i, value in enumerate(given):
        if not isinstance(value, dict):
            raise wrong_type(f"input_extra[{i}]", "an object", value)
        inner = Fields(value, f"input_extra[{i}].")
        text, name = inner.string("text"), inner.string("filename")
        found.append(OtherFile(text or "", *([name] if name else [])))
    return found
