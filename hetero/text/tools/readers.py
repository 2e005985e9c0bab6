"""What tool calls look like inside, as JSON: objects and lists of them, or a name before its arguments.

A reader takes the text of one call, or of a list of them, as it comes, and gives its events: the names and
the arguments' JSON text. Failing is an answer too: what looked like a call was none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from hetero.text.tools.scan import JsonValue


@dataclass(frozen=True, slots=True)
class Name:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last."""

    text: str


Event = Name | Arguments

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
WRAPPER_KEYS = ("function", "tool_call", "tool_calls")  # hold a call or a list of calls; or the name itself
OTHER_KEYS = ("type", "id", "tool_call_id", "index", "call_id")
BLANK = " \t\r\n"
MAX_HEADER_CHARS = 300  # the name of a function has at most 64


class Reader(Protocol):
    """`done`: a call, or a list of them, was read to its end. `failed`: it is none, or a broken one."""

    done: bool
    failed: bool

    def push(self, text: str) -> tuple[list[Event], str]:
        """(events, the text behind the end, or behind what is wrong). The second is "" while it goes on."""

    def finish(self) -> list[Event]:
        """What was held back, when no more text comes."""


class JsonCalls:
    """{"name": …, "arguments": …}, or a list of such, also inside of `tool_calls` or `function`.

    `known`: the names that count; any, when None. Arguments that come before their name wait for it; those
    written as a string that holds JSON are taken out of it. An object with other keys is no call.
    """

    def __init__(self, known: Collection[str] | None = None):
        self.done = self.failed = False
        self._known = known
        self._open: list[str] = []  # "[" and "{" around the place
        self._wants = "value"  # value, key, colon, after
        self._value: JsonValue | None = None  # being read
        self._pieces: list[str] = []  # of it, where it does not go straight out
        self._key = ""
        self._name: str | None = None
        self._waiting: str | None = None  # arguments, complete, of a call without a name yet
        self._has_arguments = False
        self._num_calls = 0

    def push(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._value is not None:
                at = self._read(self._value, text, at, events)
            elif text[at] in BLANK:
                at += 1
            else:
                at = self._structure(text[at], at, events)
        return events, text[at:] if self.done or self.failed else ""

    def finish(self) -> list[Event]:
        return []

    def _structure(self, char: str, at: int, events: list[Event]) -> int:
        """Take a character that is no part of a key or value; where to go on, which may be before it."""
        inside = self._open[-1] if self._open else ""
        if self._wants == "colon" and char == ":":
            self._wants = "value"
        elif inside and self._wants != "colon" and char == ("}" if inside == "{" else "]"):
            self._close(events)
        elif self._wants == "after" and char == ",":
            self._wants = "key" if inside == "{" else "value"
        elif self._wants == "key" and char == '"':
            self._value = JsonValue()
            return at
        elif self._wants == "value" and char in "{[" and (inside != "{" or self._key in WRAPPER_KEYS):
            self._open.append(char)
            self._wants = "key" if char == "{" else "value"
            self.failed = len(self._open) > 4
        elif self._wants == "value" and inside == "{":
            self._value = JsonValue()
            return at
        else:
            self._fail(events)
            return at
        return at + 1

    def _fail(self, events: list[Event]) -> None:
        self.failed = True
        if self._name is not None and not self._has_arguments:
            events.append(Arguments("{}"))

    def _read(self, value: JsonValue, text: str, at: int, events: list[Event]) -> int:
        piece, end = value.read(text, at)
        is_arguments = self._wants == "value" and self._key in ARGUMENT_KEYS
        if is_arguments and self._name is not None and value.first == "{":
            self._has_arguments = True
            events.append(Arguments(piece))
        else:
            self._pieces.append(piece)
        if value.done:
            self._value = None
            read, self._pieces = "".join(self._pieces), []
            if read:
                self._take(read, events)
            else:
                self._wants = "after"
        return end

    def _take(self, text: str, events: list[Event]) -> None:
        """A whole key or value."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._wants == "key":
            self._key, self._wants = value, "colon"
            ours = (*NAME_KEYS, *ARGUMENT_KEYS, *WRAPPER_KEYS, *OTHER_KEYS)
            self.failed = value not in ours and self._name is None
            return
        self._wants = "after"
        if self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._waiting = _object_text(value, text)
        elif self._key in (*NAME_KEYS, *WRAPPER_KEYS) and isinstance(value, str) and self._name is None:
            self.failed = self._known is not None and value not in self._known
            if self.failed:
                return
            self._name = value
            self._num_calls += 1
            events.append(Name(value))
        if self._name is not None and self._waiting is not None:
            events.append(Arguments(self._waiting))
            self._waiting, self._has_arguments = None, True

    def _close(self, events: list[Event]) -> None:
        if self._open.pop() == "{" and self._name is not None:
            if not self._has_arguments:
                events.append(Arguments("{}"))
            self._name, self._has_arguments = None, False
        self._waiting, self._wants = None, "after"
        if not self._open:
            self.done = self._num_calls > 0
            self.failed = not self.done


def _object_text(value: Any, text: str) -> str:
    """The text of the arguments' object, given the JSON value in its place."""
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) and value.lstrip().startswith("{") else text


class NamedCall:
    """A name and then the JSON object of its arguments: `name[ARGS]{…}`, `name\\n```json\\n{…}`.

    `name_of` takes the name out of all that comes before the object, "" if there is none.
    """

    def __init__(self, name_of: Callable[[str], str]):
        self.done = self.failed = False
        self._name_of = name_of
        self._header = ""
        self._value: JsonValue | None = None

    def push(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        if self._value is None:
            before, brace, text = text.partition("{")
            self._header += before
            self.failed = len(self._header) > MAX_HEADER_CHARS
            if self.failed or not brace:
                return events, ""
            name = self._name_of(self._header)
            self.failed = not name
            if self.failed:
                return events, ""
            events.append(Name(name))
            self._value, text = JsonValue(), brace + text
        piece, end = self._value.read(text)
        if piece:
            events.append(Arguments(piece))
        self.done = self._value.done
        return events, text[end:]

    def finish(self) -> list[Event]:
        return []
