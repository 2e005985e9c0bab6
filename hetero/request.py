"""The one internal form of a generation request, and of what comes back."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from hetero.sampling.params import SamplingParams

CLIENT: ContextVar[str] = ContextVar("client", default="")  # Request.client of what is being answered
TRACE_PARENT: ContextVar[str] = ContextVar("trace_parent", default="")  # and Request.trace_parent


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its blocks given back; recomputed on return
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-generation token, stop string or stop token
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client went away or the server is draining
    ERROR = "error"  # the device failed under it


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way through the engine.

    Its tokens are `prompt_token_ids + output_token_ids`. `num_computed_tokens` of them have their
    KV in `block_tables` (or will have once the steps in flight end); the scheduler makes that
    number catch up with `num_tokens`, whether by prefill, decode or after a preemption.
    `block_tables[g]` is the block table of KV group g (see hetero.kv.groups).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float = field(default_factory=time.monotonic)
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were found, not computed
    tier_tokens: dict[str, int] = field(default_factory=dict)  # of these in "host" memory or on "disk"
    cache_scope: str = ""  # finds only what requests of the same scope have computed
    block_tables: list[list[int]] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_in_flight: int = 0  # steps that compute tokens of it and whose results are not in yet
    abort_requested: bool = False
    client: str = ""  # who asks: a digest of the API key; "" where none is needed
    trace_parent: str = ""  # the W3C traceparent that came with it
    shown: Mapping[int, bytes] = field(default_factory=dict)  # control tokens that the text is to hold
    priority: int = 0  # lower ones come first, see queues.py
    pooling: str | None = None  # nothing is generated but one vector, see embedding.py

    @property
    def embeds(self) -> bool:
        return self.pooling is not None

    @property
    def needs_every_row(self) -> bool:
        """Whether all of it must be computed, whatever of it is in the cache."""
        return self.embeds and self.pooling != "last"

    @property
    def in_flight(self) -> bool:
        return self.num_in_flight > 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def forget_found(self) -> None:
        """Nothing was found after all."""
        self.num_cached_tokens = 0
        self.tier_tokens.clear()

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output, without building the whole list."""
        n_prompt = len(self.prompt_token_ids)
        if stop <= n_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= n_prompt:
            return self.output_token_ids[start - n_prompt : stop - n_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n_prompt]


@dataclass(slots=True)
class TokenLogprob:
    """Log-probabilities (natural log, of the model's own distribution) at one output position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Timings:
    """What one request cost, under llama-server's names: numbers of tokens, and seconds.

    A request waits `queue_seconds` for its first step. The prompt's time runs from there to the first token,
    the time of what was predicted from there to the last token. `draft_n` tokens were guessed and computed,
    `draft_n_accepted` of them were right.
    """

    queue_seconds: float = 0.0
    cache_n: int = 0
    prompt_n: int = 0  # tokens that were computed, not found
    prompt_seconds: float = 0.0
    predicted_n: int = 0
    predicted_seconds: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(slots=True)
class OutputDelta:
    """What a request produced since the last delta. The last one has `finish_reason` set.

    `text` holds whole UTF-8 characters only and never a part of a stop string. Token ids and
    logprobs are those generated since the last delta, whether or not their text is out yet.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None  # as in RequestError, where there is one
    error_field: str | None = None  # likewise: what the client asked for could not be done after all
    stop_string: str | None = None  # in the last delta: the one that was found
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timings: Timings | None = None  # in the last delta
    embedding: list[float] | None = None  # in the last delta, where one was asked for


class RequestError(ValueError):
    """A request that cannot be served as asked. `field` is the client's name for what is wrong,
    `code` a machine-readable reason such as "context_length_exceeded"."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code
