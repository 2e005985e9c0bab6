"""A small model that guesses for a large one: its KV cache and its steps.

It knows each request under a twin, whose tokens are the request's verified ones. To guess k tokens for some
requests takes k small steps, each with a row for every request:

    tokens of a twin      v v v v v v | g0 g1 g2 g3       v: verified, the last of them new
    step 0 computes             v v v                     what is not computed yet; its last row gives g0
    step 1 to 3                         g0 g1 g2          one each; g3 is never computed
    num_computed_tokens   . . . . . . |                   counts no guess until it is verified

Guesses that come true need not be computed again; over the others is written what came instead. The prefix
tree holds verified tokens only, so that a prompt with a known beginning is not computed twice here either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetero.batch import Step, build
from hetero.kv.manager import KVManager
from hetero.protocols import RunnerLike
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from spec.policy import StepCost

log = logging.getLogger(__name__)

READY = 16  # tokens that are computed with a first guess, whatever the budget
MAX_FAILURES = 3  # steps that failed in a row; then nothing is guessed any more


@dataclass(slots=True)
class _Twin:
    """`guessed`: tokens behind the verified ones of which there are keys and values."""

    request: Request
    guessed: list[int] = field(default_factory=list)

    @property
    def num_behind(self) -> int:
        return self.request.num_tokens - self.request.num_computed_tokens


class DraftModel:
    """Guesses tokens for requests, several at a time. One thread uses it, and waits while it computes.

    A device that fails ends its guesses, and nothing else: for good after MAX_FAILURES in a row, or for as
    long as its process is lost.
    """

    def __init__(
        self,
        runner: RunnerLike,
        kv: KVManager,
        max_step_tokens: int,
        max_step_rows: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """A step of `runner` may have so many tokens and rows of logits; a request as many tokens as
        `max_model_len`, beyond which nothing is guessed for it."""
        self.kv = kv
        self.cost = StepCost()  # of its steps
        self.seconds = 0.0  # spent so far
        self._runner, self._clock = runner, clock
        self.max_step_tokens, self._max_rows = max_step_tokens, max_step_rows
        self._max_model_len = min(max_model_len, kv.max_tokens())
        self._twins: dict[str, _Twin] = {}  # the one that was used last comes last
        self._step_id = 0
        self._failures = 0

    @property
    def available(self) -> bool:
        """Whether it guesses at present."""
        if self._failures >= MAX_FAILURES:
            return False
        if self._runner.unavailable is not None:
            self._forget()
            self._runner.acknowledge()
        return self._runner.unavailable is None

    def num_behind(self, request: Request) -> int:
        """Tokens of a request that have to be computed for a first guess."""
        twin = self._twins.get(request.request_id)
        return request.num_tokens - (0 if twin is None else twin.request.num_computed_tokens)

    def limit(self, request: Request) -> int:
        """How many tokens it can guess for a request as long as this one."""
        return max(0, self._max_model_len - request.num_tokens)

    def guess(self, requests: Sequence[Request], counts: Sequence[int], budget: int) -> list[list[int]]:
        """Up to `counts[i]` tokens that may follow `requests[i]`: the likeliest to the draft model.

        Who is more than READY tokens behind shares `budget` tokens of catching up with the others, those
        first that come first, and has guesses once that is done. Never raises.
        """
        started = self._clock()
        try:
            return self._guess(requests, counts, budget)
        except Exception as error:  # whatever a device can say
            self._failures += 1
            lost = self._runner.unavailable
            over = "" if self._failures < MAX_FAILURES else "; nothing is guessed by it any more"
            log.warning("the draft model failed: %s%s", lost or error, over)
            self._forget()
            return [[] for _ in requests]
        finally:
            self.seconds += self._clock() - started

    def remove(self, request: Request) -> None:
        """The request has ended. What was computed for it stays in the cache until the room is needed."""
        twin = self._twins.pop(request.request_id, None)
        if twin is not None:
            self.kv.release(twin.request, cache=True)

    def warm_up(self) -> None:
        """Guess once or twice, to know what it costs. Raises the error of a step that fails."""
        request = Request("", [0] * READY, SamplingParams())
        for _ in range(2):
            self._guess([request], [4], 0)
            self.remove(request)
            self.kv.clear_cache()

    def close(self) -> None:
        """Free the device."""
        self._runner.close()

    # -- one round of guesses --------------------------------------------------------------------

    def _guess(self, requests: Sequence[Request], counts: Sequence[int], budget: int) -> list[list[int]]:
        twins = [self._twin(request) for request in requests]
        guesses: list[list[int]] = [[] for _ in requests]
        wanted = [0] * len(twins)
        step = self._begin()
        going = []  # those with a row in this step
        for i, (twin, count) in enumerate(zip(twins, counts, strict=True)):
            before = step.num_tokens
            wanted[i] = self._catch_up(step, twin, min(count, self.limit(twin.request)), budget, twins)
            added = step.num_tokens - before
            budget -= added if added > READY else 0
            if wanted[i]:
                going.append(i)
        while step.requests or step.copies:  # copies also where blocks were too few for anything else
            for i, token in zip(going, self._compute(step), strict=True):
                guesses[i] += [token] if token >= 0 else []
                wanted[i] = wanted[i] if token >= 0 else 0  # not a number: whatever follows means nothing
            going = [i for i in going if len(guesses[i]) < wanted[i]]
            step = self._begin()
            for i in going:
                request = twins[i].request
                request.output_token_ids.append(guesses[i][-1])
                twins[i].guessed.append(guesses[i][-1])
                step.add(request, request.num_tokens - 1, 1, True, None)
        for twin in twins:
            if twin.guessed:
                del twin.request.output_token_ids[-len(twin.guessed) :]
        self._failures = 0
        return guesses

    def _twin(self, request: Request) -> _Twin:
        """The request's twin, up to date with what was verified."""
        twin = self._twins.pop(request.request_id, None)
        if twin is None:
            own = Request(request.request_id, request.prompt_token_ids, request.params)
            own.cache_scope = request.cache_scope
            twin = _Twin(own)
        self._twins[request.request_id] = twin
        own = twin.request
        news = request.token_ids(own.num_tokens, request.num_tokens)
        own.output_token_ids += news
        if twin.guessed:
            for guess, token in zip(twin.guessed, news[:-1], strict=False):  # the last one's row is wanted
                if guess != token:
                    break
                own.num_computed_tokens += 1
            self.kv.commit(own, own.num_computed_tokens)
            twin.guessed = []
        # The row of the last one is wanted, again if need be.
        own.num_computed_tokens = min(own.num_computed_tokens, own.num_tokens - 1)
        return twin

    def _catch_up(self, step: Step, twin: _Twin, count: int, budget: int, busy: Sequence[_Twin]) -> int:
        """Put what a twin has to compute into the step, as far as there is room. Returns how many tokens can
        then be guessed behind its last one: 0 when it is not due for a guess."""
        own, room = twin.request, self.max_step_tokens - step.num_tokens
        if len(step.requests) >= self._max_rows or room < 1 or own.num_tokens > self._max_model_len:
            return 0
        if own.block_tables:
            self.kv.trim(own)
        if twin.num_behind > READY:
            self.kv.match(own, load=False)
        if twin.num_behind > READY and budget < 1:
            return 0
        if twin.num_behind > READY:
            step.copies += self.kv.match_tail(own)
        take = min(twin.num_behind, room, max(READY, budget))
        due = take == twin.num_behind and count > 0
        found = self._allocate(own, take + (count - 1 if due else 0), busy)
        if found < 1:
            return 0
        take, due = min(take, found), due and found >= take
        step.add(own, own.num_computed_tokens, take, due, None)
        own.num_computed_tokens += take
        self.kv.commit(own, min(own.num_computed_tokens, own.num_tokens - 1))  # see _twin
        return found - take + 1 if due else 0

    def _allocate(self, own: Request, count: int, busy: Sequence[_Twin]) -> int:
        """See KVManager.allocate. What others hold that are not in the step goes first."""
        found = self.kv.allocate(own, count)
        if found == count:
            return found
        here = {twin.request.request_id for twin in busy}
        for other in [name for name in self._twins if name not in here]:
            self.remove(self._twins[other].request)
            if (found := self.kv.allocate(own, count)) == count:
                break
        return found

    def _begin(self) -> Step:
        self._step_id += 1
        self.kv.begin_step(self._step_id)
        return Step(self._step_id)

    def _compute(self, step: Step) -> list[int]:
        """The likeliest token of each row of logits; -1 where a row is not finite."""
        started = self._clock()
        try:
            self._runner.submit(build(step, self.kv.num_kv_groups, self.kv.block_size, only_argmax=True))
            result = self._runner.wait()
        finally:
            self.kv.end_step(step, good=True)  # after a failure all is forgotten
        assert result is not None, "without a timeout there is a result"
        if result.error is not None or result.logits is None:
            raise result.error or RuntimeError("no logits came back")
        best = result.logits.argmax(axis=-1) if result.argmax is None else result.argmax
        tokens: list[int] = best.tolist()
        if step.requests:
            self.cost.observe(step.num_tokens, self._clock() - started)
        return tokens

    def _forget(self) -> None:
        """Nothing that was computed can be relied on."""
        for twin in self._twins.values():
            self.kv.release(twin.request, cache=False)
        self._twins.clear()
        self.kv.clear_cache()

    def check_invariants(self) -> None:
        """Raise AssertionError unless twins, their blocks and the cache agree. Between rounds."""
        self.kv.check_invariants()
        self.cost.check_invariants()
        assert self.kv.num_pinned == 0, "no step is in flight"
        for name, twin in self._twins.items():
            own = twin.request
            assert own.request_id == name
            assert own.num_computed_tokens <= own.num_tokens
            assert not twin.guessed or own.num_computed_tokens == own.num_tokens
            for table in own.block_tables:
                held = len(table) * self.kv.block_size
                assert own.num_computed_tokens + len(twin.guessed) <= held
