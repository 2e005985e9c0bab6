"""Pieces of llguidance's Lark grammars for text with marks in it.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero.text.output import literal

MarkToken = Callable[[str], int | None]  # the id of a mark that is a token which no text can write
ANY_TEXT = "/(?s:.*)/"
_MARK = re.compile(r"(<[^<>\s]{1,60}>|\[/?[A-Z_]{1,60}\])")


class Inexpressible(Exception):
    """What a schema says cannot be said in the family's own form, or takes too long to say."""


class LarkWriter:
    """Expressions, and the rules and terminals that they need; with `room`, of so many characters in all."""

    def __init__(self, mark_token: MarkToken, room: int | None = None):
        self.rules: list[str] = []
        self._token = functools.cache(mark_token)
        self._room = room
        self._names: dict[str, str] = {}  # body -> name

    def write(self, text: str) -> str:
        """`text` itself, marks in it as their tokens where they are some."""
        pieces, plain = [], ""
        for part in _MARK.split(text):
            token_id = self._token(part) if _MARK.fullmatch(part) else None
            if token_id is None:
                plain += part
                continue
            pieces += [literal(plain)] * bool(plain) + [f"<[{token_id}]>"]
            plain = ""
        return " ".join(pieces + [literal(plain)] * bool(plain))

    def rule(self, body: str) -> str:
        """The name of a rule for `body`; of a rule there already is, if so. Inexpressible without room."""
        return self._named(body, "rule", "")

    def json(self, schema: Mapping[str, Any]) -> str:
        body = f"%json {json.dumps(schema)}"
        self._use(len(body))  # each time, as it takes that to look whether there is one
        return self._named(body, "rule", "")

    def _use(self, size: int) -> None:
        if self._room is not None:
            self._room -= size
            if self._room < 0:
                raise Inexpressible

    def text_until(self, mark: str) -> str:
        """Any text and then the mark."""
        if self._token(mark) is not None:
            return self.text_without(mark)  # not even in other tokens: who reads the text sees no tokens
        return self._named(f"/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}/", "text", "[lazy]")

    def text_without(self, mark: str, behind: str = "", forms: Sequence[str] = ()) -> str:
        """Text in which the mark does not stand, of all of the forms, then `behind` and the mark.

        `forms` are terminal expressions. One terminal holds all of it: by itself the text would take what is
        behind it too, as it is read as far as it goes.
        """
        body = " & ".join((*(forms or (ANY_TEXT,)), f"~({ANY_TEXT} {literal(mark)} {ANY_TEXT})"))
        token_id = self._token(mark)
        end = literal(behind) * bool(behind) if token_id is not None else literal(behind + mark)
        name = self._named(f"({body}) {end}", "TEXT", "")
        return name if token_id is None else f"{name} <[{token_id}]>"

    def _named(self, body: str, kind: str, options: str) -> str:
        if body not in self._names:
            self._names[body] = name = f"{kind}_{len(self._names)}"
            self.rules.append(f"{name}{options}: {body}")
            self._use(len(body))
        return self._names[body]


def one_of(texts: Sequence[str]) -> str:
    """A terminal expression."""
    return f"({' | '.join(map(literal, texts))})"
