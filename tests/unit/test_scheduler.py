"""What the scheduler promises, one promise per test."""

from __future__ import annotations

import random

import pytest
from simulated_cases import Case
from simulation import Outcome, Simulation

from hetero.admission import MAX_PREEMPTIONS
from hetero.batch import Step
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.request import FinishReason, Request, RequestError, RequestStatus
from hetero.sampling.params import SamplingParams
from hetero.scheduler import Scheduler

SIZE = 16


def request(name: str, prompt: list[int] | int, max_tokens: int | None = None) -> Request:
    ids = prompt if isinstance(prompt, list) else [hash((name, i)) % 1000 for i in range(prompt)]
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def groups(tokens: int, *windows: int | None) -> list[KVGroup]:
    return [KVGroup((g,), window, tokens // SIZE + 1) for g, window in enumerate(windows or (None,))]


def play(requests: list[Request], pool: list[KVGroup], depth: int = 1, budget: int = 512) -> Outcome:
    case = Case(pool, SIZE, depth, 64, budget, 10**6, requests, [0] * len(requests))
    return Simulation(case, random.Random(0)).run()


def scheduler(pool: list[KVGroup] | None = None, budget: int = 8, depth: int = 1, seqs: int = 8) -> Scheduler:
    return Scheduler(KVManager(pool or groups(1024), SIZE), seqs, budget, 10**6, depth)


def run_step(s: Scheduler, step: Step | None = None) -> Step:
    """Schedule, unless done, and take in a step whose every sampled token is 7."""
    step = step or s.schedule()
    assert step is not None
    s.update(step, [7 if sampled else None for sampled in step.sampled])
    s.check_invariants()
    return step


def served(step: Step) -> dict[str, int]:
    counts = zip(step.requests, step.num_scheduled_tokens, strict=True)
    return {r.request_id: count for r, count in counts}


@pytest.mark.parametrize(
    ("depth", "windows"), [(1, (None,)), (2, (None,)), (3, (None,)), (1, (None, 512)), (1, (512,))]
)
def test_full_pool_of_2048_tokens(depth: int, windows: tuple[int | None, ...]) -> None:
    requests = [request(f"r{i}", 128, 512) for i in range(8)]
    play(requests, groups(2048, *windows), depth)
    for r in requests:
        assert len(r.output_token_ids) == 512 and r.num_preemptions <= MAX_PREEMPTIONS <= 4
    if windows[0] is None:
        assert sum(r.num_preemptions for r in requests) > 0


def test_one_large_request_among_small_ones() -> None:
    requests = [request(f"s{i}", 100, 300) for i in range(4)]
    requests.insert(2, request("large", 1900, 100))
    play(requests, groups(2048))
    assert all(len(r.output_token_ids) == r.params.max_tokens for r in requests)


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    s = scheduler(groups(2048))
    for tokens in (2048, 2100):
        with pytest.raises(RequestError, match=str(tokens)) as refused:
            s.add(request("huge", tokens))
        assert refused.value.code == "context_length_exceeded" and "2048" in str(refused.value)
    with pytest.raises(RequestError):
        s.add(request("empty", 0))
    assert not s.has_work and s.schedule() is None
    last = request("last", 2047, 5)
    play([last], groups(2048))
    assert len(last.output_token_ids) == 1 and last.finish_reason is FinishReason.LENGTH


def test_windows_bound_what_a_long_sequence_needs() -> None:
    r = request("long", 300, 500)
    play([r], groups(80, 33), budget=32)
    assert len(r.output_token_ids) == 500


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 512)])
def test_sixteen_clients_compute_a_shared_prefix_once(windows: tuple[int | None, ...], depth: int) -> None:
    prefix = list(range(1200))
    requests = [request(f"r{i}", prefix + [2000 + 100 * i + k for k in range(100)], 4) for i in range(16)]
    out = play(requests, groups(16384, *windows), depth)
    alone = 1200 + 16 * (100 + 3)
    assert out.computed <= alone + depth * 2 * SIZE * 16, "the prefix was computed again"
    assert sum(r.num_cached_tokens for r in requests) >= 15 * 1200 - depth * 2 * SIZE * 16


def test_a_follow_up_turn_computes_only_what_is_new() -> None:
    s = scheduler(budget=512)
    first = request("first", 100, 9)
    s.add(first)
    while s.has_work:
        run_step(s)
    known = first.prompt_token_ids + first.output_token_ids[:-1]  # the last token was never computed
    second = request("second", [*known, 7, 1, 2, 3], 1)
    s.add(second)
    step = run_step(s)
    assert served(step) == {"second": 4} and second.num_cached_tokens == len(known)
    assert len(step.copies) == 1, "the last block was partly filled"
    again = request("again", list(second.prompt_token_ids), 1)
    s.add(again)
    assert served(run_step(s)) == {"again": 1} and again.num_cached_tokens == 111


def test_a_chunk_leaves_room_for_running_streams() -> None:
    s = scheduler(budget=8, depth=2)
    s.add(request("long", 40))
    x = s.schedule()
    for name in ("a", "b"):
        s.add(request(name, 2))
    y = s.schedule()
    assert x and y and served(x) == {"long": 8} and served(y) == {"long": 6, "a": 2}
    run_step(s, x)
    run_step(s, y)
    x, y = s.schedule(), s.schedule()
    assert x and y and served(x) == {"long": 6, "b": 2} and served(y) == {"a": 1, "long": 7}


def test_micro_batches_share_the_running_requests() -> None:
    s = scheduler(budget=64, depth=3, seqs=7)
    for i in range(9):
        s.add(request(f"r{i}", 3))
    steps = [s.schedule() for _ in range(3)]
    assert [len(step.requests) for step in steps if step] == [3, 3, 1]
    assert s.schedule() is None and s.num_waiting == 2
    for step in steps:
        run_step(s, step)
        s.schedule()
    assert s.num_in_flight == 3


def test_more_sequences_than_the_budget_are_not_run_at_once() -> None:
    s = scheduler(budget=4, seqs=8)
    for i in range(6):
        s.add(request(f"r{i}", 1))
    for _ in range(3):
        assert len(run_step(s).requests) == 4


def test_the_newest_is_preempted_for_the_oldest_and_comes_back_first() -> None:
    s = scheduler(groups(8 * SIZE), budget=512)
    old, new, late = request("old", 40), request("new", 30), request("late", 90)
    for r in (old, new, late):
        s.add(r)
    preempted: list[str] = []
    while not preempted:
        step = run_step(s)
        preempted = step.preempted_ids
    assert preempted == ["new"] and new.status is RequestStatus.PREEMPTED
    assert "old" in served(step) and not new.block_tables
    while old.finish_reason is None:
        assert served(run_step(s)) == {"old": 1}, "nobody is admitted after a preemption"
    assert "new" in served(run_step(s)) and late.num_computed_tokens == 0
    assert new.num_preemptions == 1 and new.num_cached_tokens == 0


def test_after_three_preemptions_a_request_waits_for_its_worst_case() -> None:
    s = scheduler(groups(8 * SIZE), budget=512)
    often = request("often", 16, 64)
    often.num_preemptions = MAX_PREEMPTIONS
    s.add(request("first", 16, 64))
    run_step(s)
    s.add(often)
    assert served(run_step(s)) == {"first": 1}, "80 + 80 tokens do not fit into 128"
    while "often" not in served(run_step(s)):
        pass
    assert s.num_running == 1
    s.add(request("newer", 16, 64))
    while s.has_work:
        run_step(s)
    assert often.num_preemptions == MAX_PREEMPTIONS


def test_cancel_in_every_state() -> None:
    s = scheduler(budget=64, seqs=1)
    flying, waiting = request("flying", 20), request("waiting", 20)
    s.add(flying)
    s.add(waiting)
    step = s.schedule()
    assert s.abort("waiting") is waiting and waiting.finish_reason is FinishReason.ABORT
    assert s.abort("flying") is None and flying.block_tables
    run_step(s, step)
    assert flying.finish_reason is FinishReason.ABORT and not flying.block_tables
    assert s.abort("flying") is None and s.abort("nobody") is None
    idle = request("idle", 20)
    s.add(idle)
    run_step(s)
    assert s.abort("idle") is idle and not s.has_work
    again = request("again", list(idle.prompt_token_ids), 1)
    s.add(again)
    run_step(s)
    assert again.num_cached_tokens == 19, "what it had computed stays known"
    assert s.kv.available_blocks() == [64] and s.counters.finished[FinishReason.ABORT] == 3


def test_a_failed_step_forgets_the_cache() -> None:
    s = scheduler(budget=64, depth=2)
    a, b, c = (request(name, 40) for name in "abc")
    s.add(a)
    s.add(b)
    x, y = s.schedule(), s.schedule()
    assert x and y
    s.add(c)
    assert s.update(x, [None], failed=True) == [a] and s.is_doomed(y)
    assert s.update(y, [7]) == [b] and b.output_token_ids == []
    assert {a.finish_reason, b.finish_reason} == {FinishReason.ERROR} and s.kv.tree.num_nodes == 0
    d = request("d", list(a.prompt_token_ids), 1)
    s.add(d)
    while s.has_work and d.finish_reason is None:
        run_step(s)
    assert d.num_cached_tokens == 0 and d.finish_reason is FinishReason.LENGTH


def test_a_request_without_its_token_ends_with_an_error() -> None:
    s = scheduler()
    r = request("r", 3)
    s.add(r)
    with pytest.raises(ValueError, match="already"):
        s.add(r)
    step = s.schedule()
    assert step and s.update(step, [None]) == [r] and r.finish_reason is FinishReason.ERROR
    with pytest.raises(ValueError, match="limits"):
        scheduler(budget=0)


def test_a_waiting_request_is_admitted_as_soon_as_there_is_room() -> None:
    s = scheduler(groups(8 * SIZE), budget=512)
    big, next_one = request("big", 100), request("next", 100)
    s.add(big)
    s.add(next_one)
    for _ in range(3):
        assert served(run_step(s)).keys() == {"big"}
    s.abort("big")
    assert served(run_step(s)) == {"next": 100}


def test_what_was_not_computed_does_not_count_as_computed() -> None:
    s = scheduler(budget=8, seqs=1)
    for name in ("half", "never"):
        s.add(request(name, 20))
    step = s.schedule()
    assert step is not None
    s.update(step, [None])
    for name in ("half", "never"):
        s.abort(name)
    assert s.counters.tokens_from() == {"device": 0, "host": 0, "computed": 8}


class Guesses:
    """As many tokens as may be."""

    def draft(self, due, limits, num_tokens, room, /) -> list[list[int]]:
        return [[7] * limit for limit in limits]

    def read(self, requests, num_tokens, /) -> None:
        return


@pytest.mark.parametrize(("depth", "free"), [(1, 0), (2, 2)])
def test_guesses_leave_blocks_to_those_who_are_served_meanwhile(depth: int, free: int) -> None:
    s = scheduler(groups(4 * SIZE), budget=64, depth=depth)
    for name in "ab":
        s.add(request(name, 15, 17))
    steps = [s.schedule() for _ in range(depth)]
    run_step(s, steps[0])
    assert s.num_running == 2 and s.kv.available_blocks() == [2]
    s.drafter = Guesses()
    step = s.schedule()
    assert step is not None and any(step.drafts) == (depth == 1)
    assert s.kv.available_blocks() == [free]
