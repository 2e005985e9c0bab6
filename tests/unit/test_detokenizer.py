from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.text.detokenizer import Detokenizer


class Pieces:
    """A vocabulary: token i adds pieces[i]."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def stream(pieces: list[bytes], stop=()) -> list[str]:
    """All texts returned, `finish` last."""
    detokenizer = Detokenizer(Pieces(pieces), stop)
    out = []
    for i in range(len(pieces)):
        out.append(detokenizer.push(i))
        detokenizer.check_invariants()
    out.append(detokenizer.finish())
    detokenizer.check_invariants()
    return out


def offline(data: bytes, stop) -> str:
    """All text at once, cut before the stop string that ends first; of those, the longest."""
    text = data.decode("utf-8", "replace")
    found = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    return text[: min(found)[1]] if found else text


def test_characters_are_never_split():
    raw = "a😸b中é🇯🇵".encode()
    out = stream([raw[i : i + 1] for i in range(len(raw))])
    assert "".join(out) == "a😸b中é🇯🇵"
    assert all("\ufffd" not in text for text in out)
    assert out[:6] == ["a", "", "", "", "😸", "b"]


def test_control_tokens_that_are_shown_are_text_like_any_other():
    detokenizer = Detokenizer(Pieces([b"a\xf0\x9f", b"", b"", b"b"]), ["|>b"], {1: b"<|x|>"})
    assert [detokenizer.push(i) for i in range(3)] == ["a", "\ufffd<|x", ""]
    assert detokenizer.push(3) == "" and detokenizer.stopped


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\xe2", b"("],
        [b"\xf0\x9f", b"\x98", b"x"],
        [b"\xff", b"\xfe\xc0", b"\x80"],
        [b"\xed\xa0", b"\x80z"],
        [b"ok \xe4\xb8"],
        [b"\xf4", b"\x90\x80\x80"],
    ],
)
def test_broken_utf8_is_replaced_as_python_does(pieces):
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


def test_stop_inside_and_across_tokens():
    assert "".join(stream([b"one STOP two"], ["STOP"])) == "one "
    assert stream([b"on", b"e S", b"TO", b"P two", b"x"], ["STOP"]) == ["on", "e ", "", "", "", ""]
    assert stream([b"e S", b"TO", b"R"], ["STOP"]) == ["e ", "", "STOR", ""]


def test_held_text_comes_back_at_the_end():
    assert stream([b"a\n", b"\nUs"], ["\n\nUser:"]) == ["a", "", "\n\nUs"]


def test_only_what_may_become_a_stop_is_held():
    assert stream([b"aab", b"aa", b"c"], ["aabaab"]) == ["", "", "aabaac", ""]
    assert stream([b"aabaa", b"baab"], ["aabaabx"]) == ["", "aab", "aabaab"]


def test_nothing_follows_a_stop():
    detokenizer = Detokenizer(Pieces([b"xSTOPy", b"z"]), ["STOP"])
    assert detokenizer.push(0) == "x" and detokenizer.stopped
    assert detokenizer.push(1) == "" and detokenizer.finish() == ""


def test_the_first_complete_stop_wins_and_of_equals_the_longest():
    assert "".join(stream([b"abcdef"], ["bcde", "cd"])) == "ab"
    assert "".join(stream([b"abcdef"], ["cd", "bcd", "d"])) == "a"
    assert "".join(stream([b"a", b"bc", b"def"], ["d", "bcd", "cd"])) == "a"


def test_stop_of_several_bytes_and_of_replacement_characters():
    raw = "x停止y".encode()
    assert "".join(stream([raw[i : i + 1] for i in range(len(raw))], ["停止"])) == "x"
    assert "".join(stream([b"a\xff", b"b"], ["\ufffdb"])) == "a"
    assert "".join(stream([b"a\xe4\xb8"], ["\ufffd"])) == "a"


ALPHABET = ["a", "b", "ab", "\n", "é", "😸", "\ufffd"]
BYTES = st.lists(
    st.one_of(
        st.sampled_from([b"a", b"b", b"ab", b"ba", b"\n", b"", "é".encode(), "😸".encode()]),
        st.sampled_from([b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\xb8", b"\xff"]),
    ),
    max_size=30,
)
STOPS = st.lists(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map("".join), max_size=4)


@settings(max_examples=600, deadline=None)
@given(BYTES, STOPS)
def test_streamed_text_is_the_offline_text(pieces, stop):
    out = stream(pieces, stop)
    assert "".join(out) == offline(b"".join(pieces), stop)


def test_random_tokens_of_a_real_vocabulary(smollm2_path):
    from hetero.text.tokenizer import Tokenizer

    tokenizer, rng = Tokenizer(smollm2_path), random.Random(0)
    byte_tokens = [i for i in range(tokenizer.n_vocab) if len(tokenizer.token_bytes(i)) == 1]
    for _ in range(60):
        ids = [
            rng.choice(byte_tokens) if rng.random() < 0.5 else rng.randrange(tokenizer.n_vocab)
            for _ in range(80)
        ]
        text = tokenizer.decode(ids)
        stop = [text[at : at + rng.randrange(1, 6)] for at in (rng.randrange(len(text)) for _ in range(3))]
        detokenizer = Detokenizer(tokenizer, stop)
        out = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert out == offline(b"".join(map(tokenizer.token_bytes, ids)), stop)
        assert detokenizer.stopped


def test_work_per_token_does_not_grow():
    """A text that nearly repeats the stop string keeps much of it held; that must not cost more each time."""
    stop = "a" * 200 + "b"
    detokenizer = Detokenizer(Pieces([b"a" * 4]), [stop])
    start = time.process_time()
    size = sum(len(detokenizer.push(0)) for _ in range(20_000))
    assert size == 80_000 - 200
    assert time.process_time() - start < 3
