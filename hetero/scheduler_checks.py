"""What must hold between the scheduler's queues, its requests and the KV manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from hetero.admission import MAX_PREEMPTIONS
from hetero.request import Request, RequestStatus

if TYPE_CHECKING:
    from hetero.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, known: Collection[Request]) -> None:
    """Raise AssertionError unless all agree. O(everything). `known`: see Scheduler.check_invariants."""
    scheduler.kv.check_invariants()
    queues = scheduler._queues
    queues.check_invariants()
    order = [r.request_id for r in (*queues.running, *queues.waiting)]
    assert scheduler._num_embedding == sum(r.embeds for r in scheduler._requests.values())
    held = [r.request_id for r in scheduler.held]
    assert set(scheduler._requests) == {*order, *held}
    assert len(scheduler._requests) == len(order) + len(held)
    assert len(queues.running) <= scheduler.max_num_seqs
    in_flight = Counter(id(r) for step in scheduler._steps.values() for r in step.requests)
    steps = scheduler._steps.values()
    assert all(r.embeds == step.embeds for step in steps for r in step.requests), "a step of both kinds"
    sampling = [id(r) for s in steps for r, due in zip(s.requests, s.sampled, strict=True) if due]
    assert len(set(sampling)) == len(sampling), "a request waits for two next tokens"
    for request in queues.running:
        assert request.status is RequestStatus.RUNNING
        assert request.num_in_flight == in_flight[id(request)]
        waits = request.num_computed_tokens == request.num_tokens
        assert waits == (id(request) in sampling)
        assert request.num_preemptions <= MAX_PREEMPTIONS or not queues.only_one_priority
        assert request.num_computed_tokens <= request.num_tokens < scheduler.max_total_tokens(request)
    for request in queues.waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert not request.in_flight and not request.block_tables
    for request in known:
        assert (request.status is RequestStatus.FINISHED) == (request.request_id not in scheduler._requests)
        assert 0 <= request.num_cached_tokens < len(request.prompt_token_ids)
        if request.status is RequestStatus.FINISHED:
            assert not request.block_tables and (scheduler._doomed or not request.in_flight)
    steps = scheduler._steps.values()
    assert scheduler.kv.num_pinned == sum(len(step.copies) + len(step.loads) for step in steps)
