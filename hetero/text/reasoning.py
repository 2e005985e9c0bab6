"""What a model thinks before it answers, told from the answer by the tags around it."""

from __future__ import annotations

from hetero.text.parts import Part, PartsParser, ReasoningPart
from hetero.text.tools.scan import MAX_BLANKS, MarkFinder, split_blanks

# (opening, closing); a template that knows thinking writes or looks for the closing one.
TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)


def tags_of(template: str) -> tuple[str, str] | None:
    """The tags around the reasoning of models with this chat template; None if they don't reason."""
    return next((tags for tags in TAGS if tags[1] in template), None)


def begun_in(prompt_tail: str, tags: tuple[str, str]) -> bool:
    """Whether the prompt's end has begun the reasoning, so that the answer starts in the middle of it.

    Only the very end counts: what stands before it may be a user's words.
    """
    return prompt_tail.rstrip().endswith(tags[0])


def left_open(text: str, template: str) -> str:
    """The opening tag, if this beginning of an answer has begun to reason and not ended it; else ""."""
    tags = tags_of(template)
    return tags[0] if tags is not None and text.rfind(tags[0]) > text.rfind(tags[1]) else ""


class ReasoningParser:
    """Reasoning first, if any, then what `answer` makes of the rest. Blanks around reasoning are dropped, but
    no more than MAX_BLANKS before it, and the last MAX_BLANKS within."""

    def __init__(self, answer: PartsParser, tags: tuple[str, str], begun: bool, ends: tuple[str, ...] = ()):
        self._answer = answer
        self._open, close = tags
        self._close = close
        self._finder = MarkFinder((close, *ends))
        self._state = self._thinking if begun else self._start
        self._held = ""  # the text of `_start`; blanks within the reasoning
        self._thought = False

    @property
    def called_tools(self) -> bool:
        return self._answer.called_tools

    def push(self, text: str) -> list[Part]:
        return self._state(text)

    def finish(self) -> list[Part]:
        if self._state == self._start:
            return [*self._answer.push(self._held), *self._answer.finish()]
        parts: list[Part] = []
        if self._state == self._thinking:
            self._think(self._finder.finish(), parts)
        return parts + self._answer.finish()

    def check_invariants(self) -> None:
        self._finder.check_invariants()
        if self._state == self._start:
            assert self._open.startswith(self._held.lstrip()) and self._held.lstrip() != self._open
            assert len(self._held) <= MAX_BLANKS + len(self._open)
        elif self._state == self._thinking:
            assert not self._held.strip() and (self._thought or not self._held)
            assert len(self._held) <= MAX_BLANKS

    def _start(self, text: str) -> list[Part]:
        text = self._held + text
        begun = text.lstrip()
        if len(text) - len(begun) > MAX_BLANKS:
            begun = text
        if begun.startswith(self._open):
            self._held, self._state = "", self._thinking
            return self._thinking(begun[len(self._open) :])
        if self._open.startswith(begun):
            self._held = text
            return []
        self._held, self._state = "", self._answer.push
        return self._answer.push(text)

    def _thinking(self, text: str) -> list[Part]:
        parts: list[Part] = []
        before, mark, rest = self._finder.push(text)
        self._think(before, parts)
        if mark is not None:
            self._state = self._behind
            parts += self._behind(rest if mark == self._close else mark + rest)
        return parts

    def _think(self, text: str, parts: list[Part]) -> None:
        text = self._held + text
        if not self._thought:
            text = text.lstrip()
        thought, self._held = split_blanks(text)
        if thought:
            self._thought = True
            parts.append(ReasoningPart(thought))

    def _behind(self, text: str) -> list[Part]:
        text = text.lstrip()
        if not text:
            return []
        self._state = self._answer.push
        return self._answer.push(text)
