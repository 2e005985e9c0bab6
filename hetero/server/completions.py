"""/v1/completions: text or token ids in, text out."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from hetero.request import TokenLogprob
from hetero.server import openai
from hetero.server.choices import ChoicesWriter
from hetero.server.collect import Collected, Piece
from hetero.server.context import Context
from hetero.server.conversation import new_id, submit
from hetero.server.errors import ApiError, bad_field
from hetero.server.output import read_output
from hetero.server.respond import Answer
from hetero.server.validate import Fields, as_integer, wrong_type

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16  # the OpenAI API's default for this route
PROMPT_KINDS = "a string, an array of strings, an array of token ids or an array of such arrays"


async def prepare(body: dict[str, Any], context: Context) -> Answer:
    """Validate, tokenize and submit a completion request. Raises ApiError or RequestError."""
    fields, engine = Fields(body), context.engine
    fields.string("model")
    given = read_prompts(fields, engine.info.n_vocab, context.settings.max_choices)
    n = _refuse(fields, context.settings.max_choices, len(given))
    stream, include_usage = openai.stream_options(fields)
    logprobs = _logprobs(fields)
    echo, priority = fields.boolean("echo"), openai.priority(fields, context)
    if echo and logprobs is not None:
        raise bad_field(
            "echo", "cannot be combined with logprobs by this server", code="unsupported_parameter"
        )
    limit = openai.max_tokens(fields, "max_tokens", "max_completion_tokens")
    if not (fields.has("max_tokens") or fields.has("max_completion_tokens")):
        limit = DEFAULT_MAX_TOKENS
    params = openai.sampling_params(fields, engine.info.n_vocab, max_tokens=limit, logprobs=logprobs)
    grammar = await engine.text.compile_grammar(read_output(fields))
    prompts = await _encode(given, fields.string("suffix"), context)
    if not all(prompts):
        raise bad_field("prompt", "is empty: no tokens to start from")
    echoes = [p if isinstance(p, str) else engine.text.decode(p) for p in given] if echo else None
    answer_id = new_id("cmpl-")
    generation = submit(
        context,
        prompts,
        params,
        n,
        request_id=answer_id,
        prompt_field="prompt",
        grammar=grammar,
        priority=priority,
    )
    writer = CompletionWriter(answer_id, engine, params.logprobs is not None, include_usage, echoes, n)
    return Answer(generation, writer, stream)


async def _encode(given: list[str | list[int]], suffix: str | None, context: Context) -> list[list[int]]:
    """Token ids of each prompt; with a `suffix`, of what asks for the text before it."""
    text = context.engine.text
    if not suffix:
        return [p if isinstance(p, list) else await text.tokenize(p) for p in given]
    if not all(isinstance(p, str) for p in given):
        raise bad_field("suffix", "needs a prompt that is text, not token ids")
    return [await text.fill_in(str(p), suffix) for p in given]


def _refuse(fields: Fields, max_choices: int, num_prompts: int) -> int:
    """The number of answers to each prompt, once nothing is asked for that is not supported."""
    openai.refuse_unsupported(fields)
    n = openai.num_choices(fields, max_choices, num_prompts)
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != n:
        raise bad_field("best_of", "only a value equal to n is supported", code="unsupported_parameter")
    return n


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


class CompletionWriter(ChoicesWriter):
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        engine: AsyncEngine,
        with_logprobs: bool,
        include_usage: bool,
        echoes: list[str] | None,
        n: int,
    ) -> None:
        super().__init__(answer_id, engine.info.name, include_usage)
        self._engine = engine
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._n = n
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        index, delta = piece.index, piece.delta
        chunks = []
        if self._echoes is not None and index not in self._begun:
            chunks.append(self._choice(index, self._echo(index), [], None))
        self._begun.add(index)
        if delta.text or (self._with_logprobs and delta.logprobs):
            chunks.append(self._choice(index, delta.text, delta.logprobs, None))
        if piece.finish is not None:
            chunks.append(self._choice(index, "", [], piece.finish))
        return chunks

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        text = self._echo(index) + collected.text
        return self._choice(index, text, collected.logprobs, collected.finish)

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
