"""Drafts in the engine's loop over a fake device: no guess, right or wrong, changes what anybody gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fake_runner import (
    BLOCK_SIZE,
    EOS,
    N_VOCAB,
    ByteTokenizer,
    FakeRunner,
    Result,
    following,
    make_engine,
    text_after,
)
from scale import FULL
from spec_tools import compute_all
from test_engine import Client, finish

import hetero.generation
from hetero.batch import Batch
from hetero.engine import Engine
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.proposers import StoreSpeculation
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.sampling.sampler import Sampler
from hetero.scheduler import Scheduler
from hetero.speculation import LONGEST_PAUSE, Speculation
from spec.base import Draft
from spec.store import Store


class Scripted:
    """Knows what comes, and gets each guess wrong with a given probability."""

    name = "scripted"

    def __init__(self, wrong: float, seed: int = 0):
        self.ids: list[int] = []
        self.wrong, self.rng = wrong, random.Random(seed)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.ids += token_ids

    def propose(self, max_tokens: int) -> Draft:
        ids = list(self.ids)
        for _ in range(max_tokens):
            right = following(ids[-1], len(ids) - 1)
            ids.append(right if self.rng.random() >= self.wrong else 48 + self.rng.randrange(10))
        return Draft(ids[len(self.ids) :], 20)


def scripted(wrong: float, max_tokens: int = 8) -> Speculation:
    return compute_all(Speculation(("scripted",), lambda r: (Scripted(wrong),), max_tokens))


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_texts_do_not_depend_on_guesses(wrong: float, depth: int, window: int | None) -> None:
    speculation = scripted(wrong)
    engine = make_engine(FakeRunner(depth), num_blocks=30, window=window, speculation=speculation)
    prompts = ["a" * n + str(n) for n in (1, 15, 16, 17, 40, 90, 150, 33)]
    clients = [
        Client(engine, prompt, f"r{i}", max_tokens=60 + i, ignore_eos=True, logprobs=0)
        for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    speculation.check_invariants([])
    for i, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.text == text_after(prompt, 60 + i)
        assert client.reason is FinishReason.LENGTH
        assert client.deltas[-1].num_output_tokens == len(client.token_ids) == 60 + i
        assert [p.token_id for d in client.deltas for p in d.logprobs] == client.token_ids
    stats = engine.stats()
    assert stats.generated_tokens == sum(60 + i for i in range(8))
    assert stats.speculation is not None and stats.speculation.drafted["scripted"] > 100
    accepted = sum(stats.speculation.accepted["scripted"])
    if wrong in (0.0, 1.0):
        assert accepted == (1 - wrong) * stats.speculation.drafted["scripted"]
    assert (accepted > 100) == (wrong < 1)


def test_right_guesses_spare_steps() -> None:
    steps = {}
    for wrong in (0.0, 1.0):
        engine = make_engine(FakeRunner(), speculation=scripted(wrong, 7))
        client = Client(engine, "hello", max_tokens=64, ignore_eos=True)
        finish(engine)
        stats = engine.stats()
        steps[wrong], timings = stats.steps, client.deltas[-1].timings
        assert stats.speculation is not None
        tokens = stats.speculation.request_tokens
        assert (sum(tokens.counts), tokens.sum) == (stats.steps, 64)
        assert timings is not None and timings.draft_n >= timings.draft_n_accepted
        assert timings.predicted_n == 64 and (timings.prompt_n, timings.cache_n) == (5, 0)
    assert steps == {0.0: 8, 1.0: 64}


def test_looks_for_guesses_that_are_never_right_grow_far_apart() -> None:
    looks: list[int] = []

    class Noted(Scripted):
        def propose(self, max_tokens: int) -> Draft:
            looks.append(len(self.ids))
            return super().propose(max_tokens)

    speculation = Speculation(("noted",), lambda r: (Noted(1.0),), 8)
    engine = make_engine(FakeRunner(), speculation=speculation)
    client = Client(engine, "hello", max_tokens=150, ignore_eos=True)
    finish(engine)
    assert client.text == text_after("hello", 150)
    gaps = np.diff(looks)
    assert gaps.max() == LONGEST_PAUSE and (gaps[-5:] == LONGEST_PAUSE).all()


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_inside_an_accepted_run(most: int) -> None:
    engine = make_engine(FakeRunner(), speculation=scripted(0.0))
    client = Client(engine, "hello", max_tokens=most, ignore_eos=True)
    finish(engine)
    assert client.text == text_after("hello", most) and client.reason is FinishReason.LENGTH
    assert client.deltas[-1].num_output_tokens == len(client.token_ids) == most


@pytest.mark.parametrize("at", range(1, 10))
def test_a_stop_string_inside_an_accepted_run(at: int) -> None:
    whole = text_after("hello", 30)
    ends = []
    for speculation in (None, scripted(0.0)):
        engine = make_engine(FakeRunner(), speculation=speculation)
        client = Client(engine, "hello", max_tokens=30, stop=(whole[at : at + 3],))
        finish(engine)
        ends.append((client.text, client.reason, client.token_ids, client.deltas[-1].num_output_tokens))
    assert ends[0] == ends[1] and ends[0][1] is FinishReason.STOP


def test_the_end_inside_an_accepted_run() -> None:
    class Ends(Scripted):
        def propose(self, max_tokens: int) -> Draft:
            return Draft([ord("!"), EOS, 97, 98], 20)

    class Exclaiming(FakeRunner):
        def submit(self, batch: Batch, /) -> None:
            super().submit(batch)
            for row, at in zip(self._results[-1].logits, batch.logits_rows, strict=True):
                if batch.positions[at] == 4:  # the last of "hello"
                    row[:] = 0
                    row[ord("!")] = 1

    engine = make_engine(
        Exclaiming(), speculation=compute_all(Speculation(("ends",), lambda r: (Ends(0.0),), 8))
    )
    client = Client(engine, "hello", max_tokens=30)
    finish(engine)
    assert (client.text, client.reason, client.token_ids) == ("!", FinishReason.STOP, [ord("!"), EOS])
    assert engine.stats().steps == 1


def test_a_grammar_masks_each_token_of_a_run() -> None:
    class Alternating:
        """Vowels and consonants by turns."""

        is_finished = False

        def __init__(self) -> None:
            self.taken: list[int] = []

        def allowed(self, token: int) -> bool:
            return (chr(token) in "aeiou") == (len(self.taken) % 2 == 0) if 97 <= token < 123 else False

        def fill_mask(self, row: np.ndarray, /) -> None:
            bits = np.array([self.allowed(t) for t in range(32 * len(row))])
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)

        def accept(self, token_id: int, /) -> bool:
            fine = self.allowed(token_id)
            self.taken.append(token_id)
            return fine

    texts = []
    for wrong in (None, 0.0, 0.5):
        store = None if wrong is None else scripted(wrong)
        engine = make_engine(FakeRunner(), speculation=store)
        client = Client(engine, "hello", grammar=Alternating(), max_tokens=40, ignore_eos=True)
        finish(engine)
        assert client.reason is FinishReason.LENGTH
        texts.append(client.text)
    assert len(texts[0]) == 40 and len(set(texts)) == 1


def test_an_error_of_one_row_ends_one_request_where_it_would_alone() -> None:
    ends = []
    for speculation in (None, scripted(0.0)):
        engine = make_engine(FakeRunner(), speculation=speculation)
        engine.sampler.poison = ord(text_after("hello", 6)[5])
        bad, good = Client(engine, "hello", "bad", max_tokens=30), Client(engine, "x", "good", max_tokens=1)
        finish(engine)
        assert bad.reason is FinishReason.ERROR and good.reason is not None
        ends.append(bad.text)
    assert ends[0] == ends[1]


def test_aborts_and_failures_with_guesses_in_flight() -> None:
    rng = random.Random(4)
    runner = FakeRunner(2)
    engine = make_engine(runner, num_blocks=20, speculation=scripted(0.2))
    clients = []
    for turn in range(200):
        if turn % 9 == 0:
            clients.append(
                Client(engine, "x" * rng.randint(1, 60), f"r{turn}", max_tokens=40, ignore_eos=True)
            )
        if rng.random() < 0.1 and clients:
            engine.abort(rng.choice(clients).request.request_id)
        runner.fail_steps += rng.random() < 0.02
        engine.step()
        engine.check_invariants()
    finish(engine)
    reasons = {client.reason for client in clients}
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    for client in clients:
        prompt = bytes(client.request.prompt_token_ids).decode()
        assert text_after(prompt, 40).startswith(client.text)


def test_the_store_learns_what_was_served_each_client_its_own() -> None:
    found = {}
    for by_client in (False, True):
        speculation = StoreSpeculation(Store(N_VOCAB, 4096), 8, by_client)
        compute_all(speculation)
        engine = make_engine(FakeRunner(), speculation=speculation)
        for turn, client in enumerate(("a", "a", "b")):
            request = Request(f"r{turn}", list(b"hello"), SamplingParams(max_tokens=60, ignore_eos=True))
            request.client = client
            deltas: list[OutputDelta] = []
            before = engine.stats().steps
            engine.add(request, deltas.append)
            finish(engine)
            assert "".join(d.text for d in deltas) == text_after("hello", 60)
            found[by_client, turn] = engine.stats().steps - before
            assert speculation.store.flush(10)
        engine.close()
    assert found[False, 1] < 20 and found[False, 2] < 20  # steps
    assert found[True, 1] < 20 and found[True, 2] == found[True, 0]


WORDS = 64  # a vocabulary


class Chain(FakeRunner):
    """A random first-order Markov chain as a model."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = np.random.default_rng(1).normal(0, 1.5, (WORDS, WORDS)).astype(np.float32)

    def submit(self, batch: Batch, /) -> None:
        rows = self.logits[batch.input_ids[batch.logits_rows]]
        self._results.append(Result(batch.step_id, rows, None))

    def marginals(self, start: int, count: int) -> np.ndarray:
        """Probabilities of the token at each of `count` positions behind `start`: [count, WORDS]."""
        transition = np.exp(self.logits.astype(float))
        transition /= transition.sum(1, keepdims=True)
        at, out = np.eye(WORDS)[start], []
        for _ in range(count):
            at = at @ transition
            out.append(at)
        return np.array(out)


class Likely:
    """The likeliest chain from the last token."""

    name = "likely"

    def __init__(self, logits: np.ndarray):
        self.best = logits.argmax(1)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.last = token_ids[-1]

    def propose(self, max_tokens: int) -> Draft:
        draft = []
        for _ in range(max_tokens):
            draft.append(int(self.best[draft[-1] if draft else self.last]))
        return Draft(draft, 5)


def sample_chains(count: int, speculates: bool, seed: int | None) -> tuple[np.ndarray, Engine]:
    """The first four tokens of `count` requests, [count, 4]."""
    runner = Chain()
    speculation = (
        compute_all(Speculation(("likely",), lambda r: (Likely(runner.logits),), 3)) if speculates else None
    )
    scheduler = Scheduler(KVManager([KVGroup((0,), None, 300)], BLOCK_SIZE), 128, 512, 64)
    engine = Engine(ByteTokenizer(), scheduler, runner, Sampler(WORDS), BLOCK_SIZE, speculation=speculation)
    out: list[list[int]] = [[] for _ in range(count)]

    def sink(i: int) -> Callable[[OutputDelta], None]:
        return lambda delta: out[i].extend(delta.token_ids)

    for i in range(count):
        own = None if seed is None else seed + i
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=own, ignore_eos=True)
        engine.add(Request(str(i), [3], params), sink(i))
    while engine.step():
        pass
    return np.array([ids[:4] for ids in out]), engine


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    expected = len(tokens) * probabilities
    return float((((np.bincount(tokens, minlength=WORDS) - expected) ** 2) / expected).sum())


# The 99.9 % point of chi-square with 63 degrees of freedom (Wilson and Hilferty's approximation).
LIMIT = 63 * (1 - 2 / (9 * 63) + 3.09 * (2 / (9 * 63)) ** 0.5) ** 3
SAMPLES = 50_000 if FULL else 4_000


def test_sampled_text_is_the_same_and_has_the_models_distribution() -> None:
    (with_drafts, engine), (without, _) = (sample_chains(SAMPLES, on, 11) for on in (True, False))
    assert (with_drafts == without).all()
    stats = engine.stats().speculation
    assert stats is not None and sum(stats.accepted["likely"]) > SAMPLES / 10
    for position, probabilities in enumerate(Chain().marginals(3, 4)):
        assert chi_square(with_drafts[:, position], probabilities) < LIMIT, position


def test_a_verifier_that_believes_guesses_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(drafts, sample):
        for row in range(1 + max(map(len, drafts))):
            sample([i for i, draft in enumerate(drafts) if row <= len(draft)], row)
        return [0] * len(drafts)

    monkeypatch.setattr(hetero.generation, "verify", believe)
    tokens, _ = sample_chains(SAMPLES, True, 11)
    marginals = Chain().marginals(3, 4)
    assert chi_square(tokens[:, 0], marginals[0]) < LIMIT
    assert all(chi_square(tokens[:, p], marginals[p]) > 2 * LIMIT for p in (1, 2, 3))
