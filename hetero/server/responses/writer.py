"""What the Responses API sends back: the response object, and the events that it grows by.

Format: https://platform.openai.com/docs/api-reference/responses-streaming. Each event has a name, which its
JSON repeats as `type`, and a `sequence_number`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hetero.server import sse
from hetero.server.collect import Block, Call, Change, Collected, Piece, Reasoning, Text
from hetero.server.conversation import new_id
from hetero.server.errors import ApiError, encode
from hetero.server.generate import Usage
from hetero.server.timings import sum_of, timings_dict

INCOMPLETE = {"length": "max_output_tokens"}


class ResponsesWriter:
    content_type = sse.SSE

    def __init__(self, echo: dict[str, Any], on_done: Callable[[dict[str, Any]], None]) -> None:
        """`echo` is the part of the response object that is known from the request; `on_done` gets the
        whole object once it is complete."""
        self._echo = {**echo, "object": "response", "created_at": int(time.time())}
        self._on_done = on_done
        self._number = 0
        self._choice = Collected()
        self._ids: list[str] = []

    def begin(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keep_alive(self) -> str:
        """An event, as Codex gives up on streams without any for 300 s, whatever comments there are."""
        return self._event("response.in_progress", response=self._response("in_progress", []))

    def piece(self, piece: Piece) -> str:
        return "".join([self._events(change) for change in self._choice.add(piece)])

    def end(self, usage: Usage) -> str:
        response = self._finished(self._choice, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> str:
        code = error.code or "server_error"
        response = self._response("failed", self._output(self._choice))
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def whole(self, choices: list[Collected], usage: Usage) -> dict[str, Any]:
        return self._finished(choices[0], usage)

    def _finished(self, choice: Collected, usage: Usage) -> dict[str, Any]:
        reason = INCOMPLETE.get(choice.finish)
        response = self._response("incomplete" if reason else "completed", self._output(choice))
        if reason:
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if usage.timings:
            response["timings"] = timings_dict(sum_of(usage.timings))
        self._on_done(response)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._echo, "status": status, "output": output, "error": None, "incomplete_details": None,
            "usage": None,
        }  # fmt: skip

    def _output(self, choice: Collected) -> list[dict[str, Any]]:
        return [self._item(choice, position) for position in range(len(choice.blocks))]

    def _item(self, choice: Collected, position: int, begun: bool = False) -> dict[str, Any]:
        """An item of the output; when it has just `begun` it holds nothing yet."""
        block = choice.blocks[position]
        cut = choice.finish == "length" and position == len(choice.blocks) - 1
        status = "in_progress" if begun else "incomplete" if cut else "completed"
        item = {"id": self._id(position, block), "status": status}
        if isinstance(block, Call):
            call = {"call_id": block.id, "name": block.name, "arguments": block.arguments}
            return {**item, "type": "function_call", **call}
        content = [] if begun else [_content(block)]
        if isinstance(block, Reasoning):
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _id(self, position: int, block: Block) -> str:
        prefix = {Call: "fc_", Reasoning: "rs_", Text: "msg_"}[type(block)]
        while len(self._ids) <= position:
            self._ids.append(new_id(prefix))
        return self._ids[position]

    def _events(self, change: Change) -> str:
        kind, position, block, text = change
        at: dict[str, Any] = {"item_id": self._id(position, block), "output_index": position}
        if not isinstance(block, Call):
            at["content_index"] = 0
        name = _NAMES[type(block)]
        if kind == "more":
            more: dict[str, Any] = {"logprobs": []} if isinstance(block, Text) else {}
            return self._event(f"{name}.delta", **at, delta=text, **more)
        item = self._item(self._choice, position, begun=kind == "open")
        place = {"output_index": position, "item": item}
        if kind == "open":
            added = self._event("response.output_item.added", **place)
            if isinstance(block, Call):
                return added
            return added + self._event("response.content_part.added", **at, part=_content(block))
        done = self._event(f"{name}.done", **at, **_whole(block))
        if not isinstance(block, Call):
            done += self._event("response.content_part.done", **at, part=_content(block))
        return done + self._event("response.output_item.done", **place)

    def _event(self, kind: str, **fields: Any) -> str:
        data = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return sse.event(data, kind)


_NAMES: dict[type, str] = {
    Text: "response.output_text",
    Reasoning: "response.reasoning_text",
    Call: "response.function_call_arguments",
}


def _content(block: Text | Reasoning) -> dict[str, Any]:
    if isinstance(block, Reasoning):
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _whole(block: Block) -> dict[str, Any]:
    """What the event that ends a block repeats."""
    if isinstance(block, Call):
        return {"name": block.name, "arguments": block.arguments}
    return {"text": block.text, "logprobs": []} if isinstance(block, Text) else {"text": block.text}
