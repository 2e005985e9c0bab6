"""Gemma 4's calls: `call:NAME{key:<|"|>text<|"|>,n:3,on:true,list:[1],inner:{k:null}}`.

Format: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

from __future__ import annotations

import json
import re

from hetero.text.tools.readers import MAX_HEADER_CHARS, Arguments, Event, Name
from hetero.text.tools.scan import JsonValue, MarkFinder

QUOTE = '<|"|>'
_WORD_END = re.compile(r'[{}\[\],:"]|<\|"\|>')
_CUT_QUOTE = re.compile(r'<\|"\|?$')
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class GemmaCall:
    """One call; its arguments as JSON, as they come. Strings within JSON's own quotes are taken too."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._header = ""
        self._depth = 0  # of braces and brackets; 0 before the arguments
        self._word = ""  # a key or value without quotes, not complete, or what may become a QUOTE
        self._string: JsonValue | None = None  # in JSON's quotes
        self._quoted: MarkFinder | None = None

    def push(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        pieces: list[str] = []
        if self._depth == 0:
            text = self._begin(text, events)
        while text and not self.done:
            text = self._read(text, pieces)
        if arguments := "".join(pieces):
            events.append(Arguments(arguments))
        return events, text

    def finish(self) -> list[Event]:
        return []

    def _begin(self, text: str, events: list[Event]) -> str:
        before, brace, rest = text.partition("{")
        self._header += before
        name = self._header.strip().removeprefix("call:").strip()
        self.failed = len(self._header) > MAX_HEADER_CHARS or (bool(brace) and not re.fullmatch(r"\S+", name))
        if not brace or self.failed:
            return ""
        events += [Name(name), Arguments("{")]
        self._depth = 1
        return rest

    def _read(self, text: str, pieces: list[str]) -> str:
        """Take some of the text; what is left of it."""
        if self._quoted is not None:
            before, mark, rest = self._quoted.push(text)
            pieces.append(json.dumps(before, ensure_ascii=False)[1:-1])
            if mark is not None:
                pieces.append('"')
                self._quoted = None
            return rest
        if self._string is not None:
            piece, end = self._string.read(text)
            pieces.append(piece)
            if self._string.done:
                self._string = None
            return text[end:]
        text, self._word = self._word + text, ""
        found = _WORD_END.search(text)
        if found is None or _CUT_QUOTE.search(text, 0, found.end() + 2) is not None:
            self._word = text.lstrip()  # there may be very many blanks
            return ""
        pieces.append(self._word_json(text[: found.start()], found.group()))
        return self._structure(found.group(), text, found, pieces)

    def _structure(self, mark: str, text: str, found: re.Match, pieces: list[str]) -> str:
        if mark == QUOTE:
            pieces.append('"')
            self._quoted = MarkFinder((QUOTE,))
        elif mark == '"':
            self._string = JsonValue()
            return text[found.start() :]
        else:
            pieces.append(mark + " " * (mark in ",:"))
            self._depth += (mark in "{[") - (mark in "}]")
            self.done = self._depth == 0
        return text[found.end() :]

    @staticmethod
    def _word_json(word: str, behind: str) -> str:
        """A key or value without quotes, as JSON; blanks around it do not count."""
        word = word.strip()
        if not word or (behind != ":" and _JSON_WORD.fullmatch(word)):
            return word
        return json.dumps(word, ensure_ascii=False)
