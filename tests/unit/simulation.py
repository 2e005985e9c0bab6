"""A fake clock and a fake device that knows what every KV slot holds, to drive the scheduler."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hetero.batch import Batch, Step, build
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.request import FinishReason, Request
from hetero.sampling.params import SamplingParams
from hetero.scheduler import MAX_PREEMPTIONS, Scheduler

MASK = 2**62 - 1
EOS_EVERY = 37
WINDOWS: list[list[int | None]] = [[None], [None], [None, 5], [None, 3, 9], [6], [3, 7], [None, None], [1]]


def extend_hash(h: int, token: int) -> int:
    """The hash of a prefix with one more token: what that token's KV is a function of."""
    h = (h * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return h ^ (h >> 29)


def next_token(last_hash: int) -> int:
    return last_hash % 5


def is_eos(last_hash: int) -> bool:
    return last_hash % EOS_EVERY == 0


def alone(prompt: list[int], max_total: int, ignore_eos: bool) -> tuple[list[int], FinishReason]:
    """What the request generates when nothing else exists."""
    h, output = 1, []
    for token in prompt:
        h = extend_hash(h, token)
    while True:
        output.append(next_token(h))
        if is_eos(h) and not ignore_eos:
            return output, FinishReason.STOP
        if len(prompt) + len(output) >= max_total:
            return output, FinishReason.LENGTH
        h = extend_hash(h, output[-1])


class RandomDrafter:
    """Guesses that are right, partly right, wrong, too many, or none."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def draft(self, due, limits, num_tokens, room):
        return [self._guess(r, self.rng.randint(0, 6)) for r in due]

    def _guess(self, request: Request, count: int) -> list[int]:
        h, guess = 1, []
        for token in request.token_ids(0, request.num_tokens):
            h = extend_hash(h, token)
        for _ in range(count):
            right = self.rng.random() < 0.8
            guess.append(next_token(h) if right else self.rng.randrange(5))
            h = extend_hash(h, guess[-1])
        return guess


class Device:
    """KV content per group, block and offset, as prefix hashes; 0 is garbage."""

    def __init__(self, groups: list[KVGroup], block_size: int):
        self.groups, self.block_size = groups, block_size
        self.slots = [np.zeros(g.num_blocks * block_size, np.int64) for g in groups]
        self._hashes: dict[str, np.ndarray] = {}

    def hashes(self, request: Request, end: int) -> np.ndarray:
        """Hashes of the first `end` prefixes of a request's own tokens, int64 [end]."""
        known = self._hashes.get(request.request_id, np.zeros(0, np.int64))
        if len(known) < end:
            more, h = [], int(known[-1]) if len(known) else 1
            for token in request.token_ids(len(known), end):
                h = extend_hash(h, token)
                more.append(h)
            known = self._hashes[request.request_id] = np.concatenate([known, np.array(more, np.int64)])
        return known[:end]

    def run(self, step: Step, batch: Batch, broken: bool) -> list[int]:
        """Compute a step as a stage does: copies, all stores, then attention. Returns the prefix
        hash behind each logits row."""
        size = self.block_size
        for copy in batch.copies:
            slots = self.slots[copy.group]
            source = 0 if broken else slots[copy.src * size : (copy.src + 1) * size].copy()
            slots[copy.dst * size : (copy.dst + 1) * size] = source
        hashes = []
        for request, end, draft in zip(step.requests, batch.context_lens.tolist(), step.drafts, strict=True):
            known = self.hashes(request, end - len(draft))
            h, guessed = int(known[-1]), []
            for token in draft:
                h = extend_hash(h, token)
                guessed.append(h)
            hashes.append(np.concatenate([known, np.array(guessed, np.int64)]))
        counts = step.num_scheduled_tokens
        values = np.concatenate([h[-n:] for h, n in zip(hashes, counts, strict=True)])
        for g, slots in enumerate(self.slots):
            mapping = batch.slot_mapping[g]
            assert mapping.min() >= size, "a token goes to the scratch block"
            assert len(set(mapping.tolist())) == len(mapping), "two tokens share a slot"
            slots[mapping] = 0 if broken else values
        if broken:
            return [0] * len(batch.logits_rows)
        for g, group in enumerate(self.groups):
            for i, expected in enumerate(hashes):
                first = group.first_needed(len(expected) - counts[i])
                at = np.arange(first, len(expected))
                got = self.slots[g][batch.block_tables[g][i, at // size] * size + at % size]
                assert (got == expected[first:]).all(), f"{step.requests[i].request_id} attends foreign KV"
        return values[batch.logits_rows].tolist()


@dataclass
class Case:
    """What a seed stands for."""

    groups: list[KVGroup]
    block_size: int
    depth: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    requests: list[Request]
    arrivals: list[int]
    cancel_rate: float = 0.0
    failure_rate: float = 0.0
    in_place: int = 0
    drafts: bool = False


@dataclass
class Outcome:
    requests: list[Request]
    steps: int = 0
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    copies: int = 0
    drafted: int = 0
    accepted: int = 0
    reasons: dict[str, FinishReason] = field(default_factory=dict)


def draw_case(rng: random.Random) -> Case:
    """A tiny, crowded world."""
    size = rng.choice([1, 2, 4])
    crowd = rng.random() < 0.3  # short prompts, long answers: the pool fills up on the way
    windows: list[int | None] = rng.choice(WINDOWS)
    longest = rng.choice([12, 24, 40])
    groups = []
    for window in windows:
        least = longest // size if window is None else min(longest, window + 2 * size) // size
        ratio = rng.choice([0.7, 1, 1, 1.2, 1.5, 2, 5])
        groups.append(KVGroup((len(groups),), window, 2 + int(least * ratio)))
    stems = [[rng.randrange(3) for _ in range(rng.randrange(longest))] for _ in range(rng.randint(1, 3))]
    requests, arrivals, now = [], [], 0
    for i in range(rng.randint(2, 9)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(len(stem) + 1)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        max_tokens = None if crowd else rng.choice([None, 1, rng.randint(1, 16)])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=crowd or rng.random() < 0.5)
        if crowd:
            prompt = prompt[-4:]
        requests.append(Request(f"r{i}", prompt[: longest - 1] or [0], params))
        now += rng.choice([0, 0, 0, 1, 3, 12])
        arrivals.append(now)
    return Case(
        groups,
        size,
        depth=rng.choice([1, 1, 2, 3]),
        max_num_seqs=8 if crowd else rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 32]),
        max_model_len=longest,
        requests=requests,
        arrivals=arrivals,
        cancel_rate=rng.choice([0, 0, 0.05, 0.2]),
        failure_rate=rng.choice([0, 0, 0, 0.05]),
        in_place=(0, 1, 4)[len(requests) % 3],
        drafts=rng.random() < 0.5,
    )


class Simulation:
    """Runs a case to its end, checking every invariant after each operation."""

    def __init__(self, case: Case, rng: random.Random):
        self.case, self.rng = case, rng
        self.kv = KVManager(case.groups, case.block_size, case.in_place)
        self.scheduler = Scheduler(
            self.kv,
            case.max_num_seqs,
            case.max_num_batched_tokens,
            case.max_model_len,
            case.depth,
            RandomDrafter(rng) if case.drafts else None,
        )
        self.device = Device(case.groups, case.block_size)
        self.flying: deque[tuple[Step, list[int], str]] = deque()
        self.todo = deque(zip(case.arrivals, case.requests, strict=True))
        self.accepted: list[Request] = []
        self.cancelled: set[str] = set()
        self.broken: set[str] = set()
        self.out = Outcome(case.requests)
        self.now = 0
        self.empty = 0

    def run(self) -> Outcome:
        while self.todo or self.scheduler.has_work:
            self._arrive()
            self._cancel()
            busy = len(self.flying) >= self.case.depth
            if busy or not self._schedule():
                if self.flying:
                    self._collect()
                elif self.todo and not self.scheduler.has_work:
                    self.now = max(self.now, self.todo[0][0])
            assert self.now < 20_000, "it does not end"
        self._check_end()
        return self.out

    def check(self) -> None:
        self.scheduler.check_invariants(self.accepted)

    def _arrive(self) -> None:
        while self.todo and self.todo[0][0] <= self.now:
            request = self.todo.popleft()[1]
            try:
                self.scheduler.add(request)
            except ValueError:
                assert len(request.prompt_token_ids) >= self.scheduler.max_model_len
                continue
            assert len(request.prompt_token_ids) < self.scheduler.max_model_len
            self.accepted.append(request)
            self.check()

    def _cancel(self) -> None:
        if self.rng.random() < self.case.cancel_rate and self.accepted:
            request = self.rng.choice(self.accepted)
            flying, ended = request.in_flight, request.finish_reason is not None
            answer = self.scheduler.abort(request.request_id)
            assert (answer is request) == (not flying and not ended)
            if not ended:
                self.cancelled.add(request.request_id)
            self.check()

    def _schedule(self) -> bool:
        ready = self.scheduler.micro_batch()
        decoding = {r.request_id for r in ready if r.num_tokens - r.num_computed_tokens == 1}
        room = min(self.kv.available_blocks())
        step = self.scheduler.schedule()
        self.check()
        if step is None:
            stuck = self.scheduler.has_work and not self.flying
            self.empty = self.empty + 1 if stuck else 0
            assert self.empty <= 3, "work waits, nothing runs"
            return False
        self.empty = 0
        assert 0 < step.num_tokens <= self.case.max_num_batched_tokens
        self.out.drafted += sum(map(len, step.drafts))
        if room >= len(decoding) and not step.preempted_ids:
            served = {r.request_id for r in step.requests}
            assert decoding <= served, "a running stream stalls though there is room"
        batch = build(step, len(self.case.groups), self.case.block_size)
        fate = "fails" if self.rng.random() < self.case.failure_rate else "fine"
        if any(f == "fails" for _, _, f in self.flying):
            fate = "behind"
        hashes = self.device.run(step, batch, broken=fate != "fine")
        self.flying.append((step, hashes, fate))
        self.out.steps += 1
        self.out.computed += step.num_tokens
        self.out.copies += len(step.copies)
        self.out.preemptions += len(step.preempted_ids)
        return True

    def _collect(self) -> None:
        step, hashes, fate = self.flying.popleft()
        self.now += 1
        sampled: list[int | None] = []
        accepted: list[int] = []
        finished: dict[str, FinishReason] = {}
        rows = iter(hashes)
        for request, due, draft in zip(step.requests, step.sampled, step.drafts, strict=True):
            sampled.append(None)
            accepted.append(0)
            going = due
            for guess in [*draft, None] if due else ():
                h = next(rows)
                if not going:
                    continue
                sampled[-1] = next_token(h)
                if is_eos(h) and not request.params.ignore_eos:
                    finished[request.request_id] = FinishReason.STOP
                going = guess == sampled[-1] and request.request_id not in finished
                accepted[-1] += going
        if fate == "fails":
            for slots in self.device.slots:
                slots[:] = 0  # whoever relies on anything from before the failure is caught
        # The scheduler itself must doubt the steps that were in flight behind one that failed.
        ended = self.scheduler.update(step, sampled, finished, accepted, failed=fate == "fails")
        self.out.accepted += sum(accepted)
        if fate != "fine":
            ids = {r.request_id for r in step.requests}
            assert {r.request_id for r in ended} == ids - self.broken
            self.broken |= ids
        self.check()

    def _check_end(self) -> None:
        for pool in self.kv.pools:
            assert pool.num_available == pool.num_usable, "blocks leaked"
        for request in self.accepted:
            reason = request.finish_reason
            assert reason is not None, f"{request.request_id} never ended"
            assert request.num_preemptions <= MAX_PREEMPTIONS
            tokens, expected = alone(
                request.prompt_token_ids, self.scheduler.max_total_tokens(request), request.params.ignore_eos
            )
            if reason is FinishReason.ABORT:
                assert request.request_id in self.cancelled
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            elif reason is FinishReason.ERROR:
                assert request.request_id in self.broken
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, reason) == (tokens, expected)
            self.out.reasons[request.request_id] = reason
            self.out.cached += request.num_cached_tokens


def simulate(seed: int) -> Outcome:
    """Run the world of `seed`; the same seed always gives the same run."""
    rng = random.Random(seed)
    return Simulation(draw_case(rng), rng).run()
