"""The `timings` of an answer, under llama-server's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero.request import Timings


def timings_dict(timings: Timings) -> dict[str, Any]:
    """`timings` as llama-server writes them: numbers of tokens, milliseconds, tokens per second."""
    shown: dict[str, Any] = {"queue_ms": 1e3 * timings.queue_seconds, "cache_n": timings.cache_n}
    for name, count, seconds in (
        ("prompt", timings.prompt_n, timings.prompt_seconds),
        ("predicted", timings.predicted_n, timings.predicted_seconds),
    ):
        shown[f"{name}_n"] = count
        shown[f"{name}_ms"] = 1e3 * seconds
        shown[f"{name}_per_token_ms"] = 1e3 * seconds / count if count else 0.0
        shown[f"{name}_per_second"] = count / seconds if seconds else 0.0
    if timings.draft_n:
        shown |= {"draft_n": timings.draft_n, "draft_n_accepted": timings.draft_n_accepted}
    return shown


def sum_of(choices: Sequence[Timings]) -> Timings:
    """Of several choices, computed at the same time: all their tokens, the longest of their times."""
    return Timings(
        queue_seconds=max(t.queue_seconds for t in choices),
        cache_n=sum(t.cache_n for t in choices),
        prompt_n=sum(t.prompt_n for t in choices),
        prompt_seconds=max(t.prompt_seconds for t in choices),
        predicted_n=sum(t.predicted_n for t in choices),
        predicted_seconds=max(t.predicted_seconds for t in choices),
        draft_n=sum(t.draft_n for t in choices),
        draft_n_accepted=sum(t.draft_n_accepted for t in choices),
    )
