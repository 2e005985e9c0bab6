"""What the routes of OpenAI's dialect have in common: sampling fields, tokens as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetero.request import TokenLogprob
from hetero.sampling.params import MAX_LOGPROBS, ParamError, SamplingParams
from hetero.server.errors import bad_field
from hetero.server.validate import Fields, as_integer, as_number, wrong_type

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine
    from hetero.server.context import Context

MAX_PRIORITY = 1000
MAX_STOPS = 16  # the OpenAI API allows 4; agents send more
# Both are work for the engine's thread, on which everybody's steps wait.
MAX_STOP_CHARS = 4096  # of each
MAX_STOP_IDS = 1024

# Fields of other servers that would change the answer and are not supported, with the value that asks for
# nothing. Anything else that is unknown is ignored, as clients send fields of their own.
UNSUPPORTED: dict[str, Any] = {
    "bad_words": [], "min_tokens": 0, "prompt_logprobs": None, "include_stop_str_in_output": False,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": [], "use_beam_search": False, "typical_p": 1, "mirostat": 0, "dry_multiplier": 0,
    "xtc_probability": 0, "dynatemp_range": 0, "top_n_sigma": -1, "lora": [], "chat_template": "",
}  # fmt: skip


def refuse_unsupported(fields: Fields, table: dict[str, Any] = UNSUPPORTED) -> None:
    """400 naming the first field of `table` that asks for something."""
    for name, neutral in table.items():
        value = fields.body.get(name)
        # False equals 0 in Python, not in JSON
        if value is not None and (value != neutral or isinstance(value, bool) != isinstance(neutral, bool)):
            raise bad_field(fields.name(name), "not supported by this server", code="unsupported_parameter")


def refuse_last_n(fields: Fields) -> None:
    """400 for `repeat_last_n` where it would matter: repeat_penalty counts all tokens here."""
    if fields.number("repeat_penalty", 1.0) != 1.0 and fields.integer("repeat_last_n") not in (None, -1, 64):
        raise bad_field(
            fields.name("repeat_last_n"),
            "repeat_penalty counts all tokens here",
            code="unsupported_parameter",
        )


def sampling_params(
    fields: Fields, n_vocab: int, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The request's SamplingParams, checked. Raises ApiError naming the field."""
    repeat_penalty = fields.number("repeat_penalty", 1.0)  # llama.cpp's name for it
    top_k = fields.integer("top_k", low=-1)  # vLLM's -1 and llama.cpp's 0 both mean off
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0),
        top_k=max(top_k or 0, 0),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", repeat_penalty),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed"),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields, n_vocab),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )
    try:
        params.validate(n_vocab)
    except ParamError as error:
        raise bad_field(fields.name(error.field), str(error).partition(": ")[2]) from None
    return params


def max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of `names` that is given. -1, which some clients send, means no limit, as absence does."""
    given = [value for value in [_limit(fields, name) for name in names] if value is not None]
    return None if not given or given[0] == -1 else given[0]


def _limit(fields: Fields, name: str) -> int | None:
    value = fields.integer(name, low=-1)
    if value == 0:
        raise bad_field(name, "must be at least 1, not 0")
    return value


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.body.get("stop")
    if value is None:
        return ()
    name = fields.name("stop")
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong_type(name, "a string or an array of strings", value)
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type(name, "a string or an array of strings", stop)
    check_stops(name, stops)
    return tuple(stops)


def check_stops(name: str, stops: Sequence[str]) -> None:
    """400 naming the field for too many, or too long ones."""
    if len(stops) > MAX_STOPS:
        raise bad_field(name, f"at most {MAX_STOPS} sequences are allowed, not {len(stops)}")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        raise bad_field(name, f"a sequence may have at most {MAX_STOP_CHARS} characters, not {longest}")


def _stop_token_ids(fields: Fields, n_vocab: int) -> tuple[int, ...]:
    ids = tuple(as_integer("stop_token_ids", v) for v in fields.array("stop_token_ids") or ())
    if len(ids) > MAX_STOP_IDS:
        raise bad_field(fields.name("stop_token_ids"), f"at most {MAX_STOP_IDS} are allowed, not {len(ids)}")
    for token_id in ids:
        if not 0 <= token_id < n_vocab:
            raise bad_field("stop_token_ids", f"token id {token_id} is outside the vocabulary of {n_vocab}")
    return ids


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = {}
    for key, value in (fields.object("logit_bias") or {}).items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 12):
            raise bad_field("logit_bias", f"keys must be token ids, not {key[:40]!r}")
        bias[int(key)] = as_number("logit_bias", value)
    return bias


def priority(fields: Fields, context: Context) -> int:
    """In every dialect as vLLM has it: requests with lower numbers come first, 0 is what everybody has.

    ApiError 400 below 0 where the operator lets nobody come first.
    """
    given = fields.integer("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0
    if given < 0 and context.settings.yield_only:
        raise bad_field(
            "priority", f"must be at least 0 on this server, where nobody goes first, not {given}"
        )
    return given


def num_choices(fields: Fields, limit: int, prompts: int = 1) -> int:
    n = fields.integer("n", low=1, high=limit) or 1
    if n * prompts > limit:
        raise bad_field("n", f"at most {limit} answers per request, not {prompts} prompts x {n}")
    return n


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """(stream, include_usage). stream_options without stream is ignored."""
    stream = fields.boolean("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options.")
    return stream, options.boolean("include_usage") and stream


def token_string(engine: AsyncEngine, token_id: int) -> tuple[str, list[int]]:
    """(text, bytes) of a token for logprobs. A part of a character reads `bytes:\\xf0\\x9f`, as OpenAI's
    does; a control token has a name but no bytes, since it adds none to the text."""
    raw = engine.text.token_bytes(token_id)
    if not raw:
        return engine.text.token_text(token_id), []
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), list(raw)


def chat_logprobs(engine: AsyncEngine, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = token_string(engine, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    return {
        "content": [
            {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
            for item in logprobs
        ],
        "refusal": None,
    }


def finite(logprob: float) -> float:
    """JSON has no -Infinity; OpenAI writes -9999 for a token that is all but impossible."""
    return max(logprob, -9999.0)


def check_top_logprobs(param: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_field(param, f"must be between 0 and {MAX_LOGPROBS}, not {value}")
    return value
