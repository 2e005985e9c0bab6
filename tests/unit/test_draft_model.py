"""A draft model over a fake stage: its twins, blocks and steps, and when it is asked at all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
from fake_runner import BLOCK_SIZE, N_VOCAB, FakeRunner, Result, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_tools import compute_all
from test_engine import Client, finish

import hetero.drafting
from hetero.batch import Batch, Step
from hetero.draft_model import MAX_FAILURES, READY, DraftModel
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.request import FinishReason, Request
from hetero.sampling.params import SamplingParams
from hetero.speculation import Speculation
from spec.base import Draft
from spec.drafting import RETRY, TRIALS, Trials, best_length, catch_up_tokens, tokens_per_second
from spec.policy import StepCost

SCALE = 20 if os.environ.get("HETERO_TEST_SCALE") == "full" else 1


def chained(digest: int, token: int) -> int:
    return hash((digest, token))


def after(digest: int) -> int:
    """The token that this model writes behind all that a digest stands for."""
    return 97 + digest % 26


def written(prompt: str, count: int) -> str:
    digest = 0
    for token in prompt.encode():
        digest = chained(digest, token)
    out = ""
    for _ in range(count):
        out += chr(after(digest))
        digest = chained(digest, ord(out[-1]))
    return out


class HashRunner(FakeRunner):
    """What it writes depends on every token before, as its paged memory has it.

    A slot holds the digests before and behind its token: a slot that is not of the sequence breaks the chain.
    """

    def __init__(self, depth: int = 1, window: int | None = None, wrong: float = 0.0, seed: int = 0):
        super().__init__(depth)
        self.window, self.wrong, self.rng = window, wrong, random.Random(seed)
        self.slots: list[dict[int, tuple[int, int]]] = [{}, {}]
        self.tokens = 0
        self.widest = 0  # tokens of a step

    def submit(self, batch: Batch, /) -> None:
        super().submit(batch)
        if self._results[-1].error is not None:
            return
        self.tokens += len(batch.input_ids)
        self.widest = max(self.widest, len(batch.input_ids))
        for copy in batch.copies:
            slots = self.slots[copy.group]
            for offset in range(BLOCK_SIZE):
                if (held := slots.get(copy.src * BLOCK_SIZE + offset)) is not None:
                    slots[copy.dst * BLOCK_SIZE + offset] = held
        digests = np.zeros(len(batch.input_ids), np.int64)
        for s in range(len(batch.context_lens)):
            self._compute(batch, s, digests)
        logits = np.zeros((len(batch.logits_rows), N_VOCAB), np.float32)
        for row, at in zip(logits, batch.logits_rows, strict=True):
            right = self.rng.random() >= self.wrong
            row[after(int(digests[at])) if right else 48] = 1
        self._results[-1] = Result(batch.step_id, logits, None, self._results[-1].stages)

    def _compute(self, batch: Batch, s: int, digests: np.ndarray) -> None:
        for row in range(batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1]):
            position = int(batch.positions[row])
            for g, slots in enumerate(self.slots[: len(batch.block_tables)]):
                table = batch.block_tables[g][s]

                def at(p: int, table: np.ndarray = table) -> int:
                    return int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE

                span = position if g == 0 or self.window is None else min(position, self.window - 1)
                before = slots[at(position - 1)][1] if position else 0
                for p in range(position - span + 1, position):
                    assert slots[at(p)][0] == slots[at(p - 1)][1], "attends what is not its own"
                digests[row] = chained(before, int(batch.input_ids[row]))
                slots[at(position)] = before, int(digests[row])


def draft_model(runner: FakeRunner, num_blocks: int = 65, window: int | None = None, **limits) -> DraftModel:
    groups = [KVGroup((0,), None, num_blocks)]
    if window is not None:
        groups.append(KVGroup((1,), window, num_blocks))
    return DraftModel(runner, KVManager(groups, BLOCK_SIZE), limits.get("tokens", 64), 8, 512)


def drafting(model: DraftModel, max_tokens: int = 8) -> Speculation:
    speculation = Speculation((), lambda request: (), max_tokens)
    speculation.draft_with(model)
    return speculation


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[DraftModel], Speculation]:
    """Guesses of random lengths, all of them computed."""
    rng = random.Random(3)
    monkeypatch.setattr(hetero.drafting, "best_length", lambda *a: rng.randint(0, 8))
    return lambda model: compute_all(drafting(model))


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("draft_blocks", [12, 65])
def test_texts_do_not_depend_on_the_draft_model(always, wrong, depth, window, draft_blocks) -> None:
    small = HashRunner(1, window, wrong)
    model = draft_model(small, draft_blocks, window)
    engine = make_engine(HashRunner(depth, window), num_blocks=30, window=window, speculation=always(model))
    prompts = ["a" * n + str(n) for n in (1, 15, 16, 17, 40, 90, 150, 33)]
    clients = [
        Client(engine, prompt, f"r{i}", max_tokens=40 + i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    engine.check_invariants()
    for i, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.text == written(prompt, 40 + i)
    stats = engine.stats().speculation
    assert stats is not None and stats.drafted["draft"] > 30
    accepted = sum(stats.accepted["draft"])
    assert small.widest <= 64
    if wrong in (0.0, 1.0):
        assert accepted == (1 - wrong) * stats.drafted["draft"]
    else:  # a wrong guess spoils none of the next draft
        assert stats.accepted["draft"][0] == pytest.approx(0.7 * sum(stats.chosen.counts[1:]), rel=0.2)
    assert all(pool.num_available == pool.num_usable for pool in model.kv.pools), "blocks leaked"


class Knows:
    """What comes behind one prompt, and nothing else."""

    name = "knows"

    def __init__(self, request: Request):
        self.text, self.count = "known" + written("known", 80), 0
        self.knows = bytes(request.prompt_token_ids) == b"known"

    def extend(self, token_ids) -> None:
        self.count += len(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        known = self.text[self.count : self.count + max_tokens] if self.knows else ""
        return Draft(list(known.encode()), 20 if known else 0)


def test_only_who_has_no_better_guess_asks_the_draft_model(always) -> None:
    speculation = Speculation(("knows",), lambda request: (Knows(request),), 8)
    model = draft_model(HashRunner())
    speculation.draft_with(model)
    compute_all(speculation)
    engine = make_engine(HashRunner(), speculation=speculation)
    clients = [Client(engine, name, name, max_tokens=60, ignore_eos=True) for name in ("known", "other")]
    while not engine.scheduler.num_running or engine.stats().steps < 5:
        engine.step()
    assert list(model._twins) == ["other"]
    finish(engine)
    assert [c.text for c in clients] == [written(name, 60) for name in ("known", "other")]
    stats = engine.stats().speculation
    assert all(sum(stats.accepted[name]) == stats.drafted[name] > 20 for name in ("knows", "draft"))


def test_known_beginnings_and_right_guesses_are_not_computed_again(always) -> None:
    small = HashRunner()
    model = draft_model(small)
    engine = make_engine(HashRunner(), speculation=always(model))
    texts, computed = [], []
    for name in ("a", "b"):
        before, client = small.tokens, Client(engine, "x" * 150, name, max_tokens=100, ignore_eos=True)
        finish(engine)
        texts.append(client.text)
        computed.append(small.tokens - before)
    assert texts[0] == texts[1] == written("x" * 150, 100)
    assert 150 < computed[0] <= 150 + 1.5 * 100
    assert computed[1] <= 1.5 * 100 + 2 * BLOCK_SIZE


def test_aborts_and_failures_of_either_model(always) -> None:
    rng = random.Random(4)
    large, small = HashRunner(2), HashRunner(1, wrong=0.2)
    model = draft_model(small, 20)
    engine = make_engine(large, num_blocks=20, speculation=always(model))
    clients = []
    for turn in range(200 * SCALE):
        if turn % 9 == 0:
            prompt = "xy"[turn % 2] * rng.randint(1, 60)
            clients.append(Client(engine, prompt, f"r{turn}", max_tokens=40, ignore_eos=True))
        if rng.random() < 0.1 and clients:
            engine.abort(rng.choice(clients).request.request_id)
        large.fail_steps += rng.random() < 0.02
        small.fail_steps = int(rng.random() < 0.05)
        if rng.random() < 0.02:
            small.unavailable, small.back = "gone", False
        small.back = small.back or rng.random() < 0.2
        engine.step()
        engine.check_invariants()
    finish(engine)
    assert {c.reason for c in clients} == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    for client in clients:
        assert written(bytes(client.request.prompt_token_ids).decode(), 40).startswith(client.text)
    assert engine.stats().speculation.drafted["draft"] > 50


def test_copies_are_made_where_there_is_no_block_for_more(always) -> None:
    """Where requests are kept in one piece, and only the blocks of a window are short."""
    rng = random.Random(2)
    groups = [KVGroup((0,), None, 65), KVGroup((1,), 40, 5)]
    model = DraftModel(HashRunner(1, 40, 0.3), KVManager(groups, BLOCK_SIZE, in_place=8), 64, 8, 512)
    engine = make_engine(HashRunner(1, 40), num_blocks=40, window=40, speculation=always(model))
    for turn in range(90):
        if turn % 6 == 0:
            prompt = rng.choice("xy") * rng.choice([20, 33, 47, 50, 63]) + rng.choice(["", "z"])
            Client(engine, prompt, f"r{turn}", max_tokens=rng.randint(1, 40), ignore_eos=True)
        engine.step()
        engine.check_invariants()
    finish(engine)
    assert all(pool.num_available == pool.num_usable for pool in model.kv.pools), "blocks leaked"


def test_a_device_that_keeps_failing_is_left_alone(always, caplog) -> None:
    small = HashRunner()
    small.fail_steps = 10**6
    engine = make_engine(HashRunner(), speculation=always(draft_model(small)))
    client = Client(engine, "hello", max_tokens=60, ignore_eos=True)
    finish(engine)
    assert client.text == written("hello", 60)
    assert small.steps == MAX_FAILURES
    assert len(caplog.records) == MAX_FAILURES and "any more" in caplog.text
    engine.close()
    assert small.closed


def test_a_lost_device_guesses_again_once_it_is_back() -> None:
    small = HashRunner()
    model = draft_model(small, tokens=512)
    request = Request("r", [97] * 100, SamplingParams())
    assert len(model.guess([request], [4], 512)[0]) == 4
    small.unavailable = "gone"
    small.slots = [{}, {}]  # with all that it knew
    assert not model.available and model.num_behind(request) == 100
    small.back = True
    assert model.available
    assert "".join(map(chr, model.guess([request], [4], 512)[0])) == written("a" * 100, 4)
    model.check_invariants()


def test_who_is_not_in_the_step_makes_room() -> None:
    model = draft_model(HashRunner(), num_blocks=9, tokens=512)
    one, other = (Request(name, [ord(name)] * 100, SamplingParams()) for name in "ab")
    assert len(model.guess([one], [4], 512)[0]) == 4
    assert model.num_behind(one) == 0
    assert "".join(map(chr, model.guess([other], [4], 512)[0])) == written("b" * 100, 4)
    assert model.num_behind(one) == 100
    both = model.guess([one, other], [4, 4], 512)  # which do not fit together
    assert 0 < sum(map(len, both)) <= 8
    model.check_invariants()


def test_nothing_is_guessed_beyond_the_longest_context() -> None:
    model = draft_model(HashRunner())
    requests = [Request(str(n), [97] * n, SamplingParams()) for n in (509, 512, 600)]
    assert [model.limit(r) for r in requests] == [3, 0, 0]
    for _ in range(10):
        found = model.guess(requests, [8, 8, 8], 512)
        model.check_invariants()
    again = model.guess(requests, [8, 8, 8], 512)
    assert again == found and "".join(map(chr, found[0])) == written("a" * 509, 3)
    assert [len(tokens) for tokens in found] == [3, 0, 0]
    model.check_invariants()


def test_the_time_of_drafting_is_not_a_steps_time() -> None:
    speculation = drafting(draft_model(HashRunner()))
    request = Request("r", [97], SamplingParams())
    speculation._drafting.model.seconds += 0.4
    for _ in range(2):
        speculation.observe_seconds(Step(1, [request], [0], [1], [True], [[]]), 0.6)
        speculation._drafting.model.seconds += 0.2
    assert speculation._policy.cost.estimate(1, 1)[0] == pytest.approx(
        0.2
    )  # the first of them is not believed


def test_prompts_are_read_along_in_a_quarter_of_the_time() -> None:
    speculation = drafting(draft_model(HashRunner(), tokens=512))
    model = speculation._drafting.model
    model.cost = seconds(0.0, 0.1)
    model.cost.observe = lambda *a: None
    request = Request("r", [97] * 400, SamplingParams())
    speculation.read([request], 64)
    assert model.num_behind(request) == 400, "what a token of a prompt takes is not known yet"
    speculation.observe_seconds(Step(1, [request], [0], [64], [False], [[]]), 16.0)
    speculation.read([request], 64)
    assert model.num_behind(request) == pytest.approx(400 - 40, abs=3)
    speculation._drafting._pays = False
    speculation.read([request], 64)
    assert model.num_behind(request) == pytest.approx(400 - 40, abs=3)


def test_long_prompts_are_read_in_pieces() -> None:
    small = HashRunner()
    model = draft_model(small)
    short, long = (Request(name, [97] * n, SamplingParams()) for name, n in (("s", 5), ("l", 200)))
    first, second = model.guess([long, short], [4, 4], 30)
    assert first == [] and len(second) == 4 and small.widest <= 30 + 5
    assert model.num_behind(long) == 170
    assert model.guess([long], [4], 0) == [[]]
    assert model.num_behind(long) == 170
    rounds = 0
    while not first:
        (first,) = model.guess([long], [4], 30)
        rounds += 1
    model.check_invariants()
    assert "".join(map(chr, first)) == written("a" * 200, 4)
    assert rounds == 6 and model.num_behind(long) == 0 and READY < 30


def test_it_is_asked_while_it_pays_and_seldom_after_that() -> None:
    asked = {}
    for wrong in (0.0, 1.0):
        small = HashRunner(wrong=wrong)
        speculation = drafting(draft_model(small))
        cost = speculation._policy.cost
        for size in range(1, 65):  # seconds far from what the fakes take
            for _ in range(100):
                cost.observe(size, 1.0 + size / 50)
        cost.observe = lambda *a: None
        engine = make_engine(HashRunner(), speculation=speculation)
        client = Client(engine, "hello", max_tokens=400, ignore_eos=True)
        finish(engine)
        assert client.text == written("hello", 400)
        asked[wrong] = small.steps
        speculation.check_invariants([])
    assert asked[0.0] > 200
    assert asked[1.0] < 100


def seconds(fixed: float, slope: float) -> StepCost:
    cost = StepCost()
    for size in (*range(1, 65), 128, 256):
        for _ in range(3):
            cost.observe(size, fixed + slope * size)
    return cost


@given(
    st.lists(st.tuples(st.floats(0.1, 0.98), st.integers(0, 12)), min_size=1, max_size=6),
    st.floats(0.001, 1),
    st.floats(0, 0.3),
    st.integers(0, 40),
    st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_the_length_is_the_best_of_all(drafts, small, slope, catch_up, room) -> None:
    chances = [[rate ** (i + 1) for i in range(n)] for rate, n in drafts]
    large, little = seconds(1, slope), seconds(small, small / 20)
    size = len(chances)

    def rate(k: int) -> float:
        width = sum(min(k, len(each)) for each in chances)
        gain = sum(sum(each[:k]) for each in chances)
        took = large.estimate(size + width, 1)[0] + little.estimate(size + catch_up, 1)[0]
        return (size + gain) / (took + (k - 1) * little.estimate(size, 1)[0])

    allowed = [k for k in range(1, 13) if sum(min(k, len(each)) for each in chances) <= room]
    allowed = [k for k in allowed if k <= max(map(len, chances))]
    base = tokens_per_second(large, chances, [0] * size)
    got = best_length(base, size, (0.0, 0), chances, catch_up, room, large, little)
    best = max(map(rate, allowed), default=0.0)
    if got:
        assert got in allowed and rate(got) == pytest.approx(best) and best > base
    else:
        assert best <= 1.031 * base


def test_a_dear_draft_model_is_not_asked_and_a_cheap_one_for_more() -> None:
    chances = [[0.8 ** (i + 1) for i in range(16)]]
    large = seconds(1, 0.01)
    base = tokens_per_second(large, chances, [0])
    lengths = [
        best_length(base, 1, (0.0, 0), chances, 0, 64, large, seconds(small, 0)) for small in (0.01, 0.1, 0.9)
    ]
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_catching_up_takes_a_quarter_of_a_step() -> None:
    assert catch_up_tokens(1.0, 1, 512, seconds(0.1, 0.01)) == pytest.approx(25, abs=3)
    assert catch_up_tokens(1.0, 1, 10, seconds(0.1, 0.01)) == 10
    assert catch_up_tokens(0.0, 1, 512, seconds(0.1, 0.01)) == 0


def test_trials_grow_seldom_until_one_pays() -> None:
    trials, made = Trials(), []
    for turn in range(4000):
        if trials.due:
            trials.made()
            made.append(turn)
        trials.decline()
        trials.check_invariants()
    assert made[:TRIALS] == list(range(TRIALS))
    gaps = np.diff(made[TRIALS:])
    assert len(gaps) >= 3 and (gaps[1:] >= 2 * gaps[:-1] - 2).all()
    trials.paid()
    for _ in range(RETRY):
        assert not trials.due
        trials.decline()
    assert trials.due
