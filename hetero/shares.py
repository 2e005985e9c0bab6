"""How much of the work one step takes when a pipeline has several in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero.batch import Step
from hetero.queues import Queues
from hetero.request import Request

CONTEXT_COST = 4096  # tokens of context that cost about as much as one more token in a step
MIN_CHUNK = 64  # tokens; a prompt that is spread over a pipeline is not cut smaller

NEWCOMERS = (
    4  # one part in so many of a step is kept from a prompt that is being caught up, for those that wait
)


def take_share(ready: Sequence[Request], running: Iterable[Request], depth: int) -> list[Request]:
    """The beginning of `ready` that costs about 1/depth of what all of `running` cost, and not less.

    Not less: depth shares then always serve everybody, and nobody waits for a share that never comes.
    """
    if depth == 1:
        return list(ready)
    goal = sum(map(_cost, running)) / depth
    for count, request in enumerate(ready):
        if goal <= 0:
            return list(ready[:count])
        goal -= _cost(request)
    return list(ready)


def micro_batch(running: Sequence[Request], lost: set[int], depth: int) -> list[Request]:
    """Those of `running` that have tokens to compute and whose turn it is, none whose id() is in `lost`."""
    ready = [
        r
        for r in running
        if r.num_computed_tokens < r.num_tokens and not r.abort_requested and id(r) not in lost
    ]
    idle = [r for r in ready if not r.in_flight]
    chosen = set(map(id, take_share(idle, running, depth)))
    return [r for r in ready if r.in_flight or id(r) in chosen]


def turns(embedded: bool, embedding: int, here: int) -> tuple[bool, ...]:
    """Which kinds of step to try, in this order: whether it embeds. The last one did if `embedded`; so many
    of the requests that are `here` are for embeddings."""
    if embedding in (0, here):
        return (embedding > 0,)
    return (not embedded, embedded)


def share_of(count: int, depth: int) -> int:
    """1/depth of a count, rounded up."""
    return -(-count // depth)


def token_budget(requests: Iterable[Request], most: int, depth: int) -> int:
    """Tokens for one step, at most `most`: 1/depth of what `requests` have to catch up with.

    Stages then work at the same time on one prompt; alone on its device a step takes what it can.
    """
    if depth == 1:
        return most
    todo = sum(r.num_tokens - r.num_computed_tokens for r in requests)
    return min(most, max(MIN_CHUNK, share_of(todo, depth)))


def chunk(queues: Queues, request: Request, budget: int, step: Step, most: int) -> int:
    """Of `budget` tokens those that a prompt may take of a step of at most `most`.

    While more important requests run, all less important prompts together get a part of it, so that it does
    not last.
    """
    if not queues.is_behind(request):
        return budget
    counts = zip(step.requests, step.num_scheduled_tokens, strict=True)
    taken = sum(count for r, count in counts if count > 1 and queues.is_behind(r))
    return min(budget, max(1, most // NEWCOMERS) - taken)


def kept_for_newcomers(budget: int, anybody_waits: bool) -> int:
    """Tokens of a step that a long prompt leaves to requests that wait to be admitted.

    Without it a short question behind a long document would wait for all of the document.
    """
    return budget // NEWCOMERS if anybody_waits else 0


def _cost(request: Request) -> float:
    return 1.0 + request.num_tokens / CONTEXT_COST
