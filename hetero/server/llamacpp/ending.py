"""Ends of answers that only code completion has: too late, or back at a smaller indent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from hetero.server.collect import Piece
from hetero.server.generate import Generation
from hetero.server.llamacpp.read import Ending
from hetero.text.parts import TextPart


class EndWatch:
    """Watches one answer's text for the ends that `Ending` describes."""

    def __init__(self, ending: Ending, clock: Callable[[], float] = time.monotonic):
        self._ending, self._clock = ending, clock
        self._began: float | None = None  # when the first text came
        self._broken = False  # there was a line break
        self._indent = -1  # columns of the line that has just begun; -1: past its indent, or on the first

    def take(self, text: str) -> tuple[str, bool]:
        """(what of the text is part of the answer, whether that has ended)."""
        now = self._clock()
        if text and self._began is None:
            self._began = now
        kept = self._cut(text)
        if kept is not None:
            return kept, True
        self._broken = self._broken or "\n" in text
        limit = self._ending.seconds
        late = limit > 0 and self._began is not None and now - self._began > limit
        return text, late and self._broken

    def _cut(self, text: str) -> str | None:
        """The text before a line whose indent is too small; None when there is no such line."""
        if not self._ending.indent:
            return None
        for i, character in enumerate(text):
            if character == "\n":
                self._indent = 0
            elif self._indent >= 0 and character in " \t":
                self._indent += 1
            elif self._indent >= 0:
                if self._indent < self._ending.indent:
                    return text[: i - self._indent] if i >= self._indent else ""
                self._indent = -1
        return None


class EndingGeneration(Generation):
    """A generation whose answers may end early. A single answer is not computed any further then."""

    def __init__(self, whole: Generation, ending: Ending):
        super().__init__(whole._streams, whole._active, whole.usage, sent=whole._sent, ended=whole._ended)
        self._watches = [EndWatch(ending) for _ in whole._streams]

    async def pieces(self, idle: float | None = None) -> AsyncIterator[Piece | None]:
        ended: set[int] = set()
        count = [0] * self.num_choices
        async for piece in super().pieces(idle):
            if piece is None:
                yield None
                continue
            if piece.index in ended:
                yield replace(piece, parts=[])
                continue
            count[piece.index] += len(piece.delta.token_ids)
            text = "".join(part.text for part in piece.parts if isinstance(part, TextPart))
            kept, over = self._watches[piece.index].take(text)
            if not over or piece.finish is not None:
                yield replace(piece, parts=[TextPart(kept)] if kept else [])
                continue
            ended.add(piece.index)
            last = self.num_choices == 1
            yield replace(piece, parts=[TextPart(kept)] if kept else [], finish="length" if last else None)
            if last:
                self.usage.completion_tokens += count[0]
                if self._ended is not None:
                    self._ended(0, replace(piece.delta, num_output_tokens=count[0]))
                return
