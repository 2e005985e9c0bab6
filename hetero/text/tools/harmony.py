"""gpt-oss's format: an answer is several messages, each with a header that says what it is.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>

Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.text.parts import Part, ReasoningPart, TextPart
from hetero.text.tools.parser import Calls, new_call_id
from hetero.text.tools.readers import Arguments, Name
from hetero.text.tools.scan import JsonValue, MarkFinder

# Their template calls `thinking` what others call `reasoning_content`, and wants it with calls alone.
REASONING_KEYS = ("reasoning_content", "reasoning")
START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MAX_HEADER_CHARS = 500


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the thoughts before a call where gpt-oss's template looks for them."""
    shown = []
    for message in messages:
        entry = dict(message)
        thought = next((entry[key] for key in REASONING_KEYS if isinstance(entry.get(key), str)), "")
        if thought and entry.get("tool_calls") and not entry.get("content"):
            entry["thinking"] = thought
        shown.append(entry)
    return shown


class HarmonyParser:
    """The messages of one answer; `prompt_tail` is the end of the prompt, which has begun the first."""

    def __init__(self, prompt_tail: str, parallel: bool = True):
        self._calls = Calls(new_call_id, parallel)
        self._kind = ""  # of the message being read: text, reasoning or call; "" in a header
        self._header = ""
        self._empty = True
        self._value: JsonValue | None = None  # a call's arguments, where they are an object
        self._finder = MarkFinder((MESSAGE,))
        _, found, begun = prompt_tail.rpartition(START)
        if found:
            header, has_begun, _ = begun.partition(MESSAGE)
            self._header = header
            if has_begun:
                self._begin([])

    @property
    def called_tools(self) -> bool:
        return self._calls.count > 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        mark: str | None = ""
        while mark is not None:
            before, mark, text = self._finder.push(text)
            if self._kind:
                self._say(before, parts)
                if mark is not None:
                    self._end(parts)
                continue
            self._header += before
            if len(self._header) > MAX_HEADER_CHARS:  # not the format at all
                text = self._header + (mark or self._finder.finish()) + text
                self._header, self._kind, self._empty = "", "text", True
                self._finder, mark = MarkFinder(ENDS), ""
            elif mark is not None:
                self._begin(parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        rest = self._finder.finish()
        if self._kind:
            self._say(rest, parts)
        elif "<|" not in self._header and self._header.strip() not in ("", "assistant"):
            parts.append(TextPart(self._header + rest))
        return parts

    def check_invariants(self) -> None:
        self._finder.check_invariants()
        assert self._kind in ("", "text", "reasoning", "call")
        assert (not self._header or not self._kind) and len(self._header) <= MAX_HEADER_CHARS
        assert self._kind != "call" or self.called_tools

    def _begin(self, parts: list[Part]) -> None:
        """A header is complete."""
        channel = re.search(r"<\|channel\|>\s*(\w+)", self._header)
        recipient = re.search(r"\bto=([^\s<]+)", self._header)
        self._header, self._empty = "", True
        self._finder = MarkFinder(ENDS)
        if recipient:
            self._kind = "call"
            parts += self._calls.parts([Name(recipient.group(1).removeprefix("functions."))])
        else:
            self._kind = "reasoning" if channel and channel.group(1) == "analysis" else "text"

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._empty:
            text = text.lstrip()
        if not text:
            return
        if self._kind == "call" and self._empty:  # not so for tools that take code as it is
            self._value = JsonValue() if text[0] == "{" else None
        self._empty = False
        if self._kind == "call":
            text = text if self._value is None else self._value.read(text)[0]
            parts += self._calls.parts([Arguments(text)])
        else:
            parts.append(ReasoningPart(text) if self._kind == "reasoning" else TextPart(text))

    def _end(self, parts: list[Part]) -> None:
        if self._kind == "call" and self._empty:
            parts += self._calls.parts([Arguments("{}")])
        self._kind, self._finder = "", MarkFinder((MESSAGE,))
