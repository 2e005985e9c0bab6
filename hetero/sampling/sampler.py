"""Logits and a request's settings in, its next token out."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.request import TokenLogprob
from hetero.sampling import kernels
from hetero.sampling.params import MAX_LOGPROBS, SamplingParams

_ERRORS = {
    kernels.NOT_FINITE: "the model's output is not a number",
    kernels.NOTHING_ALLOWED: "no token is allowed by the response format and the logit bias",
}


@dataclass(slots=True)
class Sampled:
    """A row's result. `token_id` is -1, and `error` says why, when the row has no usable token: the model
    computed NaN or +inf, or grammar and bias leave nothing. Other rows of the step are not affected."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class SamplerState:
    """What the sampler remembers of one request: its seed, its output position, the tokens that it has seen.

    `seed` is `params.seed` modulo 2**64, or drawn here. `position` is the number of accepted tokens; a token
    is a pure function of (logits, params, tokens seen, seed, position), so neither the batch nor a preemption
    changes it. Seen tokens are kept only for requests with penalties.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], n_vocab: int) -> None:
        self.params = params
        self.n_vocab = n_vocab
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) & 0xFFFF_FFFF_FFFF_FFFF
        self.position = 0
        self.settings = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self.top_k = min(params.top_k, n_vocab)
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._tracks = params.repetition_penalty != 1.0 or bool(
            params.presence_penalty or params.frequency_penalty
        )
        self.plain = params.greedy and params.logprobs is None and not params.logit_bias and not self._tracks
        self._slots: dict[int, int] = {}
        self._ids = np.empty(0, np.int32)
        self._counts = np.empty(0, np.int32)
        if self._tracks:
            prompt = np.unique(np.asarray(prompt_token_ids, np.int32))
            self._slots = {int(t): i for i, t in enumerate(prompt)}
            self._ids = np.concatenate([prompt, np.empty(64, np.int32)])
            self._counts = np.zeros(len(self._ids), np.int32)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, times generated), int32 [n] each, of the tokens that penalties apply to."""
        n = len(self._slots)
        return self._ids[:n], self._counts[:n]

    def accept(self, token_id: int) -> None:
        """Note the request's next token. `Sampler.sample` has done so for what it returns."""
        self.position += 1
        if not self._tracks:
            return
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(len(self._ids), np.int32)])
            self._counts = np.concatenate([self._counts, np.zeros(len(self._counts), np.int32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def check_invariants(self) -> None:
        ids, counts = self.seen
        assert 0 <= self.seed < 1 << 64 and self.position >= 0
        assert len(set(ids.tolist())) == len(ids) and self._slots == {int(t): i for i, t in enumerate(ids)}
        assert int(counts.sum()) == (self.position if self._tracks else 0)


class Sampler:
    """Samples a step's rows in one kernel call that holds no GIL. Not for several threads at once.

    Order: logit bias, repetition penalty (CTRL: positive logits divided, others multiplied), frequency and
    presence penalty (OpenAI), grammar mask; then for temperature 0 the largest logit (lowest id of equals),
    else temperature, top-k, top-p over what top-k left, min-p relative to the most likely token. That is
    vLLM's order (temperature before the filters) with llama.cpp's order of the filters. Each filter keeps an
    exact prefix of the tokens by (logit descending, id ascending). Log-probabilities are those of the model,
    before any of this.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._keys = np.empty(n_vocab, np.uint32)
        self._p = np.empty(n_vocab, np.float64)
        self._raw = np.empty(n_vocab, np.float32)

    def warmup(self) -> None:
        """Compile the kernel, or load it from numba's cache, before the first request waits for it."""
        params = SamplingParams(
            temperature=1.0, top_k=2, top_p=0.5, repetition_penalty=1.1, seed=0, logprobs=1
        )
        mask = np.full((self.n_vocab + 31) // 32, -1, np.int32)
        state = SamplerState(params, [0], self.n_vocab)
        self.sample(np.zeros((1, self.n_vocab), np.float32), [state], [mask])

    def sample(
        self,
        logits: np.ndarray,
        states: Sequence[SamplerState],
        masks: Sequence[np.ndarray | None],
        argmax: np.ndarray | None = None,
    ) -> list[Sampled]:
        """One token per row; the states of rows without an error advance.

        logits: float32 [L, n_vocab], C order, overwritten. masks: per row None or int32 [ceil(n_vocab / 32)],
        bit i % 32 of word i // 32 set where token i is allowed. argmax: int32 [L] if the device has already
        looked for each row's largest logit (lowest id of equals, -1 for a row that is not finite); it spares
        the kernel, and even the logits, when all rows are greedy and nothing changes their logits.
        """
        rows = len(states)
        if argmax is not None and all(s.plain for s in states) and all(m is None for m in masks):
            return [self._plain(s, t) for s, t in zip(states, argmax.tolist(), strict=True)]
        if logits.shape != (rows, self.n_vocab) or len(masks) != rows:
            raise ValueError(f"logits {logits.shape} do not fit {rows} rows of {self.n_vocab} tokens")
        logits = np.ascontiguousarray(logits, np.float32)
        mask_rows, packed = self._pack_masks(masks)
        wanted = np.array([-1 if s.params.logprobs is None else s.params.logprobs for s in states], np.int64)
        wanted = np.minimum(wanted, self.n_vocab)
        bias_at, bias_ids, bias_values = _pack([(s.bias_ids, s.bias_values) for s in states], np.float32)
        seen_at, seen_ids, seen_counts = _pack([s.seen for s in states], np.int32)
        tokens, status = np.empty(rows, np.int64), np.empty(rows, np.int64)
        logprobs = np.zeros(rows)
        top_ids, top_values = np.empty((rows, MAX_LOGPROBS), np.int64), np.empty((rows, MAX_LOGPROBS))
        kernels.sample_rows(
            logits, np.array([s.settings for s in states], np.float64).reshape(rows, 6),
            np.array([s.top_k for s in states], np.int64),
            np.array([s.seed for s in states], np.uint64), np.array([s.position for s in states], np.uint64),
            bias_at, bias_ids, bias_values, seen_at, seen_ids, seen_counts, mask_rows, packed, wanted,
            self._keys, self._p, self._raw, tokens, status, logprobs, top_ids, top_values,
        )  # fmt: skip
        results = []
        for r, state in enumerate(states):
            token_id = int(tokens[r])
            if token_id < 0:
                results.append(Sampled(-1, error=_ERRORS[int(status[r])]))
                continue
            state.accept(token_id)
            top = zip(top_ids[r, : wanted[r]].tolist(), top_values[r, : wanted[r]].tolist(), strict=True)
            logprob = TokenLogprob(token_id, float(logprobs[r]), list(top)) if wanted[r] >= 0 else None
            results.append(Sampled(token_id, logprob))
        return results

    @staticmethod
    def _plain(state: SamplerState, token_id: int) -> Sampled:
        if token_id < 0:
            return Sampled(-1, error=_ERRORS[kernels.NOT_FINITE])
        state.accept(token_id)
        return Sampled(token_id)

    def _pack_masks(self, masks: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
        mask_rows = np.full(len(masks), -1, np.int64)
        present = [r for r, mask in enumerate(masks) if mask is not None]
        packed = np.empty((len(present), (self.n_vocab + 31) // 32), np.uint32)
        for i, r in enumerate(present):
            mask_rows[r] = i
            packed[i] = np.asarray(masks[r]).view(np.uint32)
        return mask_rows, packed


def _pack(
    pairs: Iterable[tuple[np.ndarray, np.ndarray]], dtype: type
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ragged rows end to end: (starts int64 [L + 1], ids int32, values)."""
    pairs = list(pairs)
    at = np.zeros(len(pairs) + 1, np.int64)
    np.cumsum([len(ids) for ids, _ in pairs], out=at[1:])
    if not at[-1]:
        return at, np.empty(0, np.int32), np.empty(0, dtype)
    return at, np.concatenate([ids for ids, _ in pairs]), np.concatenate([values for _, values in pairs])
