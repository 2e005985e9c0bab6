"""Guesses for running requests: who makes them, how many are computed, and how they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero.batch import Step
from hetero.draft_model import DraftModel
from hetero.drafting import NAME, Drafting
from hetero.request import Request
from hetero.settings import MAX_STEP_DRAFTS
from hetero.stats import SpeculationStats
from spec.base import Draft, Proposer
from spec.policy import Acceptance, Policy, RequestAcceptance

LONGEST_PAUSE = 8  # steps from one look at a request whose guesses are unlikely to the next: looks cost time
COST_EVERY = 4  # of the steps without guesses, whose costs change slowly, one in so many is taken in
NOTHING = Draft([], 0)

Chain = Callable[[Request], Sequence[Proposer]]


class _Guessed:
    """A request's proposers, made when its first token is due, and how right they are."""

    __slots__ = ("acceptance", "best", "draft", "known", "pause", "proposers", "skip")

    def __init__(self, acceptance: RequestAcceptance):
        self.acceptance = acceptance
        self.proposers: Sequence[Proposer] = ()
        self.known = 0  # tokens that the proposers were told
        self.best = 0  # the proposer of `draft`
        self.draft = NOTHING
        self.pause = self.skip = 0  # steps from the last look to the next one, and what is left of them

    def chances(self, limit: int) -> list[float]:
        """RequestAcceptance.chances; without any, the next looks are further apart."""
        chances = self.acceptance.chances(limit)
        if not self.skip:
            self.pause = 0 if chances else min(LONGEST_PAUSE, 1 + 2 * self.pause)
            self.skip = self.pause
        return chances

    def believe(self, proposer: int, draft: Draft) -> None:
        self.best, self.draft = proposer, draft
        self.acceptance.propose(proposer, draft)


class Speculation:
    """The scheduler's drafter. The engine tells it of requests, of what steps gave and of what they took.

    Of several proposers the one with the longest match is believed, the first of equals. What the policy
    leaves out is compared with the text all the same, so that it knows when guessing would pay again.
    """

    def __init__(self, names: Sequence[str], chain: Chain, max_tokens: int, few_shapes: bool = False):
        """`chain` makes a request's proposers, in the order of `names`. `max_tokens`: of one draft.

        `few_shapes`: see Policy.
        """
        self._names, self._chain, self._max_tokens = tuple(names), chain, max_tokens
        self._acceptance = Acceptance(len(self._names))
        self._policy = Policy(few_shapes)
        self._requests: dict[str, _Guessed] = {}
        self._drafting: Drafting | None = None
        self.stats = SpeculationStats.of(self._names, max_tokens)

    def draft_with(self, model: DraftModel) -> None:
        """Have a draft model guess where nothing better is known. Before there are requests."""
        self._names += (NAME,)
        self._acceptance = Acceptance(len(self._names))
        self._drafting = Drafting(model, len(self._names) - 1, self._max_tokens, self._policy)
        self.stats = SpeculationStats.of(self._names, self._max_tokens)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = _Guessed(RequestAcceptance(self._acceptance))

    def remove(self, request: Request) -> None:
        """The request has ended."""
        self._requests.pop(request.request_id, None)
        if self._drafting is not None:
            self._drafting.model.remove(request)

    def draft(
        self, due: Sequence[Request], limits: Sequence[int], num_tokens: int, room: int, /
    ) -> list[list[int]]:
        """See drafts.Drafter."""
        found = [self._propose(request) for request in due]
        chances = [g.chances(limit) for g, limit in zip(found, limits, strict=True)]
        room = min(room, MAX_STEP_DRAFTS)
        if self._drafting is not None:
            acceptance = [g.acceptance for g in found]
            drafts = self._drafting.guess(due, limits, acceptance, chances, num_tokens, room)
            for i, draft in drafts.items():
                found[i].believe(len(self._names) - 1, draft)
                chances[i] = acceptance[i].chances(limits[i])
        if not any(chances):
            self.stats.chosen.observe(0, len(due))
            return [[] for _ in due]
        counts = self._policy.choose(chances, room)
        for count in counts:
            self.stats.chosen.observe(count)
        return [g.draft.token_ids[:count] for g, count in zip(found, counts, strict=True)]

    def read(self, requests: Sequence[Request], num_tokens: int, /) -> None:
        """See drafts.Drafter."""
        if self._drafting is not None:
            self._drafting.read(requests, num_tokens)

    def _propose(self, request: Request) -> _Guessed:
        guessed = self._requests[request.request_id]
        if guessed.skip > 1:
            guessed.skip -= 1
            if guessed.draft is not NOTHING:
                guessed.believe(0, NOTHING)
            return guessed
        guessed.skip = 0
        if not guessed.known:
            guessed.proposers = self._chain(request)
        news = request.token_ids(guessed.known, request.num_tokens)
        guessed.known += len(news)
        best = NOTHING
        for index, proposer in enumerate(guessed.proposers):
            proposer.extend(news)
            draft = proposer.propose(self._max_tokens)
            if draft.match_length > best.match_length:
                best, guessed.best = draft, index
        guessed.believe(guessed.best, best)
        return guessed

    def observe(self, step: Step, token_ids: Sequence[Sequence[int]], num_accepted: Sequence[int]) -> None:
        """What a step's requests got, and how many of their guesses were right."""
        singles = 0
        for request, draft, tokens, accepted in zip(
            step.requests, step.drafts, token_ids, num_accepted, strict=True
        ):
            guessed = self._requests.get(request.request_id)
            if guessed is None or not tokens:
                continue
            if guessed.draft is not NOTHING:
                guessed.acceptance.observe(tokens)
            if len(tokens) == 1:
                singles += 1
            else:
                self.stats.request_tokens.observe(len(tokens))
            if draft:
                name = self._names[guessed.best]
                self.stats.drafted[name] += len(draft)
                for position in range(accepted):
                    self.stats.accepted[name][position] += 1
        if singles:
            self.stats.request_tokens.observe(1, singles)

    def observe_seconds(self, step: Step, seconds: float) -> None:
        """What a step took. Only steps without prompts say what a token more costs."""
        drafted = sum(map(len, step.drafts))
        decodes = step.num_tokens == len(step.requests) + drafted and all(step.sampled)
        if self._drafting is not None:
            self.stats.draft_seconds = self._drafting.model.seconds
            seconds = self._drafting.take_seconds(seconds, 0 if decodes else step.num_tokens)
        if not step.requests or not decodes:
            return
        cost = self._policy.cost
        if drafted or step.step_id % COST_EVERY == 0 or not cost.is_settled(step.num_tokens):
            cost.observe(step.num_tokens, seconds)

    def close(self) -> None:
        """Nothing is guessed any more."""
        if self._drafting is not None:
            self._drafting.model.close()

    def check_invariants(self, known: Sequence[Request]) -> None:
        """Raise AssertionError unless counts add up. `known`: the requests that have not ended."""
        assert set(self._requests) == {r.request_id for r in known}
        self._acceptance.check_invariants()
        self._policy.cost.check_invariants()
        if self._drafting is not None:
            self._drafting.check_invariants()
        for guessed in self._requests.values():
            guessed.acceptance.check_invariants()
        for name, drafted in self.stats.drafted.items():
            assert sum(self.stats.accepted[name]) <= drafted
