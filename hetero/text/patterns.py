"""Finding any of many fixed texts."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CHARS = 200  # longer texts are left out; the special tokens of real vocabularies stay under 60


def any_of(texts: Iterable[str]) -> re.Pattern:
    """Matches any of `texts` as group 1, the longest where several match; nothing when there are none.

    The texts form a trie, so a mismatch costs one walk, not one try per text.
    """
    trie: dict = {}
    for text in texts:
        if not 0 < len(text) <= MAX_CHARS:
            continue
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def source(node: dict) -> str:
        ends = "" in node
        branches = [re.escape(char) + source(child) for char, child in node.items() if char]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and not ends else "(?:" + "|".join(branches) + ")"
        return joined + "?" if ends else joined

    return re.compile(f"({source(trie)})" if trie else r"((?!))")


def separable(texts: set[str]) -> bool:
    """Whether the matches of `any_of` are the same in whatever order one looks for the texts, longest first.

    They are unless the end of one text can be the beginning of another. Runs of one same character may
    overlap each other: cut greedily from the left, they come out the same.
    """
    if any(len(text) > MAX_CHARS for text in texts):
        return False
    runs = {text for text in texts if len(set(text)) == 1}
    starts = {text[:n] for text in texts - runs for n in range(1, len(text))}
    run_starts = {text[:n] for text in runs for n in range(1, len(text) + 1)}
    for text in texts:
        ends = [text[n:] for n in range(1, len(text))]
        if not starts.isdisjoint(ends) or (text not in runs and not run_starts.isdisjoint(ends)):
            return False
    return True
