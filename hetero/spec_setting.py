"""What --spec asks for, taken apart."""

from __future__ import annotations

import re
from typing import NamedTuple

NGRAMS = ("off", "ngram", "store")
_DRAFT = re.compile(r"(?:(ngram|store),)?draft:(.+)", re.DOTALL)


class Spec(NamedTuple):
    """Which guesses cost nothing to make (one of NGRAMS), and which model makes further ones."""

    ngrams: str
    draft: str | None = None


def parse_spec(text: str) -> Spec:
    """`off`, `ngram`, `store`, or `draft:MODEL`, which comes after `store`, or after `ngram` in
    `ngram,draft:MODEL`. ValueError otherwise."""
    if text in NGRAMS:
        return Spec(text)
    match = _DRAFT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not one of {', '.join(NGRAMS)}, draft:MODEL and ngram,draft:MODEL")
    return Spec(match[1] or "store", match[2])
