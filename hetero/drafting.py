"""When a draft model guesses, for whom, and how much: where other guesses are worse, or there are none."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.draft_model import READY, DraftModel
from hetero.request import Request
from spec.base import Draft
from spec.drafting import TRIAL_TOKENS, Trials, best_length, catch_up_tokens, tokens_per_second
from spec.policy import Policy, RequestAcceptance

NAME = "draft"
MATCH = 1  # the length of a match that stands for a draft model's: guesses are told apart by position


class Drafting:
    """Chooses for the requests of a step between what was found for nothing and the draft model."""

    def __init__(self, model: DraftModel, index: int, max_tokens: int, policy: Policy):
        """`index`: the draft model's among the proposers. `max_tokens`: of one draft."""
        self.model = model
        self._index, self._max_tokens, self._policy = index, max_tokens, policy
        self._trials = Trials()
        self._pays = True  # when it was last looked at
        self._prompt_seconds = 0.0  # of the large model, a token
        self._counted = 0.0  # seconds of drafting that were taken out of a step's

    def guess(
        self,
        due: Sequence[Request],
        limits: Sequence[int],
        acceptance: Sequence[RequestAcceptance],
        chances: Sequence[Sequence[float]],
        num_tokens: int,
        room: int,
    ) -> dict[int, Draft]:
        """Guesses of the draft model for some of the requests `due`, by their places there.

        `chances`: of what others have guessed, as of RequestAcceptance.chances. `num_tokens` of the step, in
        which there is room for `room` guesses.
        """
        if not self.model.available:
            return {}
        own: dict[int, list[float]] = {}
        for i, request in enumerate(due):
            limit = min(limits[i], self._max_tokens, self.model.limit(request))
            if limit > 0:
                foreseen = acceptance[i].foresee(self._index, MATCH, limit)
                if sum(foreseen) > sum(chances[i]):
                    own[i] = foreseen
        counts = self._counts(due, own, chances, room)
        if not counts and self._trials.due:
            return self._try(due, limits, chances, num_tokens)
        return self._run(due, counts, num_tokens)

    def _counts(
        self,
        due: Sequence[Request],
        own: dict[int, list[float]],
        chances: Sequence[Sequence[float]],
        room: int,
    ) -> dict[int, int]:
        """Tokens to guess, by place; {}: none, since it would not pay."""
        if not own:
            self._pays = False
            self._trials.decline()
            return {}
        cost = self._policy.cost
        base = max(
            tokens_per_second(cost, chances, counts)
            for counts in ([0] * len(due), self._policy.best(chances, room))
        )
        rest = [[] if i in own else each for i, each in enumerate(chances)]
        counts = self._policy.best(rest, room)
        others = sum(sum(each[:count]) for each, count in zip(rest, counts, strict=True)), sum(counts)
        catch_up = sum(min(READY, self.model.num_behind(due[i]) - 1) for i in own)
        length = best_length(
            base, len(due), others, list(own.values()), catch_up, room, cost, self.model.cost
        )
        length = self._policy.shaped(length)
        self._pays = length > 0
        if length:
            self._trials.paid()
        else:
            self._trials.decline()
        return {i: min(length, len(each)) for i, each in own.items()} if length else {}

    def _try(
        self,
        due: Sequence[Request],
        limits: Sequence[int],
        chances: Sequence[Sequence[float]],
        num_tokens: int,
    ) -> dict[int, Draft]:
        """A short draft for the request that is least behind, of those for which nothing was found."""
        able = [i for i, each in enumerate(chances) if not each and self.model.limit(due[i]) > 0]
        if not able:
            return {}
        one = min(able, key=lambda i: self.model.num_behind(due[i]))
        found = self._run(due, {one: min(limits[one], TRIAL_TOKENS, self._max_tokens)}, num_tokens)
        if found:
            self._trials.made()
        return found

    def _run(self, due: Sequence[Request], counts: dict[int, int], num_tokens: int) -> dict[int, Draft]:
        if not counts:
            return {}
        seconds = float(self._policy.cost.estimate(num_tokens, 1)[0])
        budget = catch_up_tokens(seconds, len(counts), self.model.max_step_tokens, self.model.cost)
        found = self.model.guess([due[i] for i in counts], list(counts.values()), max(READY, budget))
        return {i: Draft(tokens, MATCH) for i, tokens in zip(counts, found, strict=True) if tokens}

    def read(self, requests: Sequence[Request], num_tokens: int) -> None:
        """See drafts.Drafter. The draft model may read some of these prompts, in a part of the time."""
        if self._pays and num_tokens and self.model.available:
            seconds = num_tokens * self._prompt_seconds
            budget = catch_up_tokens(seconds, 1, self.model.max_step_tokens, self.model.cost)
            if budget > READY:
                self.model.guess(requests, [0] * len(requests), budget)

    def take_seconds(self, seconds: float, num_prompt_tokens: int) -> float:
        """What of a step's time was not spent here. Of a step of prompts it says what their tokens cost."""
        spent = self.model.seconds - self._counted
        self._counted = self.model.seconds
        left = max(seconds - spent, 0.1 * seconds)  # in a pipeline both may be at the same time
        if num_prompt_tokens:
            self._prompt_seconds = left / num_prompt_tokens
        return left

    def check_invariants(self) -> None:
        self.model.check_invariants()
        self._trials.check_invariants()
