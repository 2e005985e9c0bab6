"""A request's way from logits to text: sampling a step, tokens taken in one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hetero.batch import Step
from hetero.embedding import Pool, split_rows
from hetero.protocols import GrammarLike, SamplerLike, TokenizerLike
from hetero.request import FinishReason, OutputDelta, Request, RequestError, Timings, TokenLogprob
from hetero.sampling.sampler import SamplerState
from hetero.text.detokenizer import Detokenizer
from spec.verify import verify

log = logging.getLogger(__name__)

Sink = Callable[[OutputDelta], None]


@dataclass(slots=True)
class Generation:
    """What the engine keeps of a request beside what the scheduler does. Times are of its clock."""

    request: Request
    sink: Sink
    state: SamplerState
    detokenizer: Detokenizer
    grammar: GrammarLike | None
    mask: np.ndarray | None
    first_step_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    pool: Pool | None = None  # of a request for embeddings
    embedding: list[float] | None = None
    error: str | None = None
    error_code: str | None = None
    error_field: str | None = None  # the client's name for what is at fault

    def fail(self, error: Exception) -> None:
        """Note why it is to end. What the client has asked for in vain is the operator's business, too."""
        self.error = one_line(error)
        if isinstance(error, RequestError):
            self.error_code, self.error_field = error.code, error.field
            log.warning("request %s ends early: %s", self.request.request_id, self.error)

    def timings(self) -> Timings:
        request, first_token = self.request, self.first_token_time
        timings = Timings(
            cache_n=request.num_cached_tokens,
            prompt_n=len(request.prompt_token_ids) - request.num_cached_tokens,
            predicted_n=len(request.output_token_ids),
            draft_n=self.num_drafted,
            draft_n_accepted=self.num_accepted,
        )
        if first_token is not None and self.first_step_time is not None and self.last_token_time is not None:
            timings.queue_seconds = self.first_step_time - request.arrival_time
            timings.prompt_seconds = first_token - self.first_step_time
            timings.predicted_seconds = self.last_token_time - first_token
        return timings


@dataclass(slots=True)
class Outcome:
    """What sampling did to the requests of a step, by position in the step.

    `tokens[i]` are those that request i got, in order: the first `num_accepted[i]` are its draft's.
    """

    tokens: list[list[int]]
    texts: list[str]
    logprobs: list[list[TokenLogprob]]
    num_accepted: list[int]
    finished: dict[str, FinishReason] = field(default_factory=dict)

    def sampled(self) -> list[int | None]:
        """The token behind the accepted ones, as Scheduler.update wants it."""
        return [
            tokens[count] if len(tokens) > count else None
            for tokens, count in zip(self.tokens, self.num_accepted, strict=True)
        ]


def sample_step(
    step: Step,
    generations: Mapping[str, Generation],
    sampler: SamplerLike,
    tokenizer: TokenizerLike,
    logits: np.ndarray,
    argmax: np.ndarray | None,
) -> Outcome:
    """Sample what a step's logits give and take it in: grammar, stop conditions, text.

    logits float32 [L, n_vocab] (may have no rows where argmax is enough), argmax int32 [L] or None.
    """
    size = len(step.requests)
    outcome = Outcome([[] for _ in range(size)], [""] * size, [[] for _ in range(size)], [0] * size)
    due = [i for i, sampled in enumerate(step.sampled) if sampled]
    first_rows, count = [], 0
    for i in due:
        first_rows.append(count)
        count += 1 + len(step.drafts[i])

    def sample(which: list[int], row: int) -> list[int | None]:
        rows = [first_rows[k] + row for k in which]
        here = [generations[step.requests[due[k]].request_id] for k in which]
        masks = [_mask(g) for g in here]
        if len(rows) == count:
            some, largest = logits, argmax
        else:
            some = logits[rows] if len(logits) else logits
            largest = None if argmax is None else argmax[rows]
        results = sampler.sample(some, [g.state for g in here], masks, largest)
        taken: list[int | None] = []
        for k, generation, result in zip(which, here, results, strict=True):
            if generation.error is None:
                generation.error = result.error
            taken.append(_take(outcome, due[k], generation, tokenizer, result.token_id, result.logprob))
        return taken

    if due:
        accepted = verify([step.drafts[i] for i in due], sample)
        for i, number in zip(due, accepted, strict=True):
            outcome.num_accepted[i] = number
    return outcome


def pool_step(step: Step, generations: Mapping[str, Generation], rows: np.ndarray) -> Outcome:
    """Take in the rows of a step that embeds, float32 [T, n_embd], and end what is complete."""
    size = len(step.requests)
    outcome = Outcome([[] for _ in range(size)], [""] * size, [[] for _ in range(size)], [0] * size)
    parts = split_rows(rows, step.num_scheduled_tokens)
    for request, start, due, part in zip(step.requests, step.starts, step.sampled, parts, strict=True):
        generation = generations.get(request.request_id)
        if generation is None or generation.pool is None:
            continue  # it ended when an earlier one of its steps failed
        generation.pool.add(start, part)
        if due and not request.abort_requested:
            outcome.finished[request.request_id] = FinishReason.STOP
            try:
                generation.embedding = generation.pool.result()
            except ValueError as error:
                generation.error = one_line(error)
                outcome.finished[request.request_id] = FinishReason.ERROR
    return outcome


def _take(
    outcome: Outcome,
    i: int,
    generation: Generation,
    tokenizer: TokenizerLike,
    token_id: int,
    logprob: TokenLogprob | None,
) -> int | None:
    """Note the next token of request i. None when the request ends with it, or is to end anyhow."""
    request = generation.request
    if request.abort_requested:
        return None
    reason: FinishReason | None = FinishReason.ERROR
    if generation.error is None:
        outcome.tokens[i].append(token_id)
        if logprob is not None:
            outcome.logprobs[i].append(logprob)
        text, reason = _take_token(generation, tokenizer, token_id)
        outcome.texts[i] += text
    if reason is not None:
        outcome.finished[request.request_id] = reason
        return None
    return token_id


def _mask(generation: Generation) -> np.ndarray | None:
    if generation.grammar is None or generation.mask is None:
        return None
    try:
        generation.grammar.fill_mask(generation.mask)
    except Exception as error:
        generation.fail(error)
        return None
    return generation.mask


def _take_token(
    generation: Generation, tokenizer: TokenizerLike, token_id: int
) -> tuple[str, FinishReason | None]:
    """The text that the token makes certain, and why the request ends with it, if it does."""
    params = generation.request.params
    text = ""
    try:
        finished = False
        if generation.grammar is not None:
            if not generation.grammar.accept(token_id):
                raise ValueError(f"token {token_id} was sampled but is not allowed")
            finished = generation.grammar.is_finished
        if token_id in params.stop_token_ids:
            return "", FinishReason.STOP
        if token_id in tokenizer.eog_ids:
            finished = finished or not params.ignore_eos
        else:
            text = generation.detokenizer.push(token_id)
    except Exception as error:
        generation.fail(error)
        return "", FinishReason.ERROR
    return text, FinishReason.STOP if finished or generation.detokenizer.stopped else None


def one_line(error: Exception) -> str:
    """An error's text in one line, bounded."""
    return " ".join(str(error).split())[:500] or type(error).__name__
