"""Tool calls with tags around keys and values, as Qwen3-Coder and GLM write them.

<function=NAME><parameter=KEY>          NAME<arg_key>KEY</arg_key>
VALUE                                   <arg_value>VALUE</arg_value>
</parameter></function>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.text.tools.readers import BLANK, MAX_HEADER_CHARS, Arguments, Event, JsonCalls, Name, Reader
from hetero.text.tools.scan import JsonValue, MarkFinder
from hetero.text.tools.types import ALL_TYPES, json_of, types_of

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments


@dataclass(frozen=True, slots=True)
class Style:
    """The tags of a family. `trim`: a line break just inside a value's tags does not belong to it.

    name_end        what may end the name; the last of them also is the end of a call without arguments
    end             what ends the call; "" where only the tag around it does
    """

    name_end: tuple[str, ...]
    key_open: str
    key_close: str
    value_close: str
    end: str
    trim: bool


QWEN = Style((">",), "<parameter=", ">", "</parameter>", "</function>", True)
GLM = Style(
    ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", False
)
_GLM_VALUE_OPEN = "<arg_value>"


class TaggedCall:
    """One call in tags. Values of string parameters go out as they come, others when they are complete.

    A value is a string where the schema says so, else what it is as JSON; a string again if it is no JSON or
    of a type that the schema does not allow. A closing tag within a string of JSON is part of that, unless
    there turns out to be no such string: the text is then read again from there.
    """

    def __init__(self, style: Style, schemas: Schemas):
        self.done = self.failed = False
        self._style = style
        self._schemas = schemas
        self._take: Callable[[str, str | None, list[Event]], None] = self._in_name
        self._finder = MarkFinder(style.name_end)
        self._pieces: list[str] = []  # of the name, the key or the value
        self._types: frozenset[str] = ALL_TYPES
        self._root: Mapping[str, Any] = {}  # the schema of the arguments, and its properties
        self._properties: Mapping[str, Any] = {}
        self._num_keys = 0
        self._fresh = False  # nothing of the value has come yet
        self._held = ""  # a line break that may be the last of a value
        self._json: JsonValue | None = None  # the value, where it begins like JSON with strings
        self._passed = -1  # where in the value the first closing tag within a string ends
        self._trusts_json = True
        self._again = ""  # to be read before what comes

    def push(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        while not (self.done or self.failed):
            before, mark, text = self._finder.push(text)
            self._take(before, mark, events)
            text, self._again = self._again + text, ""
            if mark is None and not text:
                break
        return events, text if self.done else ""

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._passed >= 0:
            self._close_at_passed(events)
            text, self._again = self._again, ""
            events += self.push(text)[0]
        return events

    def _go(self, take: Callable[[str, str | None, list[Event]], None], *marks: str) -> None:
        self._take, self._pieces, self._finder = take, [], MarkFinder(marks)

    def _go_between(self) -> None:
        self._go(self._in_between, self._style.key_open, self._style.end)

    def _in_name(self, before: str, mark: str | None, events: list[Event]) -> None:
        self._pieces.append(before)
        given = "".join(self._pieces)
        name = given.strip()
        self.failed = len(given) > MAX_HEADER_CHARS or (mark is None and "{" in name)
        if mark == "\n" and not name:
            self._pieces.clear()
            return
        if mark is None or self.failed:
            return
        self.failed = not name or any(char in name for char in "<>{} \n")
        if self.failed:
            return
        self._root = self._schemas.get(name) or {}
        self._properties = self._root.get("properties") or {}
        events.append(Name(name))
        self._go_between()
        if mark in (self._style.key_open, self._style.end):
            self._in_between("", mark, events)

    def _in_between(self, before: str, mark: str | None, events: list[Event]) -> None:
        if mark == self._style.key_open:
            self._go(self._in_key, self._style.key_close)
        elif mark is not None:
            events.append(Arguments("}" if self._num_keys else "{}"))
            self.done = True

    def _in_key(self, before: str, mark: str | None, events: list[Event]) -> None:
        self._pieces.append(before)
        if mark is None:
            return
        key = "".join(self._pieces).strip()
        self._types = types_of(self._properties.get(key), self._root)
        events.append(
            Arguments((", " if self._num_keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        )
        self._num_keys += 1
        self._fresh, self._held = True, ""
        if self._style is GLM:
            self._go(self._in_opening, _GLM_VALUE_OPEN)
        else:
            self._go(self._in_value, self._style.value_close)

    def _in_opening(self, before: str, mark: str | None, events: list[Event]) -> None:
        if mark is not None:
            self._go(self._in_value, self._style.value_close)

    def _in_value(self, before: str, mark: str | None, events: list[Event]) -> None:
        if self._types != {"string"}:
            self._json_piece(before, mark, events)
            return
        events_text = self._string_piece(before, mark is not None)
        if events_text:
            events.append(Arguments(events_text))
        if mark is not None:
            self._go_between()

    def _json_piece(self, before: str, mark: str | None, events: list[Event]) -> None:
        """More of a value that may be JSON, and its closing tag."""
        self._pieces.append(before)
        if self._fresh and self._trusts_json and (begun := before.lstrip()):
            self._fresh = False
            self._json = JsonValue() if begun[0] in '{["' else None
        if self._json is not None:
            self._json.push(before if self._json.first else before.lstrip())
            if mark is not None and self._json.in_string and not self._json.torn:
                self._pieces.append(mark)
                if self._passed < 0:
                    self._passed = sum(map(len, self._pieces))
                return
            if self._passed >= 0 and self._json.torn:
                self._pieces.append(mark or "")
                self._close_at_passed(events)
                return
        if mark is not None:
            self._close_value("".join(self._pieces), events)

    def _close_at_passed(self, events: list[Event]) -> None:
        """Take the first closing tag within a string for one after all."""
        text = "".join(self._pieces) + self._finder.finish()
        value, self._again = text[: self._passed].removesuffix(self._style.value_close), text[self._passed :]
        self._trusts_json = False
        self._close_value(value, events)

    def _close_value(self, text: str, events: list[Event]) -> None:
        if self._style.trim:
            text = text.removeprefix("\n").removesuffix("\n")
        events.append(Arguments(json_of(text, self._types)))
        self._json, self._passed = None, -1
        self._go_between()

    def _string_piece(self, text: str, is_last: bool) -> str:
        """More of a JSON string: its quotes, and what is between."""
        opening = '"' if self._fresh and (text or is_last) else ""
        if self._style.trim:
            if self._fresh and text:
                text = text.removeprefix("\n")
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._fresh = self._fresh and not opening
        return opening + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if is_last else "")


class AnyTagged:
    """What stands in <tool_call>: JSON, <function=…> or a name with <arg_key>s, whichever begins."""

    def __init__(self, schemas: Schemas):
        self.done = self.failed = False
        self._schemas = schemas
        self._begun = ""
        self._reader: Reader | None = None

    def push(self, text: str) -> tuple[list[Event], str]:
        if self._reader is None:
            text = (self._begun + text).lstrip(BLANK)
            if not text or (len(text) < len("<function=") and "<function=".startswith(text)):
                self._begun = text
                return [], ""
            if text[0] in "{[":
                self._reader = JsonCalls()
            elif text.startswith("<function="):
                self._reader, text = TaggedCall(QWEN, self._schemas), text[len("<function=") :]
            else:
                self._reader = TaggedCall(GLM, self._schemas)
        events, rest = self._reader.push(text)
        self.done, self.failed = self._reader.done, self._reader.failed
        return events, rest

    def finish(self) -> list[Event]:
        return [] if self._reader is None else self._reader.finish()
