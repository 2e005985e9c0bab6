"""The n-gram proposer against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.automaton import COPY, PATIENCE, SKIPPED
from spec.base import Draft, Proposer
from spec.ngram import NgramProposer


def longest_match(text: list[int]) -> tuple[int, int]:
    """(length, most recent earlier end) of the longest suffix that also ends earlier, or (0, -1)."""
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[-length:]:
                return length, end
    return 0, -1


def beside(text: list[int]) -> int | None:
    """Where in the original the last token of an edited copy is, if it is one."""
    departed = 0
    while longest_match(text[: len(text) - departed])[0] < COPY:
        departed += 1
        if departed > min(PATIENCE, len(text)):
            return None
    anchor = place = longest_match(text[: len(text) - departed])[1]
    for n in range(1, departed + 1):
        end = len(text) - departed + n - 1
        if n > 1 and text[place + 1] == text[end]:
            place += 1
            continue
        found = [p for p in range(anchor + 1, min(anchor + n + SKIPPED + 1, end)) if text[p] == text[end]]
        place = min(found, key=lambda p: abs(p - anchor - n), default=min(anchor + n, end - 1))
    return place


def expected(text: list[int], max_tokens: int) -> Draft:
    length, end = longest_match(text)
    original = beside(text) if length < 3 else None
    if original is not None:
        length, end = 3, original
    if not length:
        return Draft([], 0)
    extended = list(text)
    for i in range(max_tokens):
        extended.append(extended[end + 1 + i])
    return Draft(extended[len(text) :], length)


# Few letters repeat at once; the large ones meet each other's buckets.
letters = st.sampled_from([0, 1, 2, 3, 151_935, 262_143, 2**31 - 1])
texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(letters, max_size=60),
    st.lists(st.lists(letters, min_size=3, max_size=9), min_size=1, max_size=4, unique_by=tuple).flatmap(
        lambda phrases: st.lists(st.sampled_from(phrases), max_size=5).map(
            lambda some: [token for phrase in some for token in phrase]
        )
    ),
)


@settings(deadline=None, max_examples=60)
@given(pieces=st.lists(texts, min_size=1, max_size=4), max_tokens=st.integers(0, 9))
def test_equals_a_search_by_hand(pieces: list[list[int]], max_tokens: int):
    proposer: Proposer = NgramProposer(pieces[0])
    text = list(pieces[0])
    for piece in pieces[1:]:
        for token in piece:
            proposer.extend([token])
            text.append(token)
            assert proposer.propose(max_tokens) == (
                expected(text, max_tokens) if max_tokens else Draft([], 0)
            )
        proposer.check_invariants()
    assert proposer.match_length == longest_match(text)[0] and len(proposer) == len(text)


numbers = st.integers(0, 40)


@settings(deadline=None, max_examples=60)
@given(
    original=st.lists(numbers, min_size=15, max_size=40, unique=True),
    edits=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.lists(numbers, max_size=3)), max_size=3
    ),
)
def test_beside_an_edited_copy(original: list[int], edits: list[tuple[int, int, list[int]]]):
    copy = list(original)
    for at, removed, inserted in edits:
        copy[at : at + removed] = inserted
    proposer, text = NgramProposer(original), list(original)
    for token in copy:
        proposer.extend([token])
        text.append(token)
        assert proposer.propose(5) == expected(text, 5)


@settings(deadline=None, max_examples=20)
@given(text=st.lists(letters, min_size=250, max_size=600), cut=st.integers(0, 600))
def test_growth_and_the_size_of_pieces_change_nothing(text: list[int], cut: int):
    whole, pieces, single = NgramProposer(text), NgramProposer(text[:cut]), NgramProposer()
    pieces.extend(np.array(text[cut:], np.int32))
    for token in text:
        single.extend([token])
    for proposer in (whole, pieces, single):
        proposer.check_invariants()
        assert proposer.propose(12) == whole.propose(12)
    assert whole.match_length == longest_match(text)[0]


def test_the_most_recent_of_equal_matches():
    assert NgramProposer([7, 8, 1, 7, 8, 2, 7, 8]).propose(2) == Draft([2, 7], 2)


def test_a_longer_match_before_a_more_recent_one():
    assert NgramProposer([6, 7, 8, 1, 5, 7, 8, 2, 6, 7, 8]).propose(1) == Draft([1], 3)


def test_a_repeated_word_goes_on_repeating():
    assert NgramProposer([5, 9, 9, 9]).propose(4) == Draft([9, 9, 9, 9], 2)
    assert NgramProposer([1, 2, 3] * 2).propose(7) == Draft([1, 2, 3, 1, 2, 3, 1], 3)


@pytest.mark.parametrize("text", [[], [3], [1, 2, 3]])
def test_nothing_repeated_is_no_draft(text: list[int]):
    proposer = NgramProposer(text)
    assert proposer.propose(4) == Draft([], 0)
    proposer.check_invariants()


def test_a_copy_follows_the_original_through_a_repeated_passage():
    """In the copy of a text that says the same twice, the right place is the one with the longer context."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 1000, 40).tolist()
    text = [*rng.integers(0, 1000, 30), *common, 2001, *rng.integers(0, 1000, 30), *common, 2002]
    copied = text + text[:70]  # up to the end of the first of both
    assert NgramProposer(copied).propose(1) == Draft([2001], 70)


@pytest.mark.parametrize(
    ("edit", "goes_on"),
    [([900], 21), ([900, 901], 22), ([20, 900], 22), ([24], 25), ([900, 21], 22)],
    ids=["replaced", "two replaced", "two behind", "left out", "one of two replaced"],
)
def test_an_edited_copy_goes_on_beside_the_original(edit: list[int], goes_on: int):
    original = list(range(100))
    text = [*original, *original[:20], *edit]
    assert NgramProposer(text).propose(3).token_ids == [goes_on, goes_on + 1, goes_on + 2]


def test_a_copy_that_goes_on_in_its_original_stays_there():
    original = [*range(20), 70, 81, 72, 80, 81, 99, 98]  # 81 comes twice, and after 80 it is the second
    assert NgramProposer([*original, *range(20), 80, 81]).propose(2) == Draft([99, 98], 3)


def test_memory_of_a_long_prompt():
    """Code has about 1.4 states a token; what is allocated is bounded for every text."""
    proposer = NgramProposer(np.random.default_rng(1).integers(0, 3, 20_000).astype(np.int32))
    assert proposer.nbytes <= 100 * len(proposer)
    proposer.check_invariants()
