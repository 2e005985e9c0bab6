"""What a client may ask of the sampler, checked once, before a request enters the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_LOGPROBS = 20  # the OpenAI API's own bound for top_logprobs


class ParamError(ValueError):
    """A sampling field that cannot be honoured. `field` is the client's name for it."""

    def __init__(self, field_name: str, message: str):
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request. Defaults sample from the model's own distribution.

    `max_tokens` None means "until the context is full". `temperature` 0 is greedy and ignores
    `seed`. `top_k` 0, `top_p` 1, `min_p` 0 switch the filter off. `logprobs` None returns none,
    k returns the chosen token's log-probability and the k most likely. `logit_bias` is added to
    the logits before everything else. Penalties follow the OpenAI definitions (presence,
    frequency: over generated tokens) and the CTRL paper (repetition: over prompt and generated
    tokens). `seed` None draws one per request.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, n_vocab: int) -> None:
        """Raise ParamError naming the first field that is out of range."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParamError("max_tokens", f"must be at least 1, not {self.max_tokens}")
        ranges = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
        )
        for name, value, low, high in ranges:
            if not (math.isfinite(value) and low <= value <= high):
                raise ParamError(name, f"must be between {low:g} and {high:g}, not {value:g}")
        if self.top_k < 0:
            raise ParamError("top_k", f"must be 0 (off) or more, not {self.top_k}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ParamError("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {self.logprobs}")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < n_vocab:
                raise ParamError("logit_bias", f"token id {token_id} is outside the vocabulary of {n_vocab}")
            if not -100.0 <= bias <= 100.0:
                raise ParamError("logit_bias", f"bias of token {token_id} must be between -100 and 100")
        if any(not s for s in self.stop):
            raise ParamError("stop", "an empty string cannot be a stop sequence")
