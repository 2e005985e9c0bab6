"""Which tokens of which requests the next step computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetero import shares
from hetero.admission import Admission, check_prompt_fits
from hetero.batch import Step
from hetero.drafts import Drafter, add_drafts, take_drafts
from hetero.ending import why_it_ends
from hetero.kv.manager import KVManager
from hetero.queues import Queues
from hetero.request import FinishReason, Request, RequestStatus
from hetero.scheduler_checks import check_scheduler
from hetero.stats import SchedulerCounters


class Scheduler:
    """Decides steps. There is no prefill or decode phase: every request has
    `num_computed_tokens` catching up with `num_tokens`, under one budget of tokens per step.

    All are in one order, by priority and then by arrival: see queues.py; "older" is who comes before in it.
    Only the head of those that wait is admitted, so nobody starves. A step serves older requests first, but
    what the streams that need one token each will take is set aside before a longer catching-up gets its
    chunk, so a prefill never stalls them.

    When the pool is full, the newest running request gives its blocks back and waits again. A request only
    ever preempts newer ones; otherwise it waits where it is. After MAX_PREEMPTIONS, a request is admitted
    only when the worst case of all older ones and itself fits: newer ones are preempted before it, so it is
    not preempted again, unless somebody more important comes, who takes a less important one's place.

    With P pipeline stages about P steps are in flight, each with its share of the running requests
    by cost. A request that waits for its next token is in one of them; the chunks of a prompt follow
    each other through the stages without waiting, since its tokens are known.

    `num_computed_tokens` advances as tokens are scheduled: stages compute steps in their order, so
    whatever is scheduled later may rely on them. Updates come in the order of the steps, too.

    A step either generates or embeds, in turns while there are requests of both kinds.

    What a step has left of its budget a `drafter` may fill with guesses, see drafts.py. A new request that
    waits for the disk is outside of the queue: see kv/below.py.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        pipeline_depth: int = 1,
        drafter: Drafter | None = None,
    ):
        if min(max_num_seqs, max_num_batched_tokens, max_model_len, pipeline_depth) < 1:
            raise ValueError("the scheduler's limits must be at least 1")
        self.kv = kv
        # More sequences than tokens per step could not all advance in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = min(max_model_len, kv.max_tokens())
        self.pipeline_depth = pipeline_depth
        self.drafter = drafter
        self.counters = SchedulerCounters()
        self._queues = Queues()
        self._requests: dict[str, Request] = {}
        self._steps: dict[int, Step] = {}  # in flight
        self._doomed: set[int] = set()  # in flight behind a step that failed
        self._last_step_id = 0
        self._num_embedding = 0  # requests for embeddings
        self._embedded = False  # the last step did
        self._admission = Admission(kv, max_num_batched_tokens, self.max_total_tokens)

    # -- requests ------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting) + len(self.held)

    @property
    def held(self) -> Sequence[Request]:
        """New requests that wait for the disk."""
        return () if self.kv.below is None else self.kv.below.held

    @property
    def num_in_flight(self) -> int:
        """Steps whose result is not in."""
        return len(self._steps)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def can_go_on(self) -> bool:
        """Whether there is more to do than to wait for the disk."""
        more = self.kv.below is not None and self.kv.below.has_work
        return more or bool(self._queues.running or self._queues.waiting or self._steps)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise RequestError when a prompt of this length leaves no room for one token."""
        check_prompt_fits(num_prompt_tokens, self.max_model_len)

    def max_total_tokens(self, request: Request) -> int:
        """Tokens of prompt and output after which the request ends with "length"."""
        if (most := request.params.max_tokens) is None:
            return self.max_model_len
        return min(self.max_model_len, len(request.prompt_token_ids) + most)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises RequestError when it can never fit, ValueError when a
        request with its id is still here."""
        self.check_fits(len(request.prompt_token_ids))
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already here")
        self._requests[request.request_id] = request
        self._num_embedding += request.embeds
        if self.kv.below is None or request.needs_every_row or not self.kv.below.hold(request):
            self._queues.add(request, self._last_step_id)

    def abort(self, request_id: str) -> Request | None:
        """End a request. Returns it when it ended at once; when it is in flight it ends with the
        update of its step (None). None also for an unknown id."""
        if (request := self._requests.get(request_id)) is None:
            return None
        if request.in_flight:
            request.abort_requested = True
            return None
        if self.kv.below is None or self.kv.below.cancel(request_id) is None:
            self._queues.remove(request)
        self._end(request, FinishReason.ABORT, cache=True)
        return request

    # -- deciding ------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do now: with nothing in flight, no request is here
        but such as wait for the disk. A step without requests moves or copies blocks.
        """
        for request in () if self.kv.below is None else self.kv.below.take_in():
            self._queues.add(request, self._last_step_id)
        self._last_step_id += 1
        step = Step(self._last_step_id)
        self.kv.begin_step(step.step_id)
        self._make_way(step)
        # of the whole step: what is scheduled on the way must not shrink it
        most = shares.token_budget(
            self._queues.soon(self.max_num_seqs), self.max_num_batched_tokens, self.pipeline_depth
        )
        for step.embeds in shares.turns(self._embedded, self._num_embedding, len(self._requests)):
            self._schedule_running(step, most)
            self._schedule_waiting(step, most)
            if step.requests:
                self._embedded = step.embeds
                break
        else:
            step.embeds = False
        self._add_drafts(step)
        step.spills, step.loads = self.kv.take_moves(idle=not step.requests)
        if not (step.requests or step.copies or step.spills or step.loads):
            return None
        self._steps[step.step_id] = step
        self.counters.steps += 1
        return step

    def _schedule_running(self, step: Step, most: int) -> None:
        ready = self.micro_batch(step.embeds)
        newcomers = self._queues.head_is(step.embeds) and len(self._queues.running) < self.max_num_seqs
        kept = shares.kept_for_newcomers(most, newcomers)
        streams = sum(1 for r in ready if r.num_tokens - r.num_computed_tokens == 1)  # still to be served
        for request in ready:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one in this very step
            budget, kept_blocks = most - step.num_tokens, 0
            if request.num_tokens - request.num_computed_tokens == 1:
                streams -= 1
            else:
                budget, kept_blocks = (
                    shares.chunk(self._queues, request, budget - kept - streams, step, most),
                    streams,
                )
            if budget < 1:
                continue
            count = self._claim(request, budget, step, kept_blocks)
            while count == 0 and self._preempt_newer_than(request, step):
                count = self._claim(request, budget, step, kept_blocks)
            if count:
                self._put(request, count, step)

    def _schedule_waiting(self, step: Step, most: int) -> None:
        everybody = min(self.max_num_seqs, len(self._queues.running) + len(self._queues.waiting))
        while (
            self._queues.head_is(step.embeds)
            and len(self._queues.running) < self.max_num_seqs
            and len(step.requests) < shares.share_of(everybody, self.pipeline_depth)
            and step.num_tokens < most
        ):
            request = self._queues.waiting[0]
            budget = shares.chunk(self._queues, request, most - step.num_tokens, step, most)
            if budget < 1 or not self._admission.may_come(
                self._queues.rivals(request), request, step.step_id
            ):
                break
            self.kv.match(request, load=False)
            if self._queues.running and not self._admission.has_room(self._queues.running, request):
                self._take_back(request)
                self._admission.refuse(request, step.step_id)
                break
            count = self._claim(request, budget, step, 0)
            if count == 0:
                self._take_back(request)
                break
            self._queues.admit()
            if request.status is RequestStatus.WAITING:
                self.counters.prompt_tokens += len(request.prompt_token_ids)
            request.status = RequestStatus.RUNNING
            if count:
                self._put(request, count, step)

    def micro_batch(self, embeds: bool = False) -> list[Request]:
        """The running requests that the next step of a kind serves, in order: about 1/P of what all that run
        cost, and further chunks of prompts that are on their way already."""
        lost = {id(r) for step_id in self._doomed for r in self._steps[step_id].requests}
        mixed = embeds or self._num_embedding > 0
        running = [r for r in self._queues.running if r.embeds == embeds] if mixed else self._queues.running
        return shares.micro_batch(running, lost, self.pipeline_depth)

    def _claim(self, request: Request, budget: int, step: Step, kept: int) -> int | None:
        """Reuse what is cached, then take blocks for up to `budget` further tokens, but leave `kept` free.

        Returns for how many there is room. None: it waits for what is loaded, by this step or the next.
        """
        if request.block_tables:
            self.kv.trim(request)  # steps in flight have block tables of their own
        if request.num_tokens - request.num_computed_tokens > 1:
            self.kv.match(request, kept=kept)
            if not self.kv.waits(request):
                step.copies += self.kv.match_tail(request)
        if self.kv.waits(request):
            return None
        return self.kv.allocate(request, min(budget, request.num_tokens - request.num_computed_tokens), kept)

    def _put(self, request: Request, count: int, step: Step) -> None:
        start = request.num_computed_tokens
        due = start + count == request.num_tokens
        step.add(request, start, count, due, self.kv.use_state(request, count))
        request.num_computed_tokens = start + count
        request.num_in_flight += 1
        self.kv.commit(request, start + count)

    def _add_drafts(self, step: Step) -> None:
        """Once all have their share: a guess must not take anybody's tokens or blocks."""
        if self.drafter is None or step.embeds:
            return
        limits = [self.max_total_tokens(r) - r.num_tokens - 1 for r in step.requests]
        room = self.max_num_batched_tokens - step.num_tokens
        others = (
            len(self._queues.running) if self.pipeline_depth > 1 else 0
        )  # are served while this is in flight
        add_drafts(step, self.kv, self.drafter, limits, room, others)

    # -- room ----------------------------------------------------------------------------------

    def _take_back(self, request: Request) -> None:
        """Undo the match of a request that is not admitted after all."""
        self.kv.release(request, cache=False)
        request.num_computed_tokens = 0
        if not request.num_preemptions:
            request.forget_found()

    def _make_way(self, step: Step) -> None:
        """Have a less important request wait for the head of those that wait, if that found no place."""
        self._queues.raise_one(step.step_id)
        if (lesser := self._queues.lesser()) is None:
            return
        full = len(self._queues.running) >= self.max_num_seqs
        if full or self._admission.still_refused(self._queues.waiting[0], step.step_id):
            self._preempt(lesser, step)

    def _preempt_newer_than(self, request: Request, step: Step) -> bool:
        """Preempt the newest running request for `request`. False when it has to wait instead:
        it is the newest itself, the newest is in flight, or steps that end soon hold blocks."""
        newest = self._queues.running[-1]
        if newest is request or newest.in_flight or self.kv.blocks_come_free():
            return False
        self._preempt(newest, step)
        self._admission.preempted()
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        self._queues.put_back(request, step.step_id)
        self.kv.release(request, cache=True)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.counters.preemptions += 1
        step.preempted_ids.append(request.request_id)

    # -- results -------------------------------------------------------------------------------

    def is_doomed(self, step: Step) -> bool:
        """Whether a step in flight rests on an earlier one that failed, so that it fails as well."""
        return step.step_id in self._doomed

    def update(
        self,
        step: Step,
        sampled: Sequence[int | None],
        finished: Mapping[str, FinishReason] | None = None,
        num_accepted: Sequence[int] = (),
        *,
        failed: bool = False,
    ) -> list[Request]:
        """Take in the result of the oldest step in flight. Returns the requests that ended.

        `sampled[i]` is the next token of `step.requests[i]` where `step.sampled[i]`, else None. It
        comes behind the first `num_accepted[i]` tokens of the request's draft, which are right.
        `finished` maps the ids of requests that end with it (stop, own error) to the reason;
        "length" and aborts are found here. Where the step embeds, nothing is sampled. `failed`: the step
        was not (wholly) computed. Its requests and those of later steps in flight end with an error, and
        nothing in the cache is trusted any more.
        """
        del self._steps[step.step_id]
        if failed:
            self._doomed.update(self._steps)
        failed = failed or self.is_doomed(step)
        self._doomed.discard(step.step_id)
        self.kv.end_step(step, good=not failed)
        ended = []
        for i, request in enumerate(step.requests):
            request.num_in_flight -= 1
            if request.status is RequestStatus.FINISHED:
                continue  # it ended when an earlier one of its steps failed
            reason: FinishReason | None = FinishReason.ERROR
            if not failed:
                if step.drafts[i]:
                    right = step.drafts[i][: num_accepted[i] if num_accepted else 0]
                    take_drafts(self.kv, request, right)
                    self.counters.generated_tokens += len(right)
                self.kv.trim(request)
                reason = (finished or {}).get(request.request_id)
                self.counters.generated_tokens += sampled[i] is not None
                most = self.max_total_tokens(request)
                reason = why_it_ends(request, step.sampled[i], sampled[i], reason, most)
            if reason is not None:
                ended.append(request)
                request.finish_reason = reason
        for request in ended:
            assert request.finish_reason is not None
            self._queues.remove(request)
            self._end(request, request.finish_reason, cache=not failed)
        if failed:
            self._distrust_cache()
        return ended

    def fail_all(self) -> list[Request]:
        """End all requests with an error, and forget the cache. No step may be in flight."""
        assert not self._steps
        ended = [*self._queues.clear(), *self.held]
        if self.kv.below is not None:
            for request in self.held:
                self.kv.below.cancel(request.request_id)
        for request in ended:
            self._end(request, FinishReason.ERROR, cache=False)
        self.kv.clear_cache()
        return ended

    def _end(self, request: Request, reason: FinishReason, *, cache: bool) -> None:
        self.kv.release(request, cache=cache)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._num_embedding -= request.embeds
        self._queues.forget(request)
        self._admission.one_ended()
        self.counters.finished[reason] += 1
        self.counters.count_found(request)

    def _distrust_cache(self) -> None:
        """After a failure: what is not in flight may rest on blocks that were never computed."""
        for request in self._queues.running:
            if not request.in_flight:
                self.kv.release(request, cache=False)
                request.num_computed_tokens = 0
                request.forget_found()
        self.kv.clear_cache()

    def check_invariants(self, known: Collection[Request] = ()) -> None:
        """Raise AssertionError unless queues, states and block tables agree. O(everything).

        `known`: requests that ended must hold nothing.
        """
        check_scheduler(self, known)
