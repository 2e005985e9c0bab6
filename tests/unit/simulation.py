"""A fake clock, a fake device and a fake drafter, to drive the scheduler."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from fake_device import Device, extend_hash, first_hash, is_eos, next_token
from fake_disk import FakeDiskTier, Files
from simulated_below import SimulatedBelow
from simulated_cases import Case, draw_case

from hetero.admission import MAX_PREEMPTIONS
from hetero.batch import Step, build
from hetero.kv.costs import MIN_TOKENS
from hetero.kv.disk_cache import DiskCache
from hetero.kv.host_tier import HostTier
from hetero.kv.manager import KVManager
from hetero.request import FinishReason, Request
from hetero.scheduler import Scheduler


def alone(request: Request, max_total: int) -> tuple[list[int], FinishReason]:
    """What the request generates when nothing else exists."""
    prompt, ignore_eos = request.prompt_token_ids, request.params.ignore_eos
    h, output = first_hash(request.cache_scope), []
    if request.embeds:
        return [], FinishReason.STOP
    for token in prompt:
        h = extend_hash(h, token)
    while True:
        output.append(next_token(h))
        if is_eos(h) and not ignore_eos:
            return output, FinishReason.STOP
        if len(prompt) + len(output) >= max_total:
            return output, FinishReason.LENGTH
        h = extend_hash(h, output[-1])


def num_behind(request: Request) -> int:
    """Tokens that are to be computed."""
    return request.num_tokens - request.num_computed_tokens


class RandomDrafter:
    """Guesses that are right, partly right, wrong, too many, or none."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def draft(self, due, limits, num_tokens, room):
        return [self._guess(r, self.rng.randint(0, 6)) for r in due]

    def read(self, requests, num_tokens):
        assert requests and num_tokens > 0

    def _guess(self, request: Request, count: int) -> list[int]:
        h, guess = first_hash(request.cache_scope), []
        for token in request.token_ids(0, request.num_tokens):
            h = extend_hash(h, token)
        for _ in range(count):
            right = self.rng.random() < 0.8
            guess.append(next_token(h) if right else self.rng.randrange(5))
            h = extend_hash(h, guess[-1])
        return guess


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
    spills: int = 0
    loads: int = 0
    embedded: int = 0
    from_host: int = 0
    from_below: int = 0
    recurrent: bool = False
    reasons: dict[str, FinishReason] = field(default_factory=dict)


class Simulation:
    """Runs a case to its end, checking every invariant after each operation."""

    def __init__(self, case: Case, rng: random.Random, files: Files | None = None):
        """`files`: what is on a disk, where there is one."""
        self.case, self.rng = case, rng
        slots = case.host_slots or [0] * len(case.groups)
        host = HostTier(slots)
        if case.move_seconds:
            host.costs.observe(1, case.move_seconds, 0, 0)
            host.costs.observe(0, 0, MIN_TOKENS, float(MIN_TOKENS))
        self.kv = KVManager(case.groups, case.block_size, case.in_place, host)
        self.scheduler = Scheduler(
            self.kv,
            case.max_num_seqs,
            case.max_num_batched_tokens,
            case.max_model_len,
            case.depth,
            RandomDrafter(rng) if case.drafts else None,
        )
        self.device = Device(case.groups, case.block_size, slots)
        self.disk: FakeDiskTier | None = None
        if files is not None:
            self.disk = FakeDiskTier(files, lambda g, slot: self.device.host[g][slot], self._filling, rng)
            self.kv.below = DiskCache(self.kv, self.disk)
        elif case.below:
            self.kv.below = SimulatedBelow(self.kv, self.device, rng)
        self.flying: deque[tuple[Step, list[int], str]] = deque()
        self.todo = deque(zip(case.arrivals, case.requests, strict=True))
        self.accepted: list[Request] = []
        self.cancelled: set[str] = set()
        self.broken: set[str] = set()
        self.rows: dict[str, list[int]] = {}  # positions that came, of requests for embeddings
        self.embedded = False  # the last step with requests did
        self.out = Outcome(case.requests, recurrent=self.kv.recurrent)
        self.now = 0
        self.empty = 0

    def run(self) -> Outcome:
        while self.todo or self.scheduler.has_work or self.flying or self._disk_is_busy():
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

    def _filling(self) -> set[tuple[int, int]]:
        """Groups and slots that steps in flight spill to."""
        return {(move.group, move.slot) for step, _, _ in self.flying for move in step.spills}

    def _disk_is_busy(self) -> bool:
        return self.disk is not None and (self.disk.num_pending > 0 or self.scheduler.can_go_on)

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
        decoding = {
            kind: {r.request_id for r in self.scheduler.micro_batch(kind) if num_behind(r) == 1}
            for kind in (False, True)
        }
        room = min(self.kv.available_blocks())
        step = self.scheduler.schedule()
        self.check()
        if step is None:
            stuck = self.scheduler.has_work and not self.flying and not (self.disk and self.disk.num_pending)
            self.empty = self.empty + 1 if stuck else 0
            assert self.empty <= 3, "work waits, nothing runs"
            return False
        self.empty = 0
        self.out.drafted += sum(map(len, step.drafts))
        assert step.num_tokens or step.copies or step.loads or step.spills
        assert step.num_tokens <= self.case.max_num_batched_tokens
        if room >= len(decoding[False] | decoding[True]) and not step.preempted_ids:
            served = {r.request_id for r in step.requests}
            assert decoding[step.embeds] <= served, "a running stream stalls though there is room"
            if step.requests and step.embeds == self.embedded:
                assert not decoding[not step.embeds], "no turns are taken"
        self.embedded = step.embeds if step.requests else self.embedded
        batch = build(step, self.kv.num_kv_groups, self.case.block_size)
        fate = "fails" if self.rng.random() < self.case.failure_rate else "fine"
        if any(f == "fails" for _, _, f in self.flying):
            fate = "behind"
        hashes = self.device.run(step, batch, broken=fate != "fine")
        self.flying.append((step, hashes, fate))
        self.out.steps += 1
        self.out.computed += step.num_tokens
        self.out.embedded += step.num_tokens if step.embeds else 0
        self.out.copies += len(step.copies)
        self.out.spills += len(step.spills)
        self.out.loads += len(step.loads)
        self.out.preemptions += len(step.preempted_ids)
        return True

    def _collect(self) -> None:
        step, hashes, fate = self.flying.popleft()
        self.now += 1
        sampled: list[int | None] = []
        accepted: list[int] = []
        finished: dict[str, FinishReason] = {}
        rows = iter(hashes)
        if step.embeds:
            finished = self._take_rows(step)
        for request, due, draft in zip(step.requests, step.sampled, step.drafts, strict=True):
            sampled.append(None)
            accepted.append(0)
            going = due and not step.embeds
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
            if self.rng.random() < 0.5:  # a stage is lost, and comes back with other memory
                self.device.host = [np.zeros_like(slots) for slots in self.device.host]
            for slots in (*self.device.slots, *self.device.host):
                slots[:] = 0  # whoever relies on anything from before the failure is caught
        # The scheduler itself must doubt the steps that were in flight behind one that failed.
        ended = self.scheduler.update(step, sampled, finished, accepted, failed=fate == "fails")
        self.out.accepted += sum(accepted)
        if fate != "fine":
            ids = {r.request_id for r in step.requests}
            assert {r.request_id for r in ended} == ids - self.broken
            self.broken |= ids
        self.check()

    def _take_rows(self, step: Step) -> dict[str, FinishReason]:
        """Of a step that embeds; who is complete. A text's rows come in order, or all once more."""
        finished = {}
        for request, start, count, due in zip(
            step.requests, step.starts, step.num_scheduled_tokens, step.sampled, strict=True
        ):
            came = self.rows.setdefault(request.request_id, [])
            del came[start:]
            came += range(start, start + count)
            if due and not request.abort_requested:
                finished[request.request_id] = FinishReason.STOP
            if due and request.needs_every_row:
                assert came == list(range(request.num_tokens)), "a row is missing"
                assert not request.num_cached_tokens
        return finished

    def _check_end(self) -> None:
        for pool in self.kv.pools:
            assert pool.num_available == pool.num_usable, "blocks leaked"
        for slots in self.kv.host.slots:
            assert not any(slots.pins), "slots leaked"
        priorities = {request.priority for request in self.case.requests}
        for request in self.accepted:
            reason = request.finish_reason
            assert reason is not None, f"{request.request_id} never ended"
            assert request.num_preemptions <= MAX_PREEMPTIONS or len(priorities) > 1
            tokens, expected = alone(request, self.scheduler.max_total_tokens(request))
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
            self.out.from_host += request.tier_tokens.get("host", 0)
            self.out.from_below += request.tier_tokens.get("disk", 0)


def simulate(seed: int) -> Outcome:
    """Run the world of `seed`; the same seed always gives the same run."""
    rng = random.Random(seed)
    return Simulation(draw_case(rng), rng).run()


def simulate_lives(seed: int, lives: int = 2) -> list[Outcome]:
    """The world of `seed` with little host memory, a disk below it, and everybody coming twice; again and
    again, each time from the start but for what the disk has kept."""
    files: Files = {}
    outcomes = []
    for life in range(lives):
        rng = random.Random(seed)
        case = draw_case(rng, tiers=True)
        size = case.block_size
        case.host_slots = [
            rng.choice([2, case.max_model_len // size, group.num_blocks]) for group in case.groups
        ]
        case.move_seconds = min(case.move_seconds, 1)
        for i, request in enumerate(list(case.requests)):
            prompt, scope = request.prompt_token_ids, request.cache_scope
            case.requests.append(Request(f"again{i}", prompt, request.params, cache_scope=scope))
            case.arrivals.append(case.arrivals[-1] + rng.choice([1, 5, 20]))
        outcomes.append(Simulation(case, random.Random(f"{seed} {life}"), files).run())
    return outcomes
