"""How long a model's layers take on a device: measured (calibrate.py) or estimated, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetero.plan.split import Costs, Goal

CONTEXT = 1024  # tokens that a request is expected to have at most, on the average of its life
PROMPT_SHARE = 0.5  # prompt tokens computed for each token generated (cached prefixes are not computed)

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds on one device.

    `decode[c][t][x]`: one layer of class c, for `tokens[t]` sequences of one token each whose context
    is `contexts[x]` tokens. `chunk[c]`: the same for a chunk of `chunk_tokens` tokens of one prompt.
    `embed[t]`, `head[t]`: embedding and output head for `tokens[t]` rows. `enter[t]`, `leave[t]`: taking
    in and handing on the hidden rows of as many tokens, outside of computation. `measured` is False for
    an estimate. Between the points times are linear, beyond them too.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    decode: tuple[tuple[Row, ...], ...]
    chunk_tokens: int
    chunk: Row
    embed: Row
    head: Row
    enter: Row
    leave: Row
    measured: bool = True

    def layer(self, kind: int, tokens: float, context: float) -> float:
        """Seconds of a decoding step in one layer of class `kind`."""
        columns = [_at(context, self.contexts, row) for row in self.decode[kind]]
        return max(0.0, _at(tokens, self.tokens, columns))

    def prompt(self, kind: int, tokens: float) -> float:
        """Seconds for prompt tokens in one layer of class `kind`."""
        return tokens * self.chunk[kind] / self.chunk_tokens

    def at(self, what: str, tokens: float) -> float:
        """Seconds of `what` (embed, head, enter, leave) for `tokens` rows."""
        return max(0.0, _at(tokens, self.tokens, getattr(self, what)))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def times_from_json(table: Mapping[str, Any]) -> DeviceTimes:
    """The inverse of `as_json`. Raises KeyError, TypeError or ValueError for anything else."""

    def row(values: Sequence[Any]) -> Row:
        out = tuple(float(v) for v in values)
        if not all(np.isfinite(out)) or min(out, default=0.0) < 0.0:
            raise ValueError("not a time")
        return out

    tokens = tuple(int(t) for t in table["tokens"])
    contexts = tuple(int(c) for c in table["contexts"])
    times = DeviceTimes(
        tokens=tokens,
        contexts=contexts,
        decode=tuple(tuple(row(r) for r in kind) for kind in table["decode"]),
        chunk_tokens=int(table["chunk_tokens"]),
        measured=bool(table["measured"]),
        **{name: row(table[name]) for name in ("chunk", "embed", "head", "enter", "leave")},
    )
    shape = {(len(kind), *(len(r) for r in kind)) for kind in times.decode}
    rows = {len(getattr(times, name)) for name in ("embed", "head", "enter", "leave")}
    grid_fits = shape == {(len(tokens), *[len(contexts)] * len(tokens))} and rows == {len(tokens)}
    ascending = list(tokens) == sorted(set(tokens)) and list(contexts) == sorted(set(contexts))
    if not grid_fits or not ascending or times.chunk_tokens < 1 or len(times.chunk) != len(times.decode):
        raise ValueError("tables of different sizes")
    return times


def _at(x: float, points: Sequence[int], values: Sequence[float]) -> float:
    """Linear between the points, and on as in the last (first) interval."""
    if len(points) == 1:
        return values[0]
    i = int(np.clip(np.searchsorted(points, x), 1, len(points) - 1))
    share = (x - points[i - 1]) / (points[i] - points[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def costs(
    times: Sequence[DeviceTimes], classes: Sequence[int], batch: int, context: float, prompt_share: float
) -> Costs:
    """Costs of a step that decodes `batch` sequences and computes `prompt_share` prompt tokens for each."""
    prompt = batch * prompt_share
    by_class = [
        [t.layer(kind, batch, context) + t.prompt(kind, prompt) for kind in range(len(t.decode))]
        for t in times
    ]
    layers = np.array(by_class)[:, list(classes)]
    first, last, enter, leave = (
        np.array([t.at(what, rows) for t in times])
        for what, rows in (
            ("embed", batch + prompt),
            ("head", batch),
            ("enter", batch + prompt),
            ("leave", batch + prompt),
        )
    )
    return Costs(layers, first, last, enter, leave)


def typical_context(longest: int) -> int:
    """Tokens of context that a split is judged at, where requests can have up to `longest`: half of it."""
    return max(1, min(CONTEXT, longest // 2))


def step_costs(
    times: Sequence[DeviceTimes], classes: Sequence[int], goal: Goal, stages: int, context: int
) -> Costs:
    """What a split into `stages` stages is judged by: a micro-batch of decoding with its share of prompts."""
    return costs(times, classes, goal.batch(stages), context, PROMPT_SHARE)


__all__ = ["DeviceTimes", "costs", "step_costs", "times_from_json", "typical_context"]
