"""What /completion and /infill send back.

Format: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. A stream ends after the
object with `stop`: no [DONE].
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetero.request import TokenLogprob
from hetero.server import openai, sse
from hetero.server.collect import Collected, Piece
from hetero.server.errors import ApiError, encode
from hetero.server.generate import Usage
from hetero.server.llamacpp.read import Asked
from hetero.server.timings import sum_of, timings_dict
from hetero.text.parts import TextPart

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

NO_SLOT = -1


class LlamaWriter:
    content_type = sse.SSE

    def __init__(self, engine: AsyncEngine, asked: Asked, prompts: list[list[int]], as_list: bool):
        """`as_list`: the answer in one piece is a list, since several were asked for."""
        self._engine, self._asked, self._prompts, self._as_list = engine, asked, prompts, as_list
        self._counts: dict[int, int] = {}
        self._choices: dict[int, Collected] = {}

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return sse.COMMENT

    def piece(self, piece: Piece) -> str:
        index = piece.index
        self._choices.setdefault(index, Collected()).add(piece)
        self._counts[index] = self._counts.get(index, 0) + len(piece.delta.token_ids)
        text = "".join(part.text for part in piece.parts if isinstance(part, TextPart))
        events = []
        if not self._asked.evaluate_only and (text or piece.delta.token_ids):
            part: dict[str, Any] = {
                "index": index,
                "content": text,
                "tokens": piece.delta.token_ids,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": self._counts[index],
                "tokens_evaluated": len(self._prompt(index)),
            }
            if self._asked.params.logprobs is not None:
                part["completion_probabilities"] = self._probabilities(piece.delta.logprobs)
            if self._asked.timings_per_token and piece.delta.timings is not None:
                part["timings"] = timings_dict(piece.delta.timings)
            events.append(part)
        if piece.finish is not None:
            last = self._last(index, self._choices.pop(index), "", piece.delta.num_cached_tokens)
            if piece.delta.timings is not None:
                last["timings"] = timings_dict(piece.delta.timings)
            last.pop("completion_probabilities", None)  # they came with their tokens
            events.append({**last, "tokens": []})
        return "".join([sse.event(encode(self._chosen(event))) for event in events])

    def end(self, usage: Usage) -> str:
        return ""

    def failure(self, error: ApiError) -> str:
        return sse.event(encode(error.body))

    def whole(self, choices: list[Collected], usage: Usage) -> Any:
        answers = []
        for index, choice in enumerate(choices):
            text = "" if self._asked.evaluate_only else choice.text
            answer = self._last(index, choice, text, usage.cached_tokens)
            if usage.timings:
                one = usage.timings[index] if len(usage.timings) == len(choices) else sum_of(usage.timings)
                answer["timings"] = timings_dict(one)
            answers.append(self._chosen(answer))
        return answers if self._as_list else answers[0]

    def _last(self, index: int, choice: Collected, text: str, cached: int) -> dict[str, Any]:
        """The object with `stop`: of a stream without text, of an answer in one piece with all of it."""
        asked, prompt = self._asked, self._prompt(index)
        tokens = [] if asked.evaluate_only else choice.token_ids
        finish = {"length": "limit", "stop": "eos"}.get(choice.finish, choice.finish)
        answer: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": tokens if asked.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._engine.info.name,
            "tokens_predicted": len(tokens),
            "tokens_evaluated": len(prompt),
            "generation_settings": settings_dict(asked, self._engine.info.n_ctx),
            "prompt": self._engine.text.decode(prompt),
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "stop_type": "word" if choice.stop_string else finish,
            "stopping_word": choice.stop_string or "",
            "tokens_cached": cached,
        }
        if asked.params.logprobs is not None and not asked.evaluate_only:
            answer["completion_probabilities"] = self._probabilities(choice.logprobs)
        return answer

    def _prompt(self, index: int) -> list[int]:
        return self._prompts[index // self._asked.n]

    def _probabilities(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text, raw = openai.token_string(self._engine, token_id)
            return {"id": token_id, "token": text, "bytes": raw, "logprob": openai.finite(logprob)}

        return [
            {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
            for item in logprobs
        ]

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """`response_fields` of it: `a/b` is b of a, moved up."""
        names = self._asked.response_fields
        if names is None:
            return answer
        found: dict[str, Any] = {}
        for name in names:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part, ...) if isinstance(value, dict) else ...
            if value is not ...:
                found[name.rsplit("/", 1)[-1]] = value
        return found


def settings_dict(asked: Asked, n_ctx: int) -> dict[str, Any]:
    """`generation_settings`: what was asked for, as it was understood."""
    params = asdict(asked.params)
    n_predict = -1 if asked.params.max_tokens is None else asked.params.max_tokens
    return {
        "n_ctx": n_ctx,
        "n_predict": 0 if asked.evaluate_only else n_predict,
        "seed": -1 if asked.params.seed is None else asked.params.seed,
        "temperature": params["temperature"],
        "top_k": params["top_k"],
        "top_p": params["top_p"],
        "min_p": params["min_p"],
        "repeat_penalty": params["repetition_penalty"],
        "repeat_last_n": -1,
        "presence_penalty": params["presence_penalty"],
        "frequency_penalty": params["frequency_penalty"],
        "stop": list(params["stop"]),
        "ignore_eos": params["ignore_eos"],
        "n_probs": params["logprobs"] or 0,
        "stream": asked.stream,
    }
