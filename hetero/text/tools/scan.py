"""Reading text that comes in pieces: marks that may be cut, JSON values that are not complete yet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MAX_BLANKS = 1024  # that wait for what follows them; models have been seen to write nothing else
_STRING_END = re.compile(r'["\\\x00-\x1f]')
_STRUCTURE = re.compile(r'["{}\[\],<]|\s')
_LETTERS = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}  # behind a backslash


def split_blanks(text: str) -> tuple[str, str]:
    """(text, the blanks at its end: the last MAX_BLANKS of them). However a text is cut, what is held back of
    it and joined with the next piece makes the same of the whole."""
    end = max(len(text.rstrip()), len(text) - MAX_BLANKS)
    return text[:end], text[end:]


class MarkFinder:
    """Finds the first of several marks; text before it comes out as soon as no mark can begin in it.

    No mark may contain another.

    text   ...already returned | held | next characters
                                ^ the longest end that is a beginning of a mark
    """

    def __init__(self, marks: Iterable[str]):
        self._marks = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
        self._longest = max(map(len, self._marks), default=1)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """(text before the mark, the mark, text after it), or (what is certain to be none, None, "")."""
        text = self._held + text
        self._held = ""
        found = self._pattern.search(text) if self._pattern else None
        if found:
            return text[: found.start()], found.group(), text[found.end() :]
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(mark.startswith(end) for mark in self._marks):
                self._held = end
                return text[:-length], None, ""
        return text, None, ""

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def check_invariants(self) -> None:
        assert not self._held or any(
            mark.startswith(self._held) and mark != self._held for mark in self._marks
        )


class JsonValue:
    """Finds the end of one JSON value, the first character of which is pushed first.

    Looks at brackets and strings only: whether it is JSON at all is for its reader to find out. `torn`: a
    string holds a control character, a line break for one, as none in JSON does. A mark of the kind <…> ends
    the value too, outside of strings; `missing` are then the brackets that were left open.
    """

    def __init__(self) -> None:
        self.done = self.torn = False
        self.first = ""
        self.missing = ""
        self._open: list[str] = []  # what closes the brackets around the place
        self._controls: list[tuple[int, str]] = []  # of the text pushed last: where in strings, what instead
        self._in_string = False
        self._escaped = False

    @property
    def in_string(self) -> bool:
        return self._in_string

    def push(self, text: str, at: int = 0) -> int:
        """Where the value ends in `text`, read from `at`; len(text) if it goes on, or is `done` there."""
        self._controls = []
        while at < len(text) and not self.done:
            if not self.first:
                self.first = text[at]
            if self._in_string:
                at = self._string(text, at)
                continue
            found = _STRUCTURE.search(text, at)
            if found is None:
                return len(text)
            at = found.start()
            char = text[at]
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._open.append("}" if char == "{" else "]")
            elif not self._open:  # a number or word has ended before this character
                self.done = True
                return at
            elif char == "<":
                self.done, self.missing = True, "".join(reversed(self._open))
                return at
            elif char in "}]":
                self._open.pop()
                self.done = not self._open
            at += 1
        return at

    def read(self, text: str, at: int = 0) -> tuple[str, int]:
        """(the part of `text`, read from `at`, that belongs to the value, where it ends): as `push`, but with
        control characters in strings escaped and brackets that were left open closed."""
        if self.done:
            return "", at
        end = self.push(text, at)
        pieces = []
        for place, instead in self._controls:
            pieces += [text[at:place], instead]
            at = place + 1
        return "".join((*pieces, text[at:end], self.missing)), end

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            if text[at] in _LETTERS:
                self.torn = True
                self._controls.append((at, _LETTERS[text[at]]))
            return at + 1
        found = _STRING_END.search(text, at)
        if found is None:
            return len(text)
        char = found.group()
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = not self._open
        else:
            self.torn = True
            self._controls.append((found.start(), json.dumps(char)[1:-1]))
        return found.end()
