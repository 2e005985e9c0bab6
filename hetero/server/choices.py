"""OpenAI's answers that have `choices`: the envelope, in one piece and as events."""

from __future__ import annotations

import time
from typing import Any

from hetero.server import sse
from hetero.server.collect import Collected, Piece
from hetero.server.errors import ApiError, encode
from hetero.server.generate import Usage
from hetero.server.timings import sum_of, timings_dict


def usage_dict(usage: Usage) -> dict[str, Any]:
    """`usage` as chat and completions have it."""
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


class ChoicesWriter:
    """A Writer that leaves to its subclass what a choice looks like. `object` and `chunk_object` are the
    API's names of the two forms of an answer."""

    content_type = sse.SSE
    object: str
    chunk_object: str

    def __init__(self, answer_id: str, model: str, include_usage: bool) -> None:
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        self._before, self._after = encode(self._envelope(self.chunk_object, [])).rsplit("]", 1)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Entries for `choices`, one chunk each. The one with a finish_reason comes last."""
        raise NotImplementedError

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """The whole choice, for an answer in one piece."""
        raise NotImplementedError

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return sse.COMMENT

    def piece(self, piece: Piece) -> str:
        texts = [f"{self._before}{encode(chunk)}]{self._after}" for chunk in self.chunks(piece)]
        if piece.finish is not None and piece.delta.timings is not None:
            texts[-1] = f'{texts[-1][:-1]},"timings":{encode(timings_dict(piece.delta.timings))}}}'
        return "".join([sse.event(text) for text in texts])

    def end(self, usage: Usage) -> str:
        last = ""
        if self._include_usage:
            last = sse.event(encode({**self._envelope(self.chunk_object, []), "usage": usage_dict(usage)}))
        return last + sse.event("[DONE]")

    def failure(self, error: ApiError) -> str:
        """No [DONE] follows."""
        return sse.event(encode(error.body))

    def whole(self, choices: list[Collected], usage: Usage) -> dict[str, Any]:
        body = self._envelope(self.object, [self.choice(i, choice) for i, choice in enumerate(choices)])
        body["usage"] = usage_dict(usage)
        return {**body, "timings": timings_dict(sum_of(usage.timings))} if usage.timings else body

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model,
            "choices": choices,
        }  # fmt: skip
