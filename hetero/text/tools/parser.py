"""The calls in an answer's text, whatever their family writes around them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence

from hetero.text.parts import Part, TextPart, ToolCallArguments, ToolCallStart
from hetero.text.tools.readers import Name, Reader
from hetero.text.tools.scan import MAX_BLANKS, MarkFinder, split_blanks

Readers = Mapping[str, Callable[[], Reader]]  # what begins a call, and who reads what follows
BETWEEN = " \t\r\n;,`}]"  # what separates calls, or is left of a fenced block, or one bracket too many
MAX_BETWEEN = 64
_SOME = rf"\s{{0,{MAX_BLANKS}}}"
_START = re.compile(rf"{_SOME}(?:```(?:json)?{_SOME})?(?=[{{\[])")
_MAY_START = re.compile(rf"{_SOME}(?:`{{0,2}}|```(?:{_SOME}|j|js|jso|json{_SOME}))")
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Mistral's templates accept nothing but nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Calls:
    """Numbers the calls of one answer and turns the events of readers into parts."""

    def __init__(self, new_id: Callable[[], str], parallel: bool):
        """Not `parallel`: only the first call counts."""
        self.count = 0
        self._new_id = new_id
        self._parallel = parallel

    def parts(self, events: Sequence) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if isinstance(event, Name):
                self.count += 1
            if self.count > 1 and not self._parallel:
                continue
            if isinstance(event, Name):
                parts.append(ToolCallStart(self.count - 1, self._new_id(), event.name))
            elif event.text:
                parts.append(ToolCallArguments(self.count - 1, event.text))
        return parts


class ToolParser:
    """Text and calls.

    readers     opening mark -> reader of what follows it
    closers     marks that may follow a call
    dropped     marks that mean nothing here
    at_start    if given, reads an answer that begins with "{" or "[", or with a fence and those

    What a reader refuses before it has found a name is text after all. Blanks before a call are dropped, the
    last MAX_BLANKS of them.
    """

    def __init__(
        self,
        readers: Readers,
        *,
        closers: Sequence[str] = (),
        dropped: Sequence[str] = (),
        at_start: Callable[[], Reader] | None = None,
        new_id: Callable[[], str] = new_call_id,
        parallel: bool = True,
    ):
        self._readers = readers
        self._closers = tuple(closers)
        self._finder = MarkFinder((*readers, *closers, *dropped))
        self._at_start = at_start
        self._calls = Calls(new_id, parallel)
        self._blanks = ""  # held back, as a call may follow
        self._state = self._start if at_start else self._text
        self._make: Callable[[], Reader] | None = None
        self._reader: Reader | None = None
        self._mark = ""  # the opening one
        self._raw = ""  # text that waits for more
        self._unnamed: list[str] = []  # what followed the opening mark, until a name is found
        self._named = False

    @property
    def called_tools(self) -> bool:
        return self._calls.count > 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest:
            rest = self._state(rest, parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._reader is not None:
            parts += self._calls.parts(self._reader.finish())
            if not self._named:
                self._say(self._mark + "".join(self._unnamed), parts)
        elif self._state == self._start:
            self._say(self._raw, parts)
        self._say(self._finder.finish(), parts)
        if self._blanks and not self.called_tools:
            parts.append(TextPart(self._blanks))
        return parts

    def check_invariants(self) -> None:
        """What is held back is only what may yet become something else."""
        self._finder.check_invariants()
        assert not self._blanks.strip() and len(self._blanks) <= MAX_BLANKS
        assert (self._reader is not None) == (self._state == self._call)
        assert self._reader is None or not (self._reader.done or self._reader.failed)
        assert not self._unnamed or (self._state == self._call and not self._named)
        assert not self._raw or self._state in (self._start, self._after)
        assert len(self._raw) <= 2 * MAX_BLANKS + len("```json")
        if self._state == self._after:
            behind = self._raw.lstrip(BETWEEN)
            assert not behind or any(closer.startswith(behind) for closer in self._closers)

    def _say(self, text: str, parts: list[Part]) -> None:
        said, self._blanks = split_blanks(self._blanks + text)
        if said:
            parts.append(TextPart(said))

    def _start(self, text: str, parts: list[Part]) -> str | None:
        """At the start of the answer, which may be nothing but calls."""
        self._raw += text
        found = _START.match(self._raw)
        if found:
            rest, self._raw = self._raw[found.end() :], ""
            self._open(self._at_start, found.group())
            return rest
        if _MAY_START.fullmatch(self._raw):
            return None
        self._state, rest, self._raw = self._text, self._raw, ""
        return rest

    def _text(self, text: str, parts: list[Part]) -> str | None:
        before, mark, rest = self._finder.push(text)
        self._say(before, parts)
        if mark is not None and mark in self._readers:
            self._open(self._readers[mark], mark)
        elif mark in self._closers and not self.called_tools:
            self._say(mark, parts)
        return rest

    def _open(self, make: Callable[[], Reader] | None, mark: str) -> None:
        assert make is not None
        self._make, self._reader, self._mark, self._named = make, make(), mark, False
        self._unnamed.clear()
        self._state = self._call

    def _call(self, text: str, parts: list[Part]) -> str | None:
        assert self._reader is not None
        events, rest = self._reader.push(text)
        if any(isinstance(event, Name) for event in events):
            self._named, self._blanks = True, ""
            self._unnamed.clear()
        elif not self._named:
            self._unnamed.append(text)
        parts += self._calls.parts(events)
        if self._reader.failed:
            self._reader, self._state = None, self._text
            if not self._named:
                self._say(self._mark, parts)
                rest = "".join(self._unnamed)
                self._unnamed.clear()
        elif self._reader.done:
            self._reader, self._state = None, self._after
        return rest

    def _after(self, text: str, parts: list[Part]) -> str | None:
        """Behind a call: its closing mark, another call without an opening mark, or something else."""
        text = self._raw + text
        behind = text.lstrip(BETWEEN)
        between = text[: len(text) - len(behind)].lstrip()[-MAX_BETWEEN:]
        self._raw = ""
        for closer in self._closers:
            if behind.startswith(closer):
                return behind[len(closer) :]
        if not behind or any(closer.startswith(behind) for closer in self._closers):
            self._raw = between + behind
            return None
        if behind[:1] in ("{", "["):
            self._open(self._make, "")
            return behind
        self._state = self._text
        return between.removeprefix("```").lstrip() + behind
