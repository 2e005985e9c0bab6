"""What guesses the next tokens of one request.

A request has a proposer of its own, made when the request starts. The engine tells it every token that is
certain, first the prompt and then whatever was sampled, and asks for a draft when it wants one:

    proposer.extend(prompt)       proposer.extend([t])          proposer.extend([a, b, c])
         proposer.propose(8) -> Draft      proposer.propose(8) -> Draft (of which a and b were right)

Drafts are never told: a proposer knows verified tokens only, so nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """Guessed tokens, and on how many tokens of context they rest: the more, the likelier they are."""

    token_ids: list[int]
    match_length: int  # 0: nothing like the context was seen before, and the draft is empty


class Proposer(Protocol):
    """Guesses the tokens that follow a request's own. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """What metrics call this kind of proposer: one word."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the request's next verified tokens. Amortized O(1) for each."""

    def propose(self, max_tokens: int) -> Draft:
        """At most `max_tokens` tokens likely to follow. Changes nothing; never raises."""
