"""/v1/completions: text or token ids in, text out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hetero.request import OutputDelta, TokenLogprob
from hetero.server import openai
from hetero.server.errors import ApiError, bad_field
from hetero.server.generate import Active, Answer, Collected, Generation, Usage
from hetero.server.settings import ServerSettings
from hetero.server.validate import Fields, as_integer, wrong_type

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16  # the OpenAI API's default for this route
PROMPT_KINDS = "a string, an array of strings, an array of token ids or an array of such arrays"


async def prepare(
    body: dict[str, Any], engine: AsyncEngine, settings: ServerSettings, active: Active
) -> tuple[Answer, Generation]:
    """Validate, tokenize and submit a completion request. Raises ApiError, ParamError or RequestError."""
    fields = Fields(body)
    fields.string("model")
    given = read_prompts(fields, engine.info.n_vocab, settings.max_choices)
    openai.refuse_unsupported(fields)
    if fields.string("suffix"):
        raise bad_field("suffix", "not supported by this server yet", code="unsupported_parameter")
    n = openai.num_choices(fields, settings.max_choices, len(given))
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != n:
        raise bad_field("best_of", "only a value equal to n is supported", code="unsupported_parameter")
    stream, include_usage = openai.stream_options(fields)
    logprobs = _logprobs(fields)
    echo = fields.boolean("echo")
    if echo and logprobs is not None:
        raise bad_field(
            "echo", "cannot be combined with logprobs by this server", code="unsupported_parameter"
        )
    limit = openai.max_tokens(fields, "max_tokens", "max_completion_tokens")
    if not (fields.has("max_tokens") or fields.has("max_completion_tokens")):
        limit = DEFAULT_MAX_TOKENS
    params = openai.sampling_params(fields, engine.info.n_vocab, max_tokens=limit, logprobs=logprobs)
    grammar = await openai.compile_grammar(engine, fields)
    prompts = [p if isinstance(p, list) else await engine.text.tokenize(p) for p in given]
    if not all(prompts):
        raise bad_field("prompt", "is empty: no tokens to start from")
    echoes = [p if isinstance(p, str) else engine.text.decode(p) for p in given] if echo else None
    answer = Answer(
        id=openai.new_id("cmpl"),
        model=engine.info.name,
        shape=CompletionShape(engine, params.logprobs is not None, echoes, n),
        usage=Usage(n, sum(map(len, prompts))),
        num_choices=n * len(prompts),
        stream=stream,
        include_usage=include_usage,
    )
    streams = openai.submit_all(
        engine, prompts, params, n, request_id=answer.id, grammar=grammar, prompt_field="prompt"
    )
    return answer, Generation(streams, active)


def read_prompts(fields: Fields, n_vocab: int, limit: int) -> list[str | list[int]]:
    """The prompts, each text or token ids. Raises ApiError naming `prompt`."""
    prompt = fields.body.get("prompt")
    if prompt is None:
        raise bad_field("prompt", "is missing")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise wrong_type("prompt", PROMPT_KINDS, prompt)
    if not prompt:
        raise bad_field("prompt", "is empty")
    nested = isinstance(prompt[0], (list, str))
    if not nested:
        return [_token_ids(prompt, n_vocab)]
    if len(prompt) > limit:
        raise bad_field("prompt", f"at most {limit} prompts per request, not {len(prompt)}")
    if all(isinstance(p, str) for p in prompt):
        return list(prompt)
    if all(isinstance(p, list) for p in prompt):
        return [_token_ids(p, n_vocab) for p in prompt]
    raise bad_field("prompt", f"must be {PROMPT_KINDS}, not a mixture")


def _token_ids(values: list[Any], n_vocab: int) -> list[int]:
    ids = [as_integer("prompt", v) for v in values]
    if not ids:
        raise bad_field("prompt", "is empty")
    for token_id in ids:
        if not 0 <= token_id < n_vocab:
            raise bad_field("prompt", f"token id {token_id} is outside the vocabulary of {n_vocab}")
    return ids


def _logprobs(fields: Fields) -> int | None:
    if fields.has("top_logprobs"):
        raise bad_field("top_logprobs", "belongs to chat; here `logprobs` is the number of alternatives")
    if isinstance(fields.body.get("logprobs"), bool):
        raise ApiError(400, "logprobs: must be a number of alternatives, not a boolean", param="logprobs")
    return openai.check_top_logprobs("logprobs", fields.integer("logprobs"))


class CompletionShape:
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, engine: AsyncEngine, with_logprobs: bool, echoes: list[str] | None, n: int) -> None:
        self._engine = engine
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._n = n
        self._offsets: dict[int, _Offsets] = {}

    def chunks(self, index: int, delta: OutputDelta, first: bool) -> Iterable[dict[str, Any]]:
        if first and self._echoes is not None:
            yield self._choice(index, self._echo(index), [], None)
        if delta.text or (self._with_logprobs and delta.logprobs):
            yield self._choice(index, delta.text, delta.logprobs, None)
        if delta.finish_reason is not None:
            yield self._choice(index, "", [], delta.finish_reason.value)

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        text = self._echo(index) + collected.text
        return self._choice(index, text, collected.logprobs, collected.finish_reason)

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._n]

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        shown = self._logprobs(index, logprobs) if self._with_logprobs and logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs (the chosen token always among them), text_offset."""
        offsets = self._offsets.setdefault(index, _Offsets())
        names = [openai.token_string(self._engine, item.token_id)[0] for item in logprobs]
        tops = []
        for name, item in zip(names, logprobs, strict=True):
            top = {openai.token_string(self._engine, t)[0]: openai.finite(v) for t, v in item.top}
            top.setdefault(name, openai.finite(item.logprob))
            tops.append(top)
        return {
            "tokens": names,
            "token_logprobs": [openai.finite(item.logprob) for item in logprobs],
            "top_logprobs": tops,
            "text_offset": [offsets.of(self._engine.text.token_bytes(item.token_id)) for item in logprobs],
        }


class _Offsets:
    """The number of whole characters before each token of one choice."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def of(self, token: bytes) -> int:
        before = self._characters
        self._characters += len(self._decoder.decode(token))
        return before
