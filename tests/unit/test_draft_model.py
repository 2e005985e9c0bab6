"""A draft model over a fake stage: its twins, blocks and steps, and when it is asked at all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_runner import BLOCK_SIZE, FakeRunner, make_engine
from hash_runner import HashRunner, written
from scale import scaled
from spec_tools import compute_all, costs
from test_engine import Client, finish

import hetero.drafting
from hetero.batch import Step
from hetero.draft_model import MAX_FAILURES, READY, DraftModel
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.request import FinishReason, Request
from hetero.sampling.params import SamplingParams
from hetero.speculation import Speculation
from spec.base import Draft


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
    for turn in range(scaled(200, 4000)):
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
    model.cost = costs(0.0, 0.1)
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
