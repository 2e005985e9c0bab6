"""The store of served text: what it proposes, forgets, keeps apart and saves."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scale import FULL
from spec_tools import VOCAB, after, unique

from spec import store as store_module
from spec import store_kernels as kernels
from spec.base import Draft
from spec.store import BYTES_PER_TOKEN, Store


class StoreMachine(RuleBasedStateMachine):
    """What is proposed was learned: each token of a draft stood behind the three before it in its scope."""

    phrases = st.sampled_from([unique(seed, length) for seed, length in enumerate((1, 2, 5, 9, 17, 30, 60))])
    texts = st.lists(st.one_of(phrases, st.lists(st.integers(0, 2), max_size=20)), max_size=6)
    scopes = st.sampled_from(["", "a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(VOCAB, 1024)
        self.learned: dict[str, set[tuple[int, ...]]] = {}
        self.texts_of: dict[str, list[list[int]]] = {}

    @rule(pieces=texts, scope=scopes)
    def learn(self, pieces: list[list[int]], scope: str) -> None:
        text = [token for piece in pieces for token in piece]
        self.store.learn_now(text, scope)
        grams = self.learned.setdefault(scope, set())
        grams.update(tuple(text[i : i + 4]) for i in range(len(text) - 3))
        self.texts_of.setdefault(scope, []).append(text)

    @rule(data=st.data(), scope=scopes, max_tokens=st.integers(0, 20), steps=st.integers(1, 3))
    def propose(self, data: st.DataObject, scope: str, max_tokens: int, steps: int) -> None:
        known = [text for texts in self.texts_of.values() for text in texts if text]
        text = data.draw(st.sampled_from(known)) if known else [1, 2, 3, 4]
        cut = data.draw(st.integers(0, len(text)))
        context = text[:cut]
        proposer = self.store.proposer(scope)
        proposer.extend(context)
        for _ in range(steps):  # each takes the draft for right and goes on behind it
            draft = proposer.propose(max_tokens)
            self.check(context, draft, scope, max_tokens)
            told = draft.token_ids + data.draw(st.lists(st.integers(0, 2), max_size=2))
            proposer.extend(told)
            context = context + told

    def check(self, context: list[int], draft: Draft, scope: str, max_tokens: int) -> None:
        assert len(draft.token_ids) <= max_tokens
        if draft.token_ids:
            assert kernels.SHORT <= draft.match_length <= min(len(context), kernels.LOOK)
            # Three tokens of context may mean that an edited copy goes on beside its original.
            text = (context[-3:] if draft.match_length > kernels.SHORT else []) + draft.token_ids
            grams = {tuple(text[i : i + 4]) for i in range(len(text) - 3)}
            learned = self.learned.get(scope, set())
            assert grams <= learned and set(draft.token_ids) <= {token for gram in learned for token in gram}

    @invariant()
    def whole(self) -> None:
        self.store.check_invariants()


StoreMachine.TestCase.settings = settings(
    max_examples=200 if FULL else 60, stateful_step_count=25, deadline=None
)
TestStore = StoreMachine.TestCase


def test_what_was_learned_is_proposed():
    store, text = Store(VOCAB, 4096), unique(1, 1000)
    store.learn_now(text)
    for i in range(kernels.MIDDLE, 990):
        draft = after(store, text[:i])
        assert draft == Draft(text[i : i + 8], min(i, kernels.LOOK)), i
    # Three tokens of context: the index of these keeps one place a bucket.
    short = [after(store, text[i - 3 : i]) == Draft(text[i : i + 8], 3) for i in range(3, 990)]
    assert sum(short) > 500
    assert after(store, text).token_ids == []  # nothing came after the end


def test_a_longer_match_wins_over_a_more_recent_one():
    store, shared = Store(VOCAB, 4096), unique(2, 12)
    store.learn_now([100, 101, 102, *shared, 1, 2, 3])
    store.learn_now([200, 201, 202, *shared, 4, 5, 6])
    assert after(store, [100, 101, 102, *shared], 3) == Draft([1, 2, 3], 15)
    assert after(store, [200, 201, 202, *shared], 3) == Draft([4, 5, 6], 15)
    assert after(store, [9, *shared], 3) == Draft([4, 5, 6], 12)  # the more recent of equals


def test_places_that_only_share_a_bucket_are_no_match():
    """Here two n-grams of six share one, and the two last tokens."""
    store = Store(VOCAB, 1024)
    store.learn_now([24098, 47186, 9636, 28311, 13968], "a")
    store.learn_now([2, 2, 1, 2, 1, 2, 0])
    store.learn_now([41261, 19539, 1, 0, 1, 2])
    assert after(store, [41261, 19539, 1, 0, 1, 2], 1) == Draft([], 0)


def test_text_seen_again_takes_no_room_and_its_variant_little():
    store, text = Store(VOCAB, 16384), unique(3, 2000)
    store.learn_now(text)
    held = store.held_tokens
    assert held == 2000
    for _ in range(5):
        store.learn_now(text)
    assert store.held_tokens == held
    edited = [*text[:500], 7, 7, 7, *text[505:]]
    for _ in range(2):
        store.learn_now(edited)
    assert held < store.held_tokens < held + 100
    variant = after(store, edited[:500], 60).token_ids
    assert variant == edited[500:560]  # the newest, and on into what both have in common


def test_the_variant_confirmed_more_often_wins_until_it_is_contradicted():
    store, context = Store(VOCAB, 4096), unique(4, 40)
    usual, new = [*context, 1, 1, 1], [*context, 2, 2, 2]
    for _ in range(8):
        store.learn_now(usual)
    store.learn_now(new)
    assert after(store, context, 1).token_ids == [1]  # once does not outweigh eight
    for _ in range(3):
        store.learn_now(new)
    assert after(store, context, 1).token_ids == [2]
    assert after(store, context[:-6], 9).token_ids == new[-9:]  # a draft that begins before


@pytest.mark.parametrize(
    ("edit", "goes_on"),
    [([900], 21), ([900, 901], 22), ([20, 900], 22), ([24], 25), ([900, 21], 22)],
    ids=["replaced", "two replaced", "two behind", "left out", "one of two replaced"],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_an_edited_copy_goes_on_beside_the_original(edit: list[int], goes_on: int, steps: int):
    store = Store(VOCAB, 4096)
    store.learn_now(range(100))
    proposer = store.proposer()
    proposer.extend(range(20))
    assert proposer.propose(1).token_ids == [20]
    for part in ([edit], [edit[:1], edit[1:]])[steps - 1]:
        proposer.extend(part)
        draft = proposer.propose(3)
    assert draft == Draft([goes_on, goes_on + 1, goes_on + 2], 3)


def test_a_copy_that_goes_on_in_its_original_stays_there():
    store = Store(VOCAB, 4096)
    store.learn_now([*range(20), 70, 81, 72, 80, 81, 99, 98])  # 81 comes twice, and after 80 it is the second
    proposer = store.proposer()
    proposer.extend(range(20))
    assert proposer.propose(1).token_ids == [70]
    proposer.extend([80, 81])
    assert proposer.propose(2) == Draft([99, 98], 3)


def test_what_replaced_an_original_is_not_taken_for_it():
    store = Store(VOCAB, 1024)
    store.learn_now(range(100), "a")
    proposer = store.proposer("a")
    proposer.extend(range(20))
    assert proposer.propose(1).token_ids == [20]
    for seed in range(8):  # the ring is written over
        store.learn_now(unique(seed, 400), "b")
    proposer.extend([20])
    assert proposer.propose(3) == Draft([], 0)


def test_a_repeated_token_does_not_fill_the_store():
    store = Store(VOCAB, 65536)
    store.learn_now([5] * 20_000)
    assert store.held_tokens < 200
    assert after(store, [5] * 20, 6).token_ids == [5] * 6


def test_the_oldest_text_goes_and_what_is_used_stays():
    store, used, unused = Store(VOCAB, 4096), unique(5, 300), unique(6, 300)
    store.learn_now(unused)
    for seed in range(100, 140):
        store.learn_now(used)
        store.learn_now(unique(seed, 300))
        assert after(store, used[:50], 20).token_ids == used[50:70]
    assert after(store, unused[:50], 20).token_ids != unused[50:70]
    assert store.held_tokens <= store.capacity


def test_scopes_do_not_see_each_other():
    store, text = Store(VOCAB, 4096), unique(7, 100)
    store.learn_now(text, "alice")
    assert after(store, text[:50], 5, "alice").token_ids == text[50:55]
    assert after(store, text[:50], 5, "bob").match_length == 0
    store.learn_now(unique(8, 100), "bob")
    assert after(store, text[:50], 5, "bob").match_length == 0
    assert after(store, text[:50], 5).match_length == 0


def test_a_scope_that_takes_anothers_number_gets_none_of_its_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "SCOPES", 2)
    store, text = Store(VOCAB, 4096), unique(9, 100)
    store.learn_now(text, "first")
    proposer = store.proposer("first")
    proposer.extend(text[:50])
    assert proposer.propose(5).token_ids == text[50:55]
    store.learn_now(unique(10, 100), "second")
    store.learn_now(unique(11, 100), "third")
    assert proposer.propose(5).match_length == 0
    assert after(store, text[:50], 5, "third").match_length == 0
    assert store.held_tokens == 200
    store.check_invariants()


def test_tokens_that_no_vocabulary_has_match_nothing():
    store, text = Store(VOCAB, 4096), unique(12, 100)
    store.learn_now(text)
    with pytest.raises(ValueError, match="below 50000"):
        store.learn_now([1, VOCAB, 2, 3])
    with pytest.raises(ValueError, match="below 50000"):
        store.learn([-1, 2, 3, 4])
    assert after(store, [*text[:30], -1]).match_length == 0
    assert after(store, [*text[:30], 2**31 - 1, *text[30:40]], 3) == Draft(text[40:43], 10)
    with pytest.raises(ValueError, match="2000000 tokens"):
        Store(2_000_000)


def test_ten_million_tokens_fit_200_megabytes():
    store = Store(VOCAB, 10_000_000)
    assert store.nbytes <= BYTES_PER_TOKEN * 10_000_000 + 100 < 150e6  # saving copies another 50 MB


# Learning in the background


def test_learning_beside_proposing():
    store, texts = Store(VOCAB, 65536), [unique(seed, 400) for seed in range(30, 50)]
    stop, wrong = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            for text in texts:
                draft = after(store, text[:100], 5)
                if draft.match_length > 20 and draft.token_ids != text[100:105]:
                    wrong.append(draft)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for text in texts * 3:
        assert store.learn(text)
    assert store.flush(30)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and store.learned_tokens == 24_000 and store.dropped_tokens == 0
    assert all(after(store, text[:100], 5).token_ids == text[100:105] for text in texts)
    store.check_invariants()
    store.close()
    assert not store.learn(texts[0])


def test_what_cannot_wait_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "_QUEUED", 1000)
    store = Store(VOCAB, 4096)
    with store._learning:  # the thread cannot go on
        assert store.learn(unique(60, 600))
        assert not store.learn(unique(61, 600))
        assert not store.flush(0.01)
        assert store.dropped_tokens == 600
    assert store.flush(30) and store.learned_tokens == 600
    store.close()


_FILL = """
import sys, numpy as np, resource
from pathlib import Path
from spec.store import Store
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = Store(50_000, 10_000_000, Path(sys.argv[1]), b"t")
rng = np.random.default_rng(0)
for _ in range(1100):
    store.learn_now(rng.integers(0, 50_000, 10_000).astype(np.int32))
assert store.held_tokens > 9_900_000
store.close()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)
"""


@pytest.mark.skipif(not FULL or sys.platform == "win32", reason="HETERO_TEST_SCALE=full: 15 seconds")
def test_ten_million_tokens_take_200_megabytes(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _FILL, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200e6
