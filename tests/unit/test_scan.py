"""Marks and JSON values are found wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.text.tools.scan import JsonValue, MarkFinder


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3), st.text("ab<>", max_size=30), st.data())
def test_a_mark_is_found_wherever_the_text_is_cut(marks, text, data):
    marks = [mark for mark in marks if not any(other != mark and other in mark for other in marks)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    finder, before, found, rest = MarkFinder(marks), "", None, ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if found is not None:
            rest += text[start:end]
            continue
        piece, found, rest = finder.push(text[start:end])
        finder.check_invariants()
        before += piece
    before += finder.finish()
    assert before + (found or "") + rest == text
    first = min((at for mark in marks if (at := text.find(mark)) >= 0), default=None)
    assert (len(before) if found else None) == first


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(JSON, st.text(max_size=3), st.booleans(), st.data())
def test_the_end_of_a_value_is_found_wherever_it_is_cut(value, behind, indent, data):
    text = json.dumps(value, ensure_ascii=False, indent=1 if indent else None)
    all_text = text + "," + behind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(all_text)), max_size=5)))
    reader, read_text = JsonValue(), ""
    for start, end in zip([0, *cuts], [*cuts, len(all_text)], strict=True):
        if not reader.done:
            read_text += all_text[start : reader.push(all_text[:end], start)]
    assert reader.done and read_text == text


@pytest.mark.parametrize("size", [1, 2, 99])
def test_what_is_no_json_is_mended(size):
    text, reader, read = '{"a\n": ["\\\t\x01<", {"b": 1\n</call>', JsonValue(), ""
    for at in range(0, len(text), size):
        read += reader.read(text[at : at + size])[0]
    assert json.loads(read) == {"a\n": ["\t\x01<", {"b": 1}]}
    assert reader.done and reader.torn and reader.missing == "}]}"
    assert reader.read("}") == ("", 0)
