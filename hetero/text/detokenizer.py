"""Token ids to text as they come: whole characters only, and nothing that may turn out a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class HasTokenBytes(Protocol):
    def token_bytes(self, token_id: int, /) -> bytes: ...


class Detokenizer:
    """The text of one request.

    The concatenation of all `push` results and `finish` is what decoding all bytes at once gives
    (broken UTF-8 as U+FFFD), cut before the stop string that was complete first; of several complete at
    the same character, the longest. This does not depend on where the token borders lie.

        text   ...already returned | held | next characters
                                    ^ the longest end that is a beginning of a stop string
    """

    def __init__(
        self, tokenizer: HasTokenBytes, stop: Sequence[str] = (), shown: Mapping[int, bytes] | None = None
    ):
        """`stop` holds nonempty strings; `shown` what tokens add that add nothing by themselves."""
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._decoder = _Utf8Decoder("replace")
        self._stops = [(text, _borders(text)) for text in dict.fromkeys(stop) if text]
        self._matched = [0] * len(self._stops)  # characters of each stop string at the end of the text
        self._held = ""
        self.stop_string: str | None = None  # the one that was found

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """The text that is certain now. "" once a stop string was found."""
        if self.stopped:
            return ""
        raw = self._shown.get(token_id) or self._tokenizer.token_bytes(token_id)
        return self._advance(self._decoder.decode(raw))

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._advance(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held
            self._held = ""
            self._matched = [0] * len(self._stops)
        return text

    def _advance(self, text: str) -> str:
        if not self._stops:
            return text
        matched = self._matched
        for position, char in enumerate(text):
            longest = ""
            for index, (stop, borders) in enumerate(self._stops):
                length = matched[index]
                while length and stop[length] != char:
                    length = borders[length]
                length += stop[length] == char
                matched[index] = length
                if length == len(stop):
                    longest = max(longest, stop, key=len)
            if longest:
                self.stop_string = longest
                text = self._held + text[: position + 1]
                self._held = ""
                return text[: len(text) - len(longest)]
        text = self._held + text
        cut = len(text) - max(matched)
        self._held = text[cut:]
        return text[:cut]

    def check_invariants(self) -> None:
        """Held text is exactly what a stop string may begin with."""
        if self.stopped:
            assert not self._held
            return
        assert len(self._held) == max(self._matched, default=0)
        for (stop, _), length in zip(self._stops, self._matched, strict=True):
            assert length < len(stop) and self._held.endswith(stop[:length])


def _borders(text: str) -> list[int]:
    """For each length n, the longest proper end of text[:n] that text begins with (Knuth-Morris-Pratt)."""
    borders = [0] * (len(text) + 1)
    length = 0
    for n in range(1, len(text)):
        while length and text[n] != text[length]:
            length = borders[length]
        length += text[n] == text[length]
        borders[n + 1] = length
    return borders
