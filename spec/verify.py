"""Which guesses are right, by asking for each next token exactly as if there were no guesses.

The model has computed a sequence's last known token and its draft in one step:

    row        0     1     2     3
    computed   x     d0    d1    d2        draft d0 d1 d2
    sampled    d0    d1    e     -         d0 and d1 are right, e replaces d2, row 3 means nothing

Row i is sampled only when all guesses before it are right, so each token comes from the distribution that
follows the tokens before it, with the same penalties, masks and random numbers. A guess d is kept with its
own probability p(d), and otherwise the token has the distribution p without d: that is the acceptance rule of
speculative sampling (Leviathan, Kalman, Matias 2023; Chen and others 2023) for a proposal that is a point.
Here even the same text comes out, sampled or greedy, as without guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def verify(
    drafts: Sequence[Sequence[int]], sample: Callable[[list[int], int], Sequence[int | None]]
) -> list[int]:
    """How many leading tokens of each sequence's draft are right.

    `sample(which, row)` has to sample row `row` of each of the sequences `which` and to take the token in.
    It returns the tokens, None for a sequence that ends with it. It is called for ascending rows.
    """
    accepted = [0] * len(drafts)
    going, row = list(range(len(drafts))), 0
    while going:
        tokens = sample(going, row)
        right = []
        for i, token in zip(going, tokens, strict=True):
            if token is not None and row < len(drafts[i]) and token == drafts[i][row]:
                accepted[i] += 1
                right.append(i)
        going, row = right, row + 1
    return accepted
