"""The scheduler's blocks over libllama's sequences: every row is computed behind its request's own tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from fake_device import extend_hash, first_hash, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import BLOCK_SIZE
from backends.ggml.stage import StageError, StageSpec
from backends.llama.context import DecodeError
from backends.llama.sequences import Sequences
from backends.llama.spec import LlamaSpec
from backends.llama.stage import LlamaStage
from hetero.batch import Step, build
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.kv.uncached import UncachedKV
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.scheduler import Scheduler
from hetero.settings import MAX_STEP_DRAFTS

N_VOCAB, MAX_LEN = 5, 160


@dataclass(eq=False)
class Cell:
    """A token, and the hash of all up to it."""

    hash: int


class FakeContext:
    """Cells that sequences share, as libllama's. `states`: sequences that can neither be cut nor shared."""

    n_vocab = N_VOCAB

    def __init__(self, cells: int, count: int, max_tokens: int, states: bool):
        self.max_tokens, self.cells, self.states = max_tokens, cells, states
        self.sequences: list[list[Cell]] = [[] for _ in range(count)]
        self.broken = False
        self.works_for = 1 << 30  # batches, then it is broken
        self.batches = 0

    def decode(self, ids, positions, sequences, wanted):
        assert 0 < len(ids) <= self.max_tokens
        self.batches += 1
        if self.broken or self.batches > self.works_for:
            raise DecodeError("libllama: broken")
        held = {id(cell) for sequence in self.sequences for cell in sequence}
        if not self.states and len(held) + len(ids) > self.cells:
            return None
        hashes = []
        for token, position, sequence in zip(
            ids.tolist(), positions.tolist(), sequences.tolist(), strict=True
        ):
            own = self.sequences[sequence]
            assert position == len(own), "a token does not follow the one before"
            own.append(Cell(extend_hash(own[-1].hash if own else first_hash(""), token)))
            hashes.append(own[-1].hash)
        rows = np.zeros((int(wanted.sum()), N_VOCAB), np.float32)
        rows[np.arange(len(rows)), [next_token(h) for h, due in zip(hashes, wanted, strict=True) if due]] = 1
        return rows

    def copy(self, source: int, target: int, length: int) -> None:
        assert not self.states and not self.sequences[target] and length <= len(self.sequences[source])
        self.sequences[target] = self.sequences[source][:length]

    def cut(self, sequence: int, length: int) -> bool:
        if self.states and 0 < length < len(self.sequences[sequence]):
            return False
        del self.sequences[sequence][length:]
        return True


class RandomDrafter:
    """Guesses that are right, wrong, or none."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def draft(self, due, limits, num_tokens, room):
        return [self._guess(request) for request in due]

    def read(self, requests, num_tokens):
        pass

    def _guess(self, request: Request) -> list[int]:
        tokens = request.token_ids(0, request.num_tokens)
        for _ in range(self.rng.randint(0, 5)):
            tokens.append(alone(tokens, 1)[0] if self.rng.random() < 0.7 else self.rng.randrange(N_VOCAB))
        return tokens[request.num_tokens :]


def alone(tokens: list[int], count: int) -> list[int]:
    """What follows these tokens when nothing else exists."""
    h, output = first_hash(""), []
    for token in tokens:
        h = extend_hash(h, token)
    for _ in range(count):
        output.append(next_token(h))
        h = extend_hash(h, output[-1])
    return output


class Loop:
    """Scheduler and stage, a step at a time."""

    def __init__(self, rng: random.Random, states: bool, blocks: int, spare: int, seqs: int, budget: int):
        self.rng = rng
        drafter = None if states else RandomDrafter(rng)
        kind = UncachedKV if states else KVManager
        self.kv = kind([KVGroup((0,), None, blocks)], BLOCK_SIZE)
        self.scheduler = Scheduler(self.kv, seqs, budget, MAX_LEN, 1, drafter)
        count = seqs + (0 if states else spare)
        llama = LlamaSpec((), (), count, blocks * BLOCK_SIZE, keeps_prefixes=not states)
        self.context = FakeContext(blocks * BLOCK_SIZE, count, max(budget, count), states)
        spec = StageSpec(0, 1, {0: 0}, (blocks,), budget, seqs + MAX_STEP_DRAFTS)
        self.stage = LlamaStage(self.context, spec, llama)  # type: ignore[arg-type]
        self.requests: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        request = Request(str(len(self.requests)), prompt, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        only_argmax = self.rng.random() < 0.5
        self.stage.prepare(build(step, 1, BLOCK_SIZE, only_argmax), None)
        try:
            logits = self.stage.compute()
        except StageError:
            self.scheduler.update(step, [None] * len(step.requests), failed=True)
        else:
            best = self.stage.argmax if only_argmax else logits.argmax(axis=1)
            assert best is not None
            self.take(step, best.tolist())
        self.scheduler.check_invariants(self.requests)
        self.stage.check_invariants()
        return True

    def take(self, step: Step, best: list[int]) -> None:
        sampled: list[int | None] = []
        accepted = []
        for due, draft in zip(step.sampled, step.drafts, strict=True):
            right = 0
            while due and right < len(draft) and draft[right] == best[right]:
                right += 1
            sampled.append(best[right] if due else None)
            accepted.append(right)
            best = best[1 + len(draft) if due else 0 :]
        assert not best
        self.scheduler.update(step, sampled, {}, accepted)

    def finish(self) -> None:
        while self.step():
            pass
        for request in self.requests:
            assert request.finish_reason is not None
            if request.finish_reason.value == "length":
                expected = alone(request.prompt_token_ids, len(request.output_token_ids))
                assert request.output_token_ids == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), states=st.booleans())
def test_answers_never_depend_on_who_else_is_there(seed: int, states: bool) -> None:
    rng = random.Random(seed)
    seqs = rng.randint(1, 6)
    loop = Loop(rng, states, rng.randint(12, 40), rng.randint(0, 6), seqs, rng.choice((16, 33, 64)))
    known: list[list[int]] = [[]]
    for _ in range(rng.randint(3, 14)):
        start = rng.choice(known)
        prompt = start[: rng.randint(0, len(start))] + [
            rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 60))
        ]
        request = loop.add(prompt[: MAX_LEN - 40], rng.randint(1, 30))
        for _ in range(rng.randint(0, 12)):
            loop.step()
        if rng.random() < 0.1:
            loop.scheduler.abort(request.request_id)
        if rng.random() < 0.05:
            loop.context.broken = True
            loop.step()
            loop.context.broken = False
        known.append(request.token_ids(0, request.num_tokens))
    loop.finish()


def test_what_is_known_is_not_computed_again() -> None:
    """A conversation goes on, another begins alike, and a third is the same: only what is new is computed."""
    loop = Loop(random.Random(1), False, 64, 8, 4, 64)
    loop.scheduler.drafter = None
    first = loop.add([1] * 50, 20)
    loop.finish()
    for prompt in ([*first.token_ids(0, 70), 2, 3], [*[1] * 40, 4], [1] * 50):
        loop.add(prompt, 5)
    loop.finish()
    assert [r.num_cached_tokens for r in loop.requests] == [0, 69, 40, 49]
    assert loop.stage.counters() == {"recomputed_tokens": 0}


def test_what_was_given_up_is_computed_again() -> None:
    """One sequence beside the request's: of two known beginnings one has to go."""
    loop = Loop(random.Random(1), False, 64, 1, 1, 64)
    loop.scheduler.drafter = None
    for token in (1, 2, 3, 1):
        loop.add([token] * 40, 5)
        loop.finish()
    assert loop.requests[-1].num_cached_tokens == 39
    assert loop.stage.counters() == {"recomputed_tokens": 39}


def test_a_failure_forgets_everything() -> None:
    loop = Loop(random.Random(1), False, 64, 8, 2, 64)
    loop.add([1] * 40, 5)
    loop.step()
    loop.context.broken = True
    loop.step()
    loop.context.broken = False
    assert not any(loop.context.sequences)
    loop.add([1] * 40, 5)
    loop.finish()
    assert [r.finish_reason.value for r in loop.requests if r.finish_reason] == ["error", "length"]
    assert loop.requests[1].num_cached_tokens == 0


def test_a_full_cache_is_said() -> None:
    context = FakeContext(16, 2, 64, False)
    stage = LlamaStage(
        context,  # type: ignore[arg-type]
        StageSpec(0, 1, {0: 0}, (4,), 64, 64),
        LlamaSpec((), (), 2, 16),
    )
    loop = Loop(random.Random(1), False, 4, 1, 1, 64)
    loop.add([1] * 20, 5)
    step = loop.scheduler.schedule()
    assert step is not None
    stage.prepare(build(step, 1, BLOCK_SIZE), None)
    with pytest.raises(StageError, match="cache is full"):
        stage.compute()


def test_an_own_sequence_is_cut_and_not_copied() -> None:
    """After a wrong guess the request goes on in its sequence, so that the others are not pushed out."""
    context = FakeContext(512, 4, 64, False)
    sequences = Sequences(context, 4, 32, True)
    blocks = np.array([1, 2], np.int32)
    ids = np.arange(20, dtype=np.int32)
    sequences.begin_step()
    sequence, length = sequences.take(ids[:0], blocks[:1], *sequences.source(ids[:0], blocks[:1]))
    assert length == 0
    sequences.extend(sequence, ids, blocks)
    context.sequences[sequence] = [Cell(i) for i in range(20)]
    sequences.begin_step()
    source = sequences.source(ids[:18], blocks)
    assert source == (sequence, 18)
    assert sequences.take(ids[:18], blocks, *source) == (sequence, 18)
    assert len(context.sequences[sequence]) == 18
    sequences.check_invariants()


def same_prompts(tokens: int = 40) -> Loop:
    """Two requests, of which the second finds in the first step what that step computes for the first."""
    loop = Loop(random.Random(1), False, 64, 8, 2, 128)
    loop.scheduler.drafter = None
    for _ in range(2):
        loop.add([1, 2, 3, 4] * (tokens // 4), 8)
    return loop


def test_what_one_step_computes_and_shares_comes_first() -> None:
    loop = same_prompts()
    loop.step()
    assert loop.context.batches == 2, "the first one's tokens, then those of who shares them"
    loop.finish()
    assert [r.num_cached_tokens for r in loop.requests] == [0, 32]
    assert loop.stage.counters() == {"recomputed_tokens": 0}


def test_a_step_that_failed_half_way_leaves_nothing() -> None:
    loop = same_prompts()
    loop.context.works_for = 1
    loop.step()
    loop.context.works_for = 1 << 30
    assert not any(loop.context.sequences)
    loop.add([1, 2, 3, 4] * 10, 8)
    loop.finish()
    assert [r.finish_reason and r.finish_reason.value for r in loop.requests] == ["error", "error", "length"]


def test_states_are_never_shared() -> None:
    """Another request that begins alike has its own sequence, and begins anew."""
    context = FakeContext(512, 3, 64, True)
    sequences = Sequences(context, 3, 32, False)
    ids = np.arange(20, dtype=np.int32)
    sequences.begin_step()
    first, _ = sequences.take(ids[:0], np.array([1], np.int32), 0, 0)
    sequences.extend(first, ids[:16], np.array([1], np.int32))
    context.sequences[first] = [Cell(i) for i in range(16)]
    sequences.begin_step()
    own, other = np.array([1, 2], np.int32), np.array([5, 6], np.int32)
    assert sequences.source(ids[:16], other) == (first, 16)
    second, length = sequences.take(ids[:16], other, first, 16)
    assert second != first and length == 0 and len(context.sequences[first]) == 16
    assert sequences.take(ids[:16], own, *sequences.source(ids[:16], own)) == (first, 16)


def test_a_sequence_is_not_given_away_twice_in_a_step() -> None:
    context = FakeContext(512, 3, 64, False)
    sequences = Sequences(context, 3, 32, True)
    ids, blocks = np.arange(16, dtype=np.int32), np.array([1, 2], np.int32)
    sequences.begin_step()
    first, _ = sequences.take(ids[:0], blocks[:1], 0, 0)
    sequences.extend(first, ids, blocks[:1])
    context.sequences[first] = [Cell(i) for i in range(16)]
    second, length = sequences.take(ids, blocks, *sequences.source(ids, blocks))
    assert second != first and length == 16 and context.sequences[second] == context.sequences[first]


def written(count: int, keeps: bool = True) -> tuple[Sequences, FakeContext]:
    """Sequence n holds 20 tokens of its own in blocks 2n + 1 and 2n + 2; the first is the longest unused."""
    context = FakeContext(512, count, 64, not keeps)
    sequences = Sequences(context, count, 32, keeps)
    for n in range(count):
        sequences.begin_step()
        nothing, blocks = np.empty(0, np.int32), np.array([2 * n + 1, 2 * n + 2], np.int32)
        assert sequences.take(nothing, blocks[:1], 0, 0)[0] == n
        sequences.extend(n, np.full(20, n, np.int32), blocks)
        context.sequences[n] = [Cell(n)] * 20
    sequences.begin_step()
    return sequences, context


def test_what_others_have_written_over_goes_first() -> None:
    sequences, context = written(3)
    sequences.block_changed(4)  # the second one's last
    assert sequences.give_up(1) == 1
    assert [len(held) for held in context.sequences] == [20, 0, 20]
    assert sequences.give_up(9) == 2 and not any(context.sequences)


def test_a_copied_block_is_nobodys() -> None:
    """It has a sequence's tokens, but is not the request that wrote them: theirs stays whole."""
    sequences, context = written(2)
    sequences.block_changed(2)
    known, blocks = np.zeros(18, np.int32), np.array([1, 2], np.int32)
    context.sequences[1] = []
    assert sequences.take(known, blocks, *sequences.source(known, blocks)) == (1, 18)
    assert [len(held) for held in context.sequences] == [20, 18]


def test_the_last_sequence_is_taken_from_whom_it_was_of() -> None:
    """With as many requests in a step as sequences, one may find its beginning in the only one left."""
    sequences, context = written(2)
    nothing, blocks = np.empty(0, np.int32), np.array([9], np.int32)
    assert sequences.take(nothing, blocks, 0, 0) == (0, 0)
    known, blocks = np.ones(16, np.int32), np.array([7, 8], np.int32)
    assert sequences.source(known, blocks) == (1, 16)
    assert sequences.take(known, blocks, 1, 16) == (1, 16)
    assert [len(held) for held in context.sequences] == [0, 16]
    sequences.check_invariants()
