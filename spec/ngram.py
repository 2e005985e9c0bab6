"""Proposes what followed the last time when the request's text read like this."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from . import automaton
from .base import Draft

_FIRST = 256  # tokens there is room for at the start
_BESIDE = 3  # matches of fewer tokens tell less than a longer one that just ended


class NgramProposer:
    """Longest match within the request's own tokens, prompt and output alike. Single thread.

    The longest suffix of the text that also ends somewhere earlier is the suffix link of the automaton's last
    state, so that it is known after each token at no cost:

        text   a b c d e  x y  b c d e  z  b c d e        match_length 4
                                     ^ the match ends here most recently, and this follows:
                                        z  b c d e  z ..  the draft

    The match is the longest there is, exactly. Of its ends the most recent is taken, or an older one after a
    run of more than `automaton.REFRESH` equal tokens. A draft that reaches the end of the text goes on with
    itself, as the text would if it repeated.

    Where a match of at least `automaton.COPY` tokens ends, an edit is likely: until something longer than two
    tokens matches, the draft goes on beside it, in the original (for a file with edits, 5 % fewer steps).

    Takes about 80 bytes a token (make bench-drafts).
    """

    name = "ngram"

    def __init__(self, token_ids: Sequence[int] = ()):
        """`token_ids`: the first tokens, each 0 <= id < 2**31."""
        room = max(_FIRST, len(token_ids) + len(token_ids) // 8)
        self._text = np.empty(room, np.int32)
        self._states = np.empty((2 * room, automaton.STATE_COLUMNS), np.int32)
        self._edges = np.empty((room, automaton.EDGE_COLUMNS), np.int32)
        self._buckets = np.empty(_power_of_two(room), np.int32)
        self._counts = np.empty(automaton.COUNTS, np.int64)
        automaton.empty(self._states, self._buckets, self._counts)
        if len(token_ids):
            self.extend(token_ids)

    def __len__(self) -> int:
        return int(self._counts[automaton.TOKENS])

    @property
    def match_length(self) -> int:
        """How many of the last tokens also stand together somewhere earlier."""
        return int(self._counts[automaton.MATCH])

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including room to grow."""
        return sum(a.nbytes for a in (self._text, self._states, self._edges, self._buckets))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next verified tokens: a sequence or int32 [n]. Amortized O(1) for each."""
        tokens = np.asarray(token_ids, np.int32)
        if len(self) + len(tokens) > len(self._text):
            self._grow(len(self) + len(tokens))
        automaton.extend(tokens, self._text, self._states, self._edges, self._buckets, self._counts)

    def propose(self, max_tokens: int) -> Draft:
        """The tokens after the longest match; exactly `max_tokens` of them where there is a match.

        match_length counts as _BESIDE for the continuation of an edited copy.
        """
        counts = self._counts
        length, end = int(counts[automaton.MATCH]), int(counts[automaton.MATCH_END])
        if length < _BESIDE and counts[automaton.ANCHOR] >= 0:
            length, end = _BESIDE, int(counts[automaton.BESIDE])
        if not length or max_tokens <= 0:
            return Draft([], 0)
        draft: list[int] = self._text[end + 1 : min(end + 1 + max_tokens, len(self))].tolist()
        period = len(draft)
        while len(draft) < max_tokens:
            draft.append(draft[len(draft) - period])
        return Draft(draft, length)

    def _grow(self, needed: int) -> None:
        room = max(2 * len(self._text), needed)
        self._text = _larger(self._text, len(self), room)
        self._states = _larger(self._states, int(self._counts[automaton.STATES]), 2 * room)
        self._edges = _larger(self._edges, int(self._counts[automaton.NUM_EDGES]), room)
        self._buckets = np.empty(_power_of_two(room), np.int32)
        automaton.rehash(self._edges, self._buckets, self._counts)

    def check_invariants(self) -> None:
        """Raise AssertionError unless this is the suffix automaton of its text. O(states), slow."""
        states, used = self._states, int(self._counts[automaton.STATES])
        edges, num_edges = self._edges, int(self._counts[automaton.NUM_EDGES])
        length, link = states[:used, automaton.LENGTH], states[:used, automaton.LINK]
        assert 0 <= len(self) <= len(self._text) and used <= max(2, 2 * len(self))
        assert link[0] == -1 and length[0] == 0 and (link[1:] >= 0).all()
        assert (length[link[1:]] < length[1:]).all() and length[self._counts[automaton.LAST]] == len(self)
        assert (states[1:used, automaton.RECENT] < len(self)).all()
        assert (states[1:used, automaton.RECENT] >= length[1:] - 1).all()
        assert num_edges <= max(0, len(self) - 1)
        found = {(s, t): to for s, (t, to) in enumerate(states[:used, 3:5].tolist()) if to != -1}
        for state, token, target in edges[:num_edges, :3].tolist():
            assert (state, token) not in found
            found[state, token] = target
        for (state, _), target in found.items():
            assert length[state] < length[target], "an edge leads to longer strings"
        for end, token in enumerate(self._text[: len(self)].tolist()):
            state = found[state, token] if end else found[0, token]
            assert length[state] == end + 1, "the text itself is accepted"


@functools.cache
def compile_kernels() -> None:
    """Compile the kernels, or load them, before anybody waits for them: also those that a long text needs."""
    NgramProposer([0, 0]).extend([0] * _FIRST)


def _larger(array: np.ndarray, used: int, room: int) -> np.ndarray:
    larger = np.empty((room, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
